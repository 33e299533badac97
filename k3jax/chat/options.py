"""System messages that carry request options: tools, effort, tool choice, response format."""

from collections.abc import Mapping, Sequence

from k3jax.chat.segments import Segment, message, sorted_json, text_body

EFFORTS = ("low", "high", "max")

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_NEW_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n"


def _option(kind: str, text: str) -> list[Segment]:
    return message(("role", "system"), ("type", kind), body=text_body(text))


def _fenced(json_text: str) -> str:
    return f"```json\n{json_text}\n```"


def tool_declaration(tools: object, field: str, *, dynamic: bool) -> list[Segment]:
    """The message that declares `tools` (a list of objects); nothing for an empty list or None.

    `dynamic` is the wording of a system message that extends the tools.
    Raises ValueError naming `field`.
    """
    if not tools:
        return []
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError(f"{field} is a {type(tools).__name__}; expected a list of tool objects")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ValueError(f"{field}[{i}] is a {type(tool).__name__}; expected an object")
    heading = _NEW_TOOLS if dynamic else _TOOLS
    return _option("tool-declare", heading + _fenced(_json(list(tools), field)))


def effort_message(effort: str | None) -> list[Segment]:
    """The thinking-effort message; nothing for None. Raises ValueError unless low, high or max."""
    if effort is None:
        return []
    if effort not in EFFORTS:
        raise ValueError(f"thinking_effort is {effort!r}; expected one of {', '.join(EFFORTS)}, or None")
    return _option("thinking-effort", _EFFORT.format(effort))


def tool_choice_message(choice: object) -> list[Segment]:
    """The message for `required` and `none`; nothing for `auto`, None or a named tool."""
    if choice is None or choice == "auto" or isinstance(choice, Mapping):
        return []
    if not isinstance(choice, str) or choice not in _TOOL_CHOICE:
        raise ValueError(f"tool_choice is {choice!r}; expected auto, required, none or a named tool object")
    return _option("tool-choice", _TOOL_CHOICE[choice])


def response_format_message(response_format: object, response_schema: object = None) -> list[Segment]:
    """The message for `json_object` and `json_schema`; nothing for `text` or None.

    `response_schema` goes before the schema inside `response_format`.
    """
    if response_format is None:
        return []
    if not isinstance(response_format, Mapping):
        raise ValueError(f"response_format is a {type(response_format).__name__}; expected an object with a 'type'")
    kind = response_format.get("type")
    if kind == "text":
        return []
    if kind not in ("json_object", "json_schema"):
        raise ValueError(f"response_format.type is {kind!r}; expected text, json_object or json_schema")
    text = _RESPONSE_FORMAT.format(kind)
    if kind == "json_schema":
        schema = _schema(response_format.get("json_schema")) if response_schema is None else response_schema
        text += _SCHEMA + _fenced(_json(schema, "response_format.json_schema"))
    return _option("response-format", text)


def _schema(declared: object) -> object:
    if isinstance(declared, Mapping):
        for key in ("schema", "json_schema"):
            if declared.get(key) is not None:
                return declared[key]
    return declared


def _json(value: object, field: str) -> str:
    try:
        return sorted_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{field} cannot be written as JSON: {error}") from error
