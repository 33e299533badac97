"""The caller's messages, checked and put in the order in which they are rendered."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from k3jax.chat.images import ImageSlots
from k3jax.chat.segments import Segment

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of a past assistant message; `arguments` as the caller gave them."""

    name: str
    arguments: object
    id: str | None


@dataclass(frozen=True, slots=True)
class Turn:
    """One message to render.

    Attributes:
      role: `system`, `user`, `assistant` or `tool`.
      place: the message in the caller's list, for errors, such as `messages[3]`.
      name: the sender's name, empty when there is none; for a tool result the tool's.
      body: the content's segments.
      tools: tools that a system message declares; its content is then not rendered.
      reasoning: text of the think channel.
      calls: tool calls of an assistant message.
      call_id: the call that a tool result answers.
    """

    role: str
    place: str
    name: str = ""
    body: list[Segment] = field(default_factory=list)
    tools: object = None
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str | None = None


def turns(messages: Sequence[Mapping[str, object]], images: Sequence[str] = ()) -> list[Turn]:
    """Turns in rendering order. Raises ValueError naming the message and the field."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(f"messages is a {type(messages).__name__}; expected a list of message objects")
    places = [(f"messages[{i}]", message) for i, message in enumerate(messages)]
    for place, message in places:
        _require_message(place, message)
    slots = ImageSlots([(place, message) for place, message in places if not _ignores_content(message)], images)
    return list(_in_call_order(turn for place, message in places for turn in _turns_of(place, message, slots)))


def _require_message(place: str, message: object) -> None:
    if not isinstance(message, Mapping):
        raise ValueError(f"{place} is a {type(message).__name__}; expected a message object")
    if message.get("role") not in ROLES:
        raise ValueError(f"{place}.role is {message.get('role')!r}; expected one of {', '.join(ROLES)}")


def _ignores_content(message: Mapping[str, object]) -> bool:
    return message["role"] == "system" and bool(message.get("tools"))


def _turns_of(place: str, message: Mapping[str, object], slots: ImageSlots) -> Iterator[Turn]:
    role = message["role"]
    if role in ("system", "developer"):
        # A developer message that has both is split in two, declaration first.
        if message.get("tools"):
            yield Turn("system", place, tools=message["tools"])
        if not message.get("tools") or (role == "developer" and message.get("content")):
            yield Turn("system", place, _text(message, place, "name"), slots.body(place))
    elif role == "user":
        yield Turn("user", place, _text(message, place, "name"), slots.body(place))
    elif role == "tool":
        name = _text(message, place, "tool") or _text(message, place, "name")
        call_id = _text(message, place, "tool_call_id") or _text(message, place, "id")
        yield Turn("tool", place, name, slots.body(place), call_id=call_id or None)
    else:
        yield _assistant(place, message, slots)


def _assistant(place: str, message: Mapping[str, object], slots: ImageSlots) -> Turn:
    return Turn(
        "assistant",
        place,
        _text(message, place, "name"),
        slots.body(place),
        reasoning=_text(message, place, "reasoning_content") or _text(message, place, "reasoning"),
        calls=tuple(_calls(place, message)),
    )


def _text(message: Mapping[str, object], place: str, key: str) -> str:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{place}.{key} is a {type(value).__name__}; expected a string")
    return value or ""


def _calls(place: str, message: Mapping[str, object]) -> Iterator[Call]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ValueError(f"{place}.tool_calls is a {type(calls).__name__}; expected a list of calls")
    for i, call in enumerate(calls):
        where = f"{place}.tool_calls[{i}]"
        if not isinstance(call, Mapping):
            raise ValueError(f"{where} is a {type(call).__name__}; expected an object")
        function = call.get("function", call)
        if not isinstance(function, Mapping):
            raise ValueError(f"{where}.function is a {type(function).__name__}; expected an object")
        name = _text(function, f"{where}.function", "name")
        if not name:
            raise ValueError(f"{where}.function.name is missing; expected the tool's name")
        yield Call(name, function.get("arguments"), _text(call, where, "id") or None)


def _in_call_order(unordered: Iterable[Turn]) -> Iterator[Turn]:
    """Each run of tool results in the order of the latest assistant's calls, if every one matches."""
    calls: tuple[Call, ...] = ()
    for is_tool, group in groupby(unordered, lambda turn: turn.role == "tool"):
        run = list(group)
        if is_tool:
            yield from _reordered(run, calls)
            continue
        calls = next((turn.calls for turn in reversed(run) if turn.role == "assistant"), calls)
        yield from run


def _reordered(run: list[Turn], calls: tuple[Call, ...]) -> list[Turn]:
    positions: dict[str, int] = {}
    for position, call in enumerate(calls):
        if call.id is not None:
            positions.setdefault(call.id, position)
    if not all(turn.call_id in positions for turn in run):
        return run
    placed = [(positions[turn.call_id], turn) for turn in run if turn.call_id is not None]
    placed.sort(key=lambda pair: pair[0])
    return [replace(turn, name=calls[position].name) for position, turn in placed]
