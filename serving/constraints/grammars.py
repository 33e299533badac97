"""Schemas, regular expressions, grammars and choices as llguidance grammars that can be put inside another one."""

import json
from collections.abc import Callable, Mapping, Sequence

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from serving.constraints.errors import ConstraintError

Grammar = dict[str, object]
"""One entry of llguidance's list of grammars: a `lark_grammar` or a `json_schema`."""

WHITESPACE = r"[ \n\t]{1,32}"
"""Between the tokens of JSON; without a bound a model could go on with blanks for ever."""


def body_of(kind: str, value: object) -> Grammar:
    """The grammar of a request's constraint. Raises `ConstraintError`."""
    if kind not in _BODIES:
        raise ConstraintError(kind, f"this is no kind of constraint; expected {', '.join(KINDS)}")
    return _BODIES[kind](value)


def json_schema(value: object) -> Grammar:
    """A JSON value that the schema (text, object or boolean) allows."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConstraintError("json_schema", f"the schema is not JSON: {error}") from error
    if isinstance(value, bool):
        value = {} if value else {"enum": []}
    if not isinstance(value, Mapping):
        raise ConstraintError("json_schema", f"the schema is a {type(value).__name__}; expected an object")
    return {"json_schema": {**value, "x-guidance": {"whitespace_pattern": WHITESPACE}}}


def json_object(value: object) -> Grammar:
    """Any JSON object."""
    if value is not True:
        raise ConstraintError("json_object", f"the value is {value!r}; expected true")
    return json_schema({"type": "object"})


def regex(value: object) -> Grammar:
    """Text that the regular expression matches from its first to its last character."""
    return lark(f"start: /{llguidance.regex_to_lark(_text('regex', value), '')}/")


def grammar(value: object) -> Grammar:
    """Text of a Lark grammar (with a rule `start`) or a GBNF one (with `root ::=`)."""
    text = _text("grammar", value)
    try:
        return lark(any_to_lark(text))
    except Exception as error:  # the converter raises whatever its parser met
        raise ConstraintError("grammar", f"neither Lark nor GBNF: {error}") from error


def choice(value: object) -> Grammar:
    """One of several strings."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConstraintError("choice", f"the value is {value!r}; expected at least one string")
    return lark("start: " + " | ".join(literal(_text("choice", item)) for item in value))


def lark(text: str) -> Grammar:
    """Lark text as a grammar."""
    return {"lark_grammar": text}


def literal(text: str) -> str:
    """A string in Lark."""
    return json.dumps(text)


def _text(kind: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConstraintError(kind, f"the value is {value!r}; expected text")
    if not value and kind != "choice":
        raise ConstraintError(kind, "the text is empty; leave the constraint out to allow everything")
    return value


_BODIES: Mapping[str, Callable[[object], Grammar]] = {
    "json_schema": json_schema,
    "json_object": json_object,
    "regex": regex,
    "grammar": grammar,
    "choice": choice,
}
KINDS = (*_BODIES, "structural_tag")
