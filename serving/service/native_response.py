"""Outputs of the engine as typed pieces of `k3jax.v1`."""

from collections.abc import Sequence
from typing import Any, Protocol

from k3jax.generation.stopping import StopStrings
from k3jax.parse import Delta, StreamParser
from k3jax.tokenizer import Tokenizer
from k3jax.tokenizer.detokenizer import Detokenizer
from serving.protocol import messages
from serving.request import Alternatives, Final, Output, PromptLogprobs
from serving.service.native_request import Prompt
from serving.service.wish import Wish


class Reader(Protocol):
    """Turns ids into pieces."""

    def push(self, tokens: Sequence[int]) -> list[Any]:
        """The pieces that `tokens` complete."""
        ...

    def finish(self, reason: str) -> tuple[list[Any], str]:
        """The last pieces, and how the answer ended."""
        ...


class IdReader:
    """Without a tokenizer there is nothing but ids."""

    def push(self, tokens: Sequence[int]) -> list[Any]:
        """Nothing."""
        return []

    def finish(self, reason: str) -> tuple[list[Any], str]:
        """Nothing more."""
        return [], reason


class TextReader:
    """The text after a text, up to a stop string that is not within the first `spare` tokens."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], spare: int = 0) -> None:
        self._detokenizer, self._stops = Detokenizer(tokenizer), StopStrings(stops)
        self._spare = spare

    def push(self, tokens: Sequence[int]) -> list[Any]:
        """The text that `tokens` complete, as content."""
        free, rest = tokens[: self._spare], tokens[self._spare :]
        self._spare -= len(free)
        text = self._detokenizer.push(free) if free else ""
        return self._piece(text + self._stops.push(self._detokenizer.push(rest)).text)

    def finish(self, reason: str) -> tuple[list[Any], str]:
        """What was held back."""
        cut = self._stops.push(self._detokenizer.finish())
        return self._piece(cut.text + ("" if cut.stopped else self._stops.finish())), reason

    @staticmethod
    def _piece(text: str) -> list[Any]:
        return [messages.Piece(content=text)] if text else []


class ConversationReader:
    """Reasoning, content and tool calls of an assistant's message; content goes up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, stops: Sequence[str], spare: int = 0) -> None:
        self._parser = StreamParser(tokenizer, prompt.thinking, prompt.channel)
        self._stops, self._free = StopStrings(stops), StopStrings(())
        self._spare = spare

    def push(self, tokens: Sequence[int]) -> list[Any]:
        """The pieces that `tokens` complete."""
        free, rest = tokens[: self._spare], tokens[self._spare :]
        self._spare -= len(free)
        pieces = self._pieces(self._parser.push(free), self._free) if free else []
        return pieces + self._pieces(self._parser.push(rest), self._stops)

    def finish(self, reason: str) -> tuple[list[Any], str]:
        """The last pieces; a message with complete calls ends with `tool_calls`."""
        pieces = self._pieces(self._parser.finish(reason), self._stops)
        rest = self._stops.finish()
        return pieces + ([messages.Piece(content=rest)] if rest else []), self._parser.message.finish_reason or reason

    def _pieces(self, deltas: Sequence[Delta], stops: StopStrings) -> list[Any]:
        return [piece for delta in deltas for piece in self._typed(delta, stops)]

    @staticmethod
    def _typed(delta: Delta, stops: StopStrings) -> list[Any]:
        if delta.kind == "reasoning":
            return [messages.Piece(reasoning=delta.text)]
        if delta.kind == "content":
            text = stops.push(delta.text).text
            return [messages.Piece(content=text, reclassified=delta.reclassified)] if text or delta.reclassified else []
        call = messages.ToolCallPiece(index=delta.index or 0, name=delta.name or "", arguments=delta.text)
        return [messages.Piece(tool_call=call)]


class Choice:
    """One choice on its way to the client."""

    def __init__(self, index: int, wish: Wish, prompt: Prompt, tokenizer: Tokenizer | None, request: Any) -> None:
        self.index = index
        self._wants_logprobs = wish.logprobs is not None
        self._wants_ids = request.return_token_ids or tokenizer is None
        self._sequence = 0
        self._said = 0
        stops = () if request.include_stop else wish.stop
        self._reader: Reader = IdReader()
        if tokenizer is not None and prompt.is_conversation:
            self._reader = ConversationReader(tokenizer, prompt, stops, wish.min_tokens)
        elif tokenizer is not None:
            self._reader = TextReader(tokenizer, stops, wish.min_tokens)

    def events(self, output: Output) -> list[Any]:
        """The messages that tell of an output."""
        pieces = self._reader.push(output.tokens)
        self._said += len(output.tokens)
        if output.final is None:
            return self._delta(pieces, output)
        last, reason = self._reader.finish(output.final.finish_reason)
        finish = messages.GenerateResponse(finish=self._finish(output.final, reason))
        return [*self._delta(pieces + last, output), finish]

    def _delta(self, pieces: list[Any], output: Output) -> list[Any]:
        ids = output.tokens if self._wants_ids else []
        values = logprobs(output) if self._wants_logprobs else []
        if not (pieces or ids or values):
            return []
        delta = messages.Delta(
            choice=self.index, sequence=self._sequence, pieces=pieces, token_ids=ids, logprobs=values
        )
        self._sequence += 1
        return [messages.GenerateResponse(delta=delta)]

    def _finish(self, final: Final, reason: str) -> Any:
        finish = messages.Finish(choice=self.index, reason=reason)
        if isinstance(final.matched, str):
            finish.matched_stop = final.matched
        elif final.matched is not None:
            finish.matched_token_id = final.matched
        usage = {name: getattr(final, name) for name in ("prompt_tokens", "cached_tokens", "preemptions")}
        finish.usage.CopyFrom(messages.Usage(completion_tokens=self._said, **usage))
        finish.speculation.drafted_tokens = final.drafted_tokens
        finish.speculation.accepted_tokens = final.accepted_tokens
        for name in ("queued_seconds", "first_token_seconds", "total_seconds"):
            setattr(finish.timing, name, getattr(final, name))
        return finish


def logprobs(output: Output) -> list[Any]:
    """One entry per token of an output."""
    top = output.top_logprobs or [None] * len(output.tokens)
    return [_token(*entry) for entry in zip(output.tokens, output.logprobs, top, strict=True)]


def prompt_logprobs(tokens: Sequence[int], said: PromptLogprobs) -> Any:
    """One entry per token of the prompt; the first has no value."""
    entries = [_token(*entry) for entry in zip(tokens, said.logprobs, said.top, strict=True)]
    return messages.PromptLogprobs(tokens=entries)


def _token(token: int, logprob: int | float | None, top: Alternatives | None) -> Any:
    pairs = zip(top.tokens, top.logprobs, strict=True) if top is not None else ()
    alternatives = [messages.TokenLogprob.Alternative(token_id=id, logprob=value) for id, value in pairs]
    entry = messages.TokenLogprob(token_id=token, alternatives=alternatives)
    if logprob is not None:
        entry.logprob = logprob
    return entry
