"""Arguments of past tool calls as XTML argument elements.

Two revisions of Moonshot's encoder differ in how they treat arguments that
come as a JSON string: R1 parses and re-dumps, R2 keeps each value's own bytes.
"""

import json
from collections.abc import Mapping
from enum import StrEnum
from json.decoder import JSONDecodeError, JSONDecoder

from k3jax.chat.segments import Segment, element, text_body

_JSON_SPACE = " \t\n\r"
# R2 keeps literals, so numbers are parsed for their type alone; `float` takes integers of any length.
_DECODER = JSONDecoder(parse_int=float)


class Revision(StrEnum):
    """Revision of the reference encoder: R1 (launch) or R2 (since the end of July 2026)."""

    R1 = "R1"
    R2 = "R2"


def arguments_body(arguments: object, field: str, revision: Revision) -> list[Segment]:
    """Argument elements of one call, or one raw JSON block when the string is no JSON object.

    `field` names the place in error messages. Raises ValueError for a type
    that cannot be arguments or is nested too deeply and, under R1, for JSON
    that is not an object and for integers too long for Python.
    """
    if arguments is None or arguments == "":
        return []
    if isinstance(arguments, Mapping):
        return _from_mapping(arguments, field)
    if not isinstance(arguments, str):
        raise ValueError(f"{field} is {_kind(arguments)}; expected an object or a JSON string")
    return _from_string_r1(arguments, field) if revision is Revision.R1 else _from_string_r2(arguments)


def _from_mapping(arguments: Mapping[object, object], field: str) -> list[Segment]:
    segments: list[Segment] = []
    for key, value in arguments.items():
        if not isinstance(key, str):
            raise ValueError(f"{field} has the key {key!r}; expected a string")
        segments += _argument(key, type_name(value, f"{field}.{key}"), _literal(value, f"{field}.{key}"))
    return segments


def _from_string_r1(text: str, field: str) -> list[Segment]:
    if not text.strip():
        return []
    try:
        value = json.loads(text)
    except (JSONDecodeError, RecursionError):
        return _raw_block(text)
    except ValueError as error:
        raise ValueError(f"{field} cannot be read under revision R1: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{field} is the JSON of {_kind(value)}; revision R1 takes only an object")
    return _from_mapping(value, field)


def _from_string_r2(text: str) -> list[Segment]:
    try:
        literals = split_object(text)
    except (JSONDecodeError, RecursionError):
        return _raw_block(text)
    segments: list[Segment] = []
    for key, (value, literal) in literals.items():
        segments += _argument(key, type_name(value, key), value if isinstance(value, str) else literal)
    return segments


def split_object(text: str) -> dict[str, tuple[object, str]]:
    """Key -> (value, its literal in `text`) of the JSON object that `text` starts with.

    What follows the closing brace is ignored; a repeated key keeps its last
    value. Raises JSONDecodeError when `text` does not start with an object.
    """
    at = _skip_space(text, 0)
    _expect(text, at, "{")
    at = _skip_space(text, at + 1)
    found: dict[str, tuple[object, str]] = {}
    if text[at : at + 1] == "}":
        return found
    while True:
        _expect(text, at, '"')
        key, at = _DECODER.raw_decode(text, at)
        at = _skip_space(text, at)
        _expect(text, at, ":")
        start = _skip_space(text, at + 1)
        value, end = _DECODER.raw_decode(text, start)
        found[key] = (value, text[start:end])
        at = _skip_space(text, end)
        if text[at : at + 1] == "}":
            return found
        _expect(text, at, ",")
        at = _skip_space(text, at + 1)


def _skip_space(text: str, at: int) -> int:
    while text[at : at + 1] in _JSON_SPACE and at < len(text):
        at += 1
    return at


def _expect(text: str, at: int, char: str) -> None:
    if text[at : at + 1] != char:
        raise JSONDecodeError(f"Expecting {char!r}", text, at)


def type_name(value: object, field: str) -> str:
    """The wire's name of a value's type; raises ValueError for a value that JSON does not have."""
    # bool before int: Python's True is an int.
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (bool, "boolean"),
        (type(None), "null"),
        ((int, float), "number"),
        (str, "string"),
        (Mapping, "object"),
        ((list, tuple), "array"),
    )
    for kind, name in kinds:
        if isinstance(value, kind):
            return name
    raise ValueError(f"{field} is {_kind(value)}; expected a JSON value")


def _literal(value: object, field: str) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{field} cannot be written as JSON: {error}") from error


def _argument(key: str, kind: str, value: str) -> list[Segment]:
    return element("argument", ("key", key), ("type", kind), body=text_body(value))


def _raw_block(text: str) -> list[Segment]:
    return element("json", ("type", "object"), body=text_body(text))


def _kind(value: object) -> str:
    try:
        shown = str(value)
    except (ValueError, RecursionError):  # an integer too long or a value too deep to show
        shown = "..."
    return f"a {type(value).__name__} ({shown[:40]!r})"
