"""Answers as plain objects."""

import collections
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of an answer.

    Attributes:
      kind: `reasoning`, `content`, `tool_call` or `token_ids` (what comes without text).
      text: the piece; of a tool call a piece of its JSON arguments.
      choice: which of the `n` answers.
      index: which tool call.
      call_name: the tool, in the first piece of a call.
      token_ids: the tokens of the message that brought the piece, if ids were asked for; with its first piece alone.
      logprobs: one per token, if asked for; as for the ids.
      reclassified: all reasoning so far was the answer: `text` is the content from its beginning.
    """

    kind: str
    text: str = ""
    choice: int = 0
    index: int = 0
    call_name: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Any, ...] = ()
    reclassified: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call; `arguments` is JSON text."""

    name: str
    arguments: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One whole answer.

    Attributes:
      text: the content.
      reasoning: what was thought before it.
      tool_calls: in order.
      token_ids: if asked for, or if the service has no tokenizer.
      logprobs: one per token, if asked for.
      finish_reason: stop, tool_calls, length, abort or error.
      matched: the stop token or stop string that ended it.
      usage: prompt_tokens, cached_tokens, completion_tokens, preemptions.
      statistics: drafted and accepted tokens, and seconds: queued, to the first token, in total.
    """

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[Any, ...]
    finish_reason: str
    matched: int | str | None
    usage: dict[str, int]
    statistics: dict[str, int | float]


@dataclasses.dataclass(slots=True)
class _Answer:
    """A choice as it grows."""

    reasoning: list[str] = dataclasses.field(default_factory=list)
    content: list[str] = dataclasses.field(default_factory=list)
    calls: dict[int, tuple[str, list[str]]] = dataclasses.field(default_factory=dict)
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Any] = dataclasses.field(default_factory=list)
    finish: Any = None

    def add(self, delta: Delta) -> None:
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.kind == "reasoning":
            self.reasoning.append(delta.text)
        elif delta.kind == "content":
            if delta.reclassified:
                self.reasoning, self.content = [], []
            self.content.append(delta.text)
        elif delta.kind == "tool_call":
            self.calls.setdefault(delta.index, (delta.call_name, []))[1].append(delta.text)

    def result(self) -> Result:
        finish = self.finish
        matched = finish.WhichOneof("matched")
        return Result(
            text="".join(self.content),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(ToolCall(name, "".join(parts)) for _, (name, parts) in sorted(self.calls.items())),
            token_ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            finish_reason=finish.reason,
            matched=getattr(finish, matched) if matched else None,
            usage=_numbers(finish.usage),
            statistics=_numbers(finish.speculation) | _numbers(finish.timing),
        )


def _numbers(message: Any) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


class Folding:
    """Folds the messages of a stream into deltas and results."""

    def __init__(self) -> None:
        self._answers: dict[int, _Answer] = collections.defaultdict(_Answer)
        self.request_id = ""
        self.prompt_logprobs: Any = None
        self.seen = False
        """Whether anything has come: then the request must not be sent again."""

    def add(self, message: Any) -> list[Delta]:
        """The deltas of a message."""
        self.seen = True
        kind = message.WhichOneof("event")
        if kind == "start":
            self.request_id = message.start.request_id
            self.prompt_logprobs = list(message.start.prompt_logprobs.tokens) or None
            return []
        if kind == "finish":
            self._answers[message.finish.choice].finish = message.finish
            return []
        deltas = list(_deltas(message.delta))
        for delta in deltas:
            self._answers[delta.choice].add(delta)
        return deltas

    def results(self) -> list[Result]:
        """The whole answers. Raises RuntimeError for a stream that ended before they did."""
        unfinished = [choice for choice, answer in self._answers.items() if answer.finish is None]
        if unfinished or not self._answers:
            raise RuntimeError(f"the stream of request {self.request_id!r} ended without a finish")
        return [answer.result() for _, answer in sorted(self._answers.items())]


def _deltas(message: Any) -> list[Delta]:
    ids: dict[str, Any] = {"token_ids": tuple(message.token_ids), "logprobs": tuple(message.logprobs)}
    deltas = []
    for piece in message.pieces:
        kind = piece.WhichOneof("kind")
        fields: dict[str, Any] = {"choice": message.choice, "kind": kind, "reclassified": piece.reclassified} | ids
        if kind == "tool_call":
            call = piece.tool_call
            fields |= {"text": call.arguments, "index": call.index, "call_name": call.name}
        else:
            fields["text"] = getattr(piece, kind)
        deltas.append(Delta(**fields))
        ids = {}
    return deltas or [Delta(kind="token_ids", choice=message.choice, **ids)]
