"""The decode loop: a batch of prompts is prefilled in chunks and decoded one step ahead of the host.

The next step is enqueued before the tokens of the last one are read, so the device never waits for Python;
only tokens, log-probabilities and two flags per row come back. The step itself retires rows that stop.
"""

import collections
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from k3jax import step
from k3jax.cache import K3Cache, Rows
from k3jax.generation import buckets
from k3jax.generation.compilations import Compilations
from k3jax.generation.results import FinishReason, Statistics
from k3jax.generation.stepping import Emission, IdleStepper, PlainStepper, SpeculativeStepper, Stepper, copy_to_host
from k3jax.runtime import Model
from k3jax.sampling import History, Sampling
from k3jax.speculation.drafters import Draft


class Event(NamedTuple):
    """One sampled token."""

    row: int
    token: int
    logprob: float
    finish: FinishReason | None
    """Why the row ends with this token; None when it goes on. With 'error' the token means nothing."""
    drafted: bool = False
    """The draft proposed it and the target let it stand."""


class Request(NamedTuple):
    """What one row asks for; the ids have been checked."""

    ids: list[int]
    max_tokens: int
    stop_ids: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens that the row may come to."""
        return len(self.ids) + self.max_tokens


@jax.jit
def _keep_last(
    old: Float[Array, "B V"], new: Float[Array, "B V"], query_length: Int32[Array, " B"]
) -> Float[Array, "B V"]:
    """Logits of each row's last chunk so far."""
    return jnp.where((query_length > 0)[:, None], new, old)


class Decoding:
    """A batch on its way. Iterate for events; `statistics` are complete afterwards."""

    def __init__(
        self, model: Model, requests: Sequence[Request], sampling: Sampling, draft: Draft | None = None
    ) -> None:
        """`sampling` has one row per request; with a `draft` decoding is speculative."""
        self._model, self._requests = model, list(requests)
        self._batch = buckets.power_of_two(len(requests))
        self._clock = _Clock()
        arrays = model.place((_pad_rows(sampling, self._batch), _stop_table(self._requests, self._batch)))
        if draft is None:
            self._stepper: Stepper = PlainStepper(model, *arrays, self._clock.compilations)
        else:
            kind = IdleStepper if draft.idle else SpeculativeStepper
            self._stepper = kind(model, draft, *arrays, self._clock.compilations)
        self._remaining = np.asarray([request.max_tokens for request in requests] + [0] * self._padding, np.int32)
        self._running = self._remaining > 0
        self._retire = False

    @property
    def _padding(self) -> int:
        return self._batch - len(self._requests)

    def stop(self, row: int) -> None:
        """Ends a row that the caller has heard enough of; no further events come from it."""
        self._retire |= bool(self._running[row])
        self._running[row] = False

    @property
    def statistics(self) -> Statistics:
        """Times and sizes so far."""
        return self._clock.statistics(
            prompt_tokens=sum(len(request.ids) for request in self._requests), weight_bytes=self._model.weight_bytes
        )

    def __iter__(self) -> Iterator[Event]:
        """Events in order of steps, and of rows within a step."""
        clock = self._clock
        with clock.compilations:
            state, emitted = self._start()
            yield from self._deliver(emitted)
            flying: collections.deque[Emission] = collections.deque()
            try:
                while self._running.any():
                    # The second step is enqueued before the first is read, unless nothing can be left to say.
                    enqueue = bool((self._running & (self._remaining > len(flying))).any())
                    if enqueue:
                        state, emitted = self._step(state)
                        flying.append(emitted)
                    if len(flying) > 1 or not enqueue:
                        yield from self._deliver(flying.popleft())
            finally:
                # A step that still runs when the interpreter ends would abort the process.
                jax.block_until_ready(list(flying))

    def _step(self, state: Any) -> tuple[Any, Emission]:
        """Enqueues a step and the transfer of its tokens. Donates the state."""
        if self._retire:
            state, self._retire = step.retire(state, self._model.place(self._running.copy())), False
        state, emission = self._stepper.advance(state)
        return state, copy_to_host(emission)

    def _deliver(self, emission: Emission) -> Iterator[Event]:
        """Waits for a step's tokens and gives them for the rows that still run."""
        tokens, logprobs, counts, finite = map(np.asarray, emission[:4])
        counts = np.where(self._running, counts, 0)
        stood = np.zeros_like(counts) if emission.accepted is None else np.asarray(emission.accepted)
        self._clock.tick(counts, stood)
        for row in np.flatnonzero(counts).tolist():
            pairs = zip(tokens[row, : counts[row]].tolist(), logprobs[row].tolist(), strict=False)
            for place, (token, logprob) in enumerate(pairs):
                # The caller may have stopped the row since.
                if not self._running[row]:
                    break
                self._remaining[row] -= 1
                finish = self._finish(row, token, bool(finite[row]))
                self._running[row] = finish is None
                yield Event(row, token, logprob, finish, bool(place < stood[row]))

    def _finish(self, row: int, token: int, finite: bool) -> FinishReason | None:
        """Why the device has retired the row with this token, by the rule of `step.accept`."""
        if not finite:
            return "error"
        if token in self._requests[row].stop_ids:
            return "stop"
        return "length" if self._remaining[row] <= 0 else None

    def _start(self) -> tuple[Any, Emission]:
        """Prefills all rows and samples their first tokens."""
        model, vocab = self._model, self._model.config.vocab_size
        longest = max(request.length for request in self._requests)
        width = buckets.table_width(longest, model.max_length)
        cache = self._clock.compilations.call(model.new_cache, self._batch, self._batch * width)
        self._clock.cache_bytes = cache.nbytes
        logits, cache, rows = self._prefill(cache, width)
        prompts = [request.ids for request in self._requests] + [[]] * self._padding
        history = model.place(self._clock.compilations.call(History.of, prompts, vocab))
        token, remaining = model.place((np.zeros(self._batch, np.int32), self._remaining.copy()))
        state = step.DecodeState(cache, rows, token, remaining, history)
        return self._stepper.start(state, logits)

    def _prefill(self, cache: K3Cache, width: int) -> tuple[Float[Array, "B V"], K3Cache, Rows]:
        """Logits after each row's prompt, the filled cache, and the rows ready to decode."""
        model = self._model
        table = np.arange(1, self._batch * width + 1, dtype=np.int32).reshape(self._batch, width)
        slots = np.arange(1, self._batch + 1, dtype=np.int32)
        lengths = np.asarray([len(request.ids) for request in self._requests] + [0] * self._padding, np.int32)
        logits: Float[Array, "B V"] | None = None
        for chunk in buckets.chunks(int(lengths.max())):
            count = np.clip(lengths - chunk.start, 0, chunk.size)
            rows, ids = model.place((Rows(slots, table, np.minimum(lengths, chunk.start), count), self._chunk(chunk)))
            new, cache = self._stepper.prefill(cache, rows, ids)
            logits = new if logits is None else _keep_last(logits, new, rows.query_length)
        assert logits is not None
        return logits, cache, model.place(Rows(slots, table, lengths, self._running.astype(np.int32)))

    def _chunk(self, chunk: buckets.Chunk) -> np.ndarray:
        """The prompts' tokens of one chunk, padded with zeros."""
        ids = np.zeros((self._batch, chunk.size), np.int32)
        for row, request in zip(ids, self._requests):
            piece = request.ids[chunk.start : chunk.start + chunk.size]
            row[: len(piece)] = piece
        return ids


class _Clock:
    """When the first and the latest token arrived, and what was compiled until then."""

    def __init__(self) -> None:
        self.compilations = Compilations()
        self.cache_bytes = 0
        self._begin = time.perf_counter()
        self._arrivals: list[tuple[float, float]] = []
        self._steps = -1
        self._tokens = self._first_tokens = self._row_steps = 0
        self._stood = np.zeros(0, np.int64)

    def tick(self, counts: np.ndarray, stood: np.ndarray) -> None:
        """A step's tokens are on the host: `counts` of each row, and drafts of each that stood."""
        now = (time.perf_counter() - self._begin, self.compilations.seconds)
        self._arrivals = [*self._arrivals[:1], now]
        self._steps += 1
        self._tokens += int(counts.sum())
        running = int((counts > 0).sum())
        if self._steps > 0:
            self._row_steps += running
            seen = np.bincount(stood[counts > 0], minlength=len(self._stood))
            self._stood = seen + np.pad(self._stood, (0, len(seen) - len(self._stood)))
        else:
            self._first_tokens = running

    def statistics(self, **sizes: int) -> Statistics:
        """Everything measured so far."""
        (first, first_compile), (last, last_compile) = self._arrivals[0], self._arrivals[-1]
        return Statistics(
            completion_tokens=self._tokens,
            first_tokens=self._first_tokens,
            steps=self._steps,
            row_steps=self._row_steps,
            accepted=tuple(self._stood.tolist()),
            first_token_seconds=first,
            prefill_seconds=first - first_compile,
            decode_seconds=last - first - (last_compile - first_compile),
            compile_seconds=self.compilations.seconds,
            compilations=self.compilations.count,
            cache_bytes=self.cache_bytes,
            **sizes,
        )


def _pad_rows(tree: Sampling, batch: int) -> Sampling:
    """Settings of padding rows are those of the last row; nothing is sampled with them."""
    return jax.tree.map(lambda column: jnp.pad(column, (0, batch - column.shape[0]), mode="edge"), tree)


def _stop_table(requests: Sequence[Request], batch: int) -> np.ndarray:
    """Stop ids of each row, filled with -1."""
    width = buckets.power_of_two(max(len(request.stop_ids) for request in requests), 4)
    table = np.full((batch, width), -1, np.int32)
    for row, request in zip(table, requests):
        row[: len(request.stop_ids)] = request.stop_ids
    return table
