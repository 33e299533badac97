"""The tools channel: call elements to names and JSON arguments, as they arrive.

String arguments stream as JSON-escaped text, other arguments come when their
close tag does, in their own spelling (so that rendering the call again gives
the same tokens). A raw JSON block is the arguments, verbatim.
"""

import json
from dataclasses import dataclass, field
from typing import NamedTuple

from k3jax.parse.tags import Tag


class Delta(NamedTuple):
    """A piece of the message.

    Attributes:
      kind: `reasoning`, `content` or `tool_call`.
      text: the piece; for a tool call a piece of its JSON arguments.
      index: which tool call, from 0.
      name: the tool, in the first delta of a call.
      reclassified: all reasoning so far was the answer: `text` is the content
        from its beginning, and the reasoning is empty.
    """

    kind: str
    text: str = ""
    index: int | None = None
    name: str | None = None
    reclassified: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call; `arguments` is JSON text. Not `complete`: the output ended inside the call."""

    name: str
    arguments: str
    complete: bool = True


@dataclass(slots=True)
class _Value:
    """The argument or JSON block that is open; `key` is None for one to ignore."""

    element: str
    key: str | None
    streams: bool
    parts: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Call:
    name: str
    index: int
    arguments: list[str] = field(default_factory=list)
    raw: bool = False
    complete: bool = False


# An open argument that was not closed ends at these, which no value holds.
_ENDS_VALUE = {(True, "argument"), (True, "call"), (False, "call"), (False, "tools")}


class CallAssembler:
    """Collects the calls of a message. An element without a tool name is dropped and takes no index."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._open = False  # inside a call element
        self._call: _Call | None = None  # None inside a dropped one
        self._value: _Value | None = None

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls so far, in the order in which they came."""
        return tuple(ToolCall(call.name, "".join(call.arguments), call.complete) for call in self._calls)

    def text(self, text: str) -> list[Delta]:
        """Text between tags: part of the open value, else nothing."""
        value = self._value
        if value is None or value.key is None:
            return []
        if not value.streams:
            value.parts.append(text)
            return []
        return self._emit(text if value.element == "json" else _escaped(text))

    def tag(self, tag: Tag) -> tuple[list[Delta], bool]:
        """The deltas of a tag, and whether it was part of the tools channel."""
        if not tag.opens and tag.name == "message":
            return self.end(), False
        if self._value is not None:
            if not tag.opens and tag.name in ("", self._value.element):
                return self._end_value(), True
            if (tag.opens, tag.name) not in _ENDS_VALUE:
                return self.text(tag.raw), True
            deltas = self._end_value()
            more, taken = self._inside_call(tag)
            return deltas + more, taken
        if self._open:
            return self._inside_call(tag)
        return (self._begin_call(tag), True) if tag.opens and tag.name == "call" else ([], False)

    def end(self) -> list[Delta]:
        """Ends the call where the model ended its message; inside a value the call counts as cut off."""
        inside = self._value is not None
        return self._end_value() + self._end_call(complete=not inside)

    def finish(self) -> list[Delta]:
        """Ends a call where the output was cut off: a string is closed, the part of another value dropped."""
        deltas: list[Delta] = []
        if self._value is not None:
            if self._value.streams:
                deltas += self._end_value()
            self._value = None
        return deltas + self._end_call(complete=False)

    def _inside_call(self, tag: Tag) -> tuple[list[Delta], bool]:
        if tag.opens and tag.name in ("argument", "json"):
            return self._begin_value(tag), True
        if tag.opens and tag.name == "call":
            return self._end_call(complete=True) + self._begin_call(tag), True
        if not tag.opens and tag.name in ("", "call"):
            return self._end_call(complete=True), True
        if not tag.opens and tag.name in ("argument", "json", "think", "response"):
            return [], True  # closes nothing that is open
        return self._end_call(complete=True), False

    def _begin_call(self, tag: Tag) -> list[Delta]:
        self._open = True
        name = tag.attributes.get("tool")
        if not name:
            return []
        self._call = _Call(name, len(self._calls))
        self._calls.append(self._call)
        return [Delta("tool_call", index=self._call.index, name=name)]

    def _end_call(self, complete: bool) -> list[Delta]:
        call = self._call
        deltas: list[Delta] = []
        if call is not None:
            if not call.raw:
                deltas = self._emit("}" if call.arguments else "{}")
            elif not call.arguments:
                deltas = self._emit("{}")
            call.complete = complete
        self._open, self._call = False, None
        return deltas

    def _begin_value(self, tag: Tag) -> list[Delta]:
        call, key = self._call, tag.attributes.get("key")
        if tag.name == "json":
            # Either a block or arguments: what came first counts.
            ignored = call is None or bool(call.arguments) or call.raw
            if call is not None and not ignored:
                call.raw = True
            self._value = _Value("json", None if ignored else "", streams=True)
            return []
        ignored = call is None or call.raw or key is None
        streams = tag.attributes.get("type", "string") == "string"
        self._value = _Value("argument", None if ignored else key, streams)
        return self._emit(self._key_prefix() + '"') if streams and not ignored else []

    def _end_value(self) -> list[Delta]:
        value, self._value = self._value, None
        if value is None or value.key is None or value.element == "json":
            return []
        if value.streams:
            return self._emit('"')
        return self._emit(self._key_prefix(value.key) + _json_literal("".join(value.parts)))

    def _key_prefix(self, key: str | None = None) -> str:
        if key is None and self._value is not None:
            key = self._value.key
        first = self._call is None or not self._call.arguments
        return ("{" if first else ",") + json.dumps(key, ensure_ascii=False) + ":"

    def _emit(self, text: str) -> list[Delta]:
        if self._call is None or not text:
            return []
        self._call.arguments.append(text)
        return [Delta("tool_call", text, index=self._call.index)]


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_literal(text: str) -> str:
    """A value's own spelling if it is JSON, else the text as a JSON string."""
    try:
        # Only whether it parses counts: `float` takes integers of any length, which `int` refuses.
        json.loads(text, parse_int=float, parse_constant=_not_json)
    except (ValueError, RecursionError):  # also JSON too deep for the decoder: readers could not load it either
        return json.dumps(text, ensure_ascii=False)
    return text


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
