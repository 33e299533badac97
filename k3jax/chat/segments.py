"""Segments: the pieces of a prompt, each encoded on its own.

Only the renderer makes special segments (the four markers and image prompts),
so no caller's text can become a control token; and byte-pair merging never
crosses a segment, which the released ids depend on.
"""

import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from k3jax.tokenizer import Tokenizer
from k3jax.tokenizer import control as control_tokens


class Segment(NamedTuple):
    """A piece of the prompt and whether control names in it are control tokens."""

    text: str
    special: bool = False


OPEN = Segment(control_tokens.OPEN, True)
CLOSE = Segment(control_tokens.CLOSE, True)
SEP = Segment(control_tokens.SEP, True)
END_OF_MESSAGE = Segment(control_tokens.END_OF_MESSAGE, True)

_MEMO_LENGTH = 64  # tag names and attributes repeat; bodies do not


def open_tag(name: str, *attributes: tuple[str, str]) -> list[Segment]:
    """`<|open|>name key="value" ...<|sep|>`; an empty value leaves no segment between its quotes."""
    parts = [OPEN, Segment(name)]
    for key, value in attributes:
        parts += [Segment(" " + key), Segment('="')]
        parts += [Segment(escape(value))] if value else []
        parts.append(Segment('"'))
    parts.append(SEP)
    return parts


def close_tag(name: str) -> list[Segment]:
    """`<|close|>name<|sep|>`."""
    return [CLOSE, Segment(name), SEP]


def element(name: str, *attributes: tuple[str, str], body: Iterable[Segment]) -> list[Segment]:
    """An open tag, its body and the close tag."""
    return [*open_tag(name, *attributes), *body, *close_tag(name)]


def message(*attributes: tuple[str, str], body: Iterable[Segment]) -> list[Segment]:
    """A whole message with its end token."""
    return [*element("message", *attributes, body=body), END_OF_MESSAGE]


def text_body(text: str) -> list[Segment]:
    """Ordinary text as a body; nothing for an empty one."""
    return [Segment(text)] if text else []


def escape(value: str) -> str:
    """An attribute value: only `&` and the double quote are escaped."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def sorted_json(value: object) -> str:
    """Compact JSON with keys sorted by code point at every depth, as tools and schemas are declared.

    Raises TypeError or ValueError for a value that JSON cannot hold.
    """
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)


def encode(tokenizer: Tokenizer, segments: Iterable[Segment]) -> list[int]:
    """Ids of the segments, each encoded separately."""
    ids: list[int] = []
    for part in _encoded(tokenizer, segments):
        ids += part
    return ids


def _encoded(tokenizer: Tokenizer, segments: Iterable[Segment]) -> Iterator[list[int]]:
    memo: dict[Segment, list[int]] = {
        marker: [tokenizer.control_id(marker.text)] for marker in (OPEN, CLOSE, SEP, END_OF_MESSAGE)
    }
    for segment in segments:
        ids = memo.get(segment)
        if ids is None:
            ids = tokenizer.encode(segment.text, allow_special=segment.special)
            if len(segment.text) <= _MEMO_LENGTH:
                memo[segment] = ids
        yield ids


def to_text(segments: Iterable[Segment]) -> str:
    """The prompt as one string, to read; encoding it would lose the segments."""
    return "".join(segment.text for segment in segments)
