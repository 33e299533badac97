"""Model output to a message: reasoning, content and tool calls.

`parse` reads a whole output, `StreamParser` the same output in any pieces;
both take token ids, where only real control tokens are markers, or text.
"""

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import SupportsIndex

from k3jax.parse.calls import Delta, ToolCall
from k3jax.parse.channels import Channel, ChannelMachine
from k3jax.parse.lexer import Event, IdLexer, TextLexer
from k3jax.parse.tags import TagAssembler
from k3jax.tokenizer import Tokenizer
from k3jax.tokenizer import control as control_tokens

__all__ = [
    "Channel",
    "Delta",
    "Message",
    "StreamParser",
    "ToolCall",
    "fold",
    "open_channel",
    "parse",
    "reasoning_ended",
]

_PREFILLED = {"think": Channel.THINK, "response": Channel.RESPONSE, "message": Channel.OUTSIDE}


@dataclass(frozen=True, slots=True)
class Message:
    """A parsed assistant message.

    Attributes:
      reasoning: text of the think channel; None when there was no such channel.
      content: the answer; None when it is empty.
      tool_calls: in the order in which they came.
      finish_reason: `stop` or `tool_calls` when the model ended its message,
        `length` when it was cut off, or what the engine said.
    """

    reasoning: str | None
    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None


def parse(
    tokenizer: Tokenizer | None,
    ids_or_text: Sequence[int] | str,
    thinking: bool = True,
    prefilled: str | None = "think",
    finish_reason: str | None = None,
) -> Message:
    """The message in a whole output.

    Args:
      tokenizer: needed for ids only.
      ids_or_text: the completion, without the prompt.
      thinking: whether the prompt was rendered with thinking.
      prefilled: the channel that the prompt left open (see `open_channel`):
        `think`, `response`, `message` or None for none. Without thinking, `think` means `response`.
      finish_reason: why the engine stopped, if known; `stop` becomes `tool_calls` when there are calls.
    """
    parser = StreamParser(tokenizer, thinking, prefilled)
    parser.push(ids_or_text)
    parser.finish(finish_reason)
    return parser.message


class StreamParser:
    """Parses an output in pieces, in constant time per token.

    Whatever the pieces, the deltas folded (see `fold`) give the message that
    `parse` returns. Ids and text must not be mixed.
    """

    def __init__(self, tokenizer: Tokenizer | None, thinking: bool = True, prefilled: str | None = "think") -> None:
        if prefilled is not None and prefilled not in _PREFILLED:
            raise ValueError(f"prefilled is {prefilled!r}; expected {', '.join(_PREFILLED)} or None")
        if prefilled == "think" and not thinking:
            prefilled = "response"
        self._tokenizer = tokenizer
        self._lexer: IdLexer | TextLexer | None = None
        self._tags = TagAssembler()
        self._machine = ChannelMachine(_PREFILLED[prefilled] if prefilled else Channel.OUTSIDE)
        self._finish_reason: str | None = None

    def push(self, piece: SupportsIndex | Iterable[SupportsIndex] | str) -> list[Delta]:
        """The deltas that a piece (an id, ids or text) completes.

        Raises TypeError for ids that are no integers, and ValueError for an id
        out of range, for text after ids or ids after text, and after `finish`.
        """
        if self._finish_reason is not None:
            raise ValueError("a piece was pushed after finish; expected a new StreamParser for each output")
        if isinstance(piece, str):
            return self._consume(self._text_lexer().push(piece))
        return self._consume(self._id_lexer().push(_ids(piece)))

    def finish(self, finish_reason: str | None = None) -> list[Delta]:
        """The last deltas; `finish_reason` is the engine's, if known. A second call changes nothing."""
        if self._finish_reason is not None:
            return []
        deltas = self._consume(self._lexer.finish()) if self._lexer else []
        self._tags.finish()
        deltas += self._machine.finish()
        self._finish_reason = self._reason(finish_reason)
        return deltas

    @property
    def message(self) -> Message:
        """The message so far; its finish reason is None before `finish`."""
        machine = self._machine
        reasoning = None if machine.reasoning is None else "".join(machine.reasoning)
        return Message(reasoning, "".join(machine.content) or None, machine.calls.calls, self._finish_reason)

    @property
    def channel(self) -> Channel:
        """Where in the message the output is."""
        return self._machine.channel

    @property
    def in_reasoning(self) -> bool:
        """Whether the output is inside the think channel, where a grammar must not yet apply."""
        return self._machine.channel is Channel.THINK

    def _consume(self, events: list[Event]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            for item in self._tags.push(event):
                deltas += self._machine.push(item)
        return deltas

    def _id_lexer(self) -> IdLexer:
        if self._lexer is None and self._tokenizer is not None:
            self._lexer = IdLexer(self._tokenizer)
        if not isinstance(self._lexer, IdLexer):
            cause = "without a tokenizer" if self._lexer is None else "after text"
            raise ValueError(f"token ids were pushed {cause}; expected ids alone and a tokenizer, or text alone")
        return self._lexer

    def _text_lexer(self) -> TextLexer:
        if self._lexer is None:
            self._lexer = TextLexer()
        if not isinstance(self._lexer, TextLexer):
            raise ValueError("text was pushed after token ids; expected one of them alone")
        return self._lexer

    def _reason(self, engine: str | None) -> str:
        if engine is None:
            engine = "stop" if self._machine.closed else "length"
        called = any(call.complete for call in self._machine.calls.calls)
        return "tool_calls" if engine == "stop" and called else engine


def _ids(piece: SupportsIndex | Iterable[SupportsIndex]) -> list[int]:
    if isinstance(piece, int):  # most pieces are one id
        return [piece]
    try:
        return [index(id_) for id_ in piece] if isinstance(piece, Iterable) else [index(piece)]
    except TypeError:
        raise TypeError(f"a piece is {reprlib.repr(piece)}; expected text, an integer token id or several") from None


def fold(deltas: Iterable[Delta]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and (name, arguments) of each call that the deltas spell, as a client sees them."""
    reasoning, content = "", ""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if delta.kind == "reasoning":
            reasoning += delta.text
        elif delta.kind == "content":
            reasoning, content = ("", delta.text) if delta.reclassified else (reasoning, content + delta.text)
        elif delta.name is not None:
            calls.append((delta.name, ""))
        elif delta.index is not None:
            name, arguments = calls[delta.index]
            calls[delta.index] = (name, arguments + delta.text)
    return reasoning, content, calls


def open_channel(tokenizer: Tokenizer, prompt: Sequence[int]) -> str | None:
    """The channel that a prompt leaves open, for `prefilled`: think, response, message or None.

    Reads the tail of the prompt back to its last end of a message.
    """
    end = tokenizer.control_id(control_tokens.END_OF_MESSAGE)
    start = next((i + 1 for i in range(len(prompt) - 1, -1, -1) if prompt[i] == end), 0)
    tail = list(prompt[start:])
    parser = StreamParser(tokenizer, prefilled=None)
    parser.push(tail)
    channel = parser.channel
    if channel is Channel.OUTSIDE:
        return "message" if tokenizer.control_id(control_tokens.OPEN) in tail else None
    return channel.value if channel.value in _PREFILLED else None


def reasoning_ended(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    """Whether the reasoning is over, so that a grammar may apply.

    Args:
      tokenizer: of the ids.
      ids: the prompt and the output so far, as one sequence.

    The newest of the tags that open or close a channel decides: an open think
    tag says no; its close tag, and a response or tools tag (of a model that
    skipped the close tag, or of a prompt without thinking), say yes.
    """
    sep = tokenizer.control_id(control_tokens.SEP)
    opened, closed = tokenizer.control_id(control_tokens.OPEN), tokenizer.control_id(control_tokens.CLOSE)
    names = {name: [*tokenizer.encode(name), sep] for name in ("think", "response", "tools")}
    over = [([opened, *names["think"]], False), ([closed, *names["think"]], True)]
    over += [([opened, *names[name]], True) for name in ("response", "tools")]
    for at in range(len(ids) - 1, -1, -1):
        if ids[at] == opened or ids[at] == closed:
            for tag, answer in over:
                if list(ids[at : at + len(tag)]) == tag:
                    return answer
    return False
