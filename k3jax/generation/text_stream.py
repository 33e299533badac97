"""Token events to pieces of text and results: the last stage of `generate`."""

from collections.abc import Iterator, Sequence
from typing import Any

from k3jax.generation.decoding import Decoding, Event
from k3jax.generation.results import FinishReason, Result, Statistics
from k3jax.generation.stopping import StopStrings
from k3jax.tokenizer import Tokenizer
from k3jax.tokenizer.detokenizer import Detokenizer


class GenerationError(RuntimeError):
    """A row that could not be finished."""


class Writer:
    """One row's output: its ids and, with a tokenizer, its text up to a stop string."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str], prompt_tokens: int) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stops = StopStrings(stop)
        self._pieces: list[str] = []
        self._prompt_tokens = prompt_tokens
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None

    def push(self, event: Event) -> str:
        """Takes a token and gives the text that can be shown now; sets `finish_reason` when the row ends."""
        if event.finish == "error":
            position = self._prompt_tokens + len(self.ids)
            self.error = (
                f"logits for position {position} are not finite (NaN or infinity); "
                "check the weights, or run k3jax.verify on the checkpoint"
            )
            return self._end("error")
        self.ids.append(event.token)
        self.logprobs.append(event.logprob)
        if self._detokenizer is None:
            return self._end(event.finish) if event.finish else ""
        text, stopped = self._stops.push(self._detokenizer.push(event.token))
        self._pieces.append(text)
        if stopped:
            self.finish_reason = "stop"
        return text + (self._end(event.finish) if event.finish and not stopped else "")

    def _end(self, reason: FinishReason) -> str:
        """Ends the row and gives what was held back."""
        self.finish_reason = reason
        if self._detokenizer is None:
            return ""
        text, stopped = self._stops.push(self._detokenizer.finish())
        self._pieces += [text, "" if stopped else self._stops.finish()]
        return "".join(self._pieces[-2:])

    @property
    def result(self) -> Result:
        """The row's outcome."""
        assert self.finish_reason is not None
        return Result(
            prompt_tokens=self._prompt_tokens,
            ids=self.ids,
            logprobs=self.logprobs,
            text=None if self._detokenizer is None else "".join(self._pieces),
            finish_reason=self.finish_reason,
            error=self.error,
        )


class Stream[Piece]:
    """What `generate` returns: an iterator of pieces. `result`, `results` and `statistics` are there at its end."""

    def __init__(self, decoding: Decoding, writers: list[Writer], *, as_ids: bool, batch: bool) -> None:
        self._decoding, self._writers, self._as_ids, self._batch = decoding, writers, as_ids, batch
        self._iterator = self._pieces()
        self._done = False
        self.drafted = False
        """Whether the draft proposed the token that the latest piece came with."""

    def __iter__(self) -> "Stream[Piece]":
        return self

    def __next__(self) -> Piece:
        return next(self._iterator)

    @property
    def results(self) -> list[Result]:
        """The outcome of every row; runs what is left of the stream."""
        self._finish()
        return [writer.result for writer in self._writers]

    @property
    def result(self) -> Result:
        """The outcome of the only row, or the first of a batch."""
        return self.results[0]

    @property
    def statistics(self) -> Statistics:
        """Times and sizes of the whole call."""
        self._finish()
        return self._decoding.statistics

    def _finish(self) -> None:
        if not self._done:
            for _ in self._iterator:
                pass

    def _pieces(self) -> Iterator[Any]:
        for event in self._decoding:
            writer = self._writers[event.row]
            piece: str | int = writer.push(event)
            if self._as_ids:
                piece = event.token
            if writer.finish_reason is not None:
                self._decoding.stop(event.row)
            self.drafted = event.drafted
            if piece != "" and not (self._as_ids and event.finish == "error"):
                yield (event.row, piece) if self._batch else piece
        self._done = True
        failed = [f"row {row}: {writer.error}" for row, writer in enumerate(self._writers) if writer.error]
        if failed:
            raise GenerationError("; ".join(failed))
