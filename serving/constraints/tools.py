"""Tool calls as a structural tag: the tools channel of XTML with arguments of the declared types."""

from collections.abc import Mapping, Sequence
from typing import Any

from k3jax.chat.segments import escape
from k3jax.tokenizer import control as control_tokens
from serving.constraints.errors import ConstraintError

_OPEN, _CLOSE, _SEP = control_tokens.OPEN, control_tokens.CLOSE, control_tokens.SEP
_MARKERS = [_OPEN, _CLOSE, _SEP]
_TYPES = ("string", "number", "boolean", "null", "object", "array")
"""Types that an argument can name; integers are numbers."""


def tool_calls(tools: Sequence[Mapping[str, object]], choice: str = "required") -> dict[str, Any]:
    """The value of a `structural_tag` constraint: at least one call.

    Args:
      tools: tool objects as in a chat request.
      choice: `required` for any of them, or one tool's name.

    Raises `ConstraintError` when there is no such tool.
    """
    functions = [tool.get("function", tool) for tool in tools]
    chosen = [f for f in functions if isinstance(f, Mapping) and choice in ("required", f.get("name"))]
    if not chosen:
        names = ", ".join(str(f.get("name")) for f in functions if isinstance(f, Mapping)) or "none"
        raise ConstraintError("tool_choice", f"no tool is named {choice!r}; declared are {names}")
    begin = f"{_OPEN}tools{_SEP}"
    calls = {"type": "plus", "content": {"type": "or", "elements": [_call(function) for function in chosen]}}
    tag = {"begin": begin, "content": calls, "end": f"{_CLOSE}tools{_SEP}"}
    leaving = {**tag, "begin": f"{_CLOSE}response{_SEP}{begin}"}
    return {
        "format": {
            "type": "triggered_tags",
            "triggers": [begin, f"{_CLOSE}response{_SEP}"],
            "tags": [tag, leaving],
            "at_least_one": True,
            "stop_after_first": True,
        }
    }


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    head = f'{_OPEN}call tool="{escape(str(function.get("name", "")))}" index="'
    parameters = function.get("parameters")
    arguments = _arguments(parameters if isinstance(parameters, Mapping) else {})
    return _sequence(
        _const(head), {"type": "regex", "pattern": "[1-9][0-9]{0,2}"}, _const(f'"{_SEP}'), *arguments,
        _const(f"{_CLOSE}call{_SEP}"),
    )  # fmt: skip


def _arguments(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        return [{"type": "star", "content": _any_argument()}]
    required = schema.get("required", ())
    required = required if isinstance(required, Sequence) else ()
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts = []
    for key, value in properties.items():
        declared = value if isinstance(value, Mapping) else {}
        options = [_argument(key, kind, {**declared, **definitions}) for kind in _types(declared)]
        argument = options[0] if len(options) == 1 else {"type": "or", "elements": options}
        parts.append(argument if key in required else {"type": "optional", "content": argument})
    return parts


def _argument(key: str, kind: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    head = f'{_OPEN}argument key="{escape(key)}" type="{kind}"{_SEP}'
    return _sequence(_const(head), _value(kind, schema), _const(f"{_CLOSE}argument{_SEP}"))


def _value(kind: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if kind != "string":
        return {"type": "json_schema", "json_schema": {**schema, **_narrow(kind, schema)}}
    if isinstance(allowed, Sequence):
        return {"type": "or", "elements": [_const(item) for item in allowed if isinstance(item, str)]}
    if isinstance(schema.get("pattern"), str):
        # A pattern of JSON Schema need not span the string; between the markers it has to.
        return {"type": "regex", "pattern": _spanning(schema["pattern"])}
    return {"type": "any_text", "excludes": _MARKERS}


def _narrow(kind: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema's type where it names several, and the enumerated values of that type."""
    narrowed: dict[str, Any] = {}
    if isinstance(schema.get("type"), Sequence) and not isinstance(schema.get("type"), str):
        integers = kind == "number" and "number" not in schema["type"]
        narrowed["type"] = "integer" if integers else kind
    if isinstance(schema.get("enum"), Sequence):
        narrowed["enum"] = [item for item in schema["enum"] if _type_of(item) == kind]
    return narrowed


def _types(schema: Mapping[str, Any]) -> list[str]:
    """The argument types that a schema admits; all of them where it does not say."""
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared
    if isinstance(names, Sequence):
        found = ["number" if name == "integer" else str(name) for name in names]
    else:
        values = schema.get("enum", [schema["const"]] if "const" in schema else ())
        found = [_type_of(value) for value in values] if isinstance(values, Sequence) else []
    return [kind for kind in _TYPES if kind in found] or list(_TYPES)


def _type_of(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    kinds = ((str, "string"), (int | float, "number"), (Mapping, "object"))
    return next((kind for python, kind in kinds if isinstance(value, python)), "array")


def _spanning(pattern: str) -> str:
    start = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if pattern.endswith("$") and not pattern.endswith(r"\$") else "(?s:.*)"
    return f"{start}({pattern.removeprefix('^')[: -1 if not end else None]}){end}"


def _any_argument() -> dict[str, Any]:
    quoted = {"type": "any_text", "excludes": ['"', "<|"]}
    string = _sequence(_const(f'" type="string"{_SEP}'), {"type": "any_text", "excludes": _MARKERS})
    others = [
        _sequence(_const(f'" type="{kind}"{_SEP}'), {"type": "json_schema", "json_schema": {"type": kind}})
        for kind in _TYPES[1:]
    ]
    value = {"type": "or", "elements": [string, *others]}
    return _sequence(_const(f'{_OPEN}argument key="'), quoted, value, _const(f"{_CLOSE}argument{_SEP}"))


def _const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}
