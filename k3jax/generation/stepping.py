"""How a batch advances: one token a step, or a drafted block. The decode loop sees no difference."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from k3jax import step
from k3jax.cache import K3Cache, Rows
from k3jax.generation import buckets
from k3jax.generation.compilations import Compilations
from k3jax.runtime import Model
from k3jax.sampling import Filters, Sampling
from k3jax.speculation import step as speculate
from k3jax.speculation.drafters import Draft, DSparkDrafter, NgramDrafter
from k3jax.speculation.state import SpeculativeState


class Emission(NamedTuple):
    """Tokens that one step gave to each row: the first `count` of `token`."""

    token: Int32[Array, "B W"]
    logprob: Float32[Array, "B W"]
    count: Int32[Array, " B"]
    finite: Bool[Array, " B"]
    """False where a running row's logits held a NaN or an infinity."""
    accepted: Int32[Array, " B"] | None = None
    """Drafts that stood, before stops and limits: as many of the first tokens are the draft's. None without a draft."""


def _one(emitted: step.Emitted) -> Emission:
    return Emission(emitted.token[:, None], emitted.logprob[:, None], emitted.valid.astype(jnp.int32), emitted.finite)


class Stepper(Protocol):
    """Runs the compiled programs of one kind of decoding for a batch."""

    def prefill(self, cache: K3Cache, rows: Rows, ids: Int32[Array, "B T"]) -> tuple[Any, K3Cache]:
        """Logits after one chunk of each row, and the cache. Donates the cache."""
        ...

    def start(self, state: step.DecodeState, logits: Array) -> tuple[Any, Emission]:
        """The state of the loop and the first token of each row. Donates the state."""
        ...

    def advance(self, state: Any) -> tuple[Any, Emission]:
        """One step. Donates the state."""
        ...


class PlainStepper:
    """One token per row and step."""

    def __init__(self, model: Model, params: Sampling, stop_ids: Array, compilations: Compilations) -> None:
        self._model, self._params, self._stop_ids = model, params, stop_ids
        self._call = compilations.call
        # Known here once, so that no step has to look.
        self._filters = Filters.of(params)

    def prefill(self, cache: K3Cache, rows: Rows, ids: Int32[Array, "B T"]) -> tuple[Any, K3Cache]:
        """See `Stepper`."""
        output = self._call(step.prefill, self._model.graph, self._model.leaves, cache, rows, ids)
        return output.logits, output.cache

    def start(self, state: step.DecodeState, logits: Array) -> tuple[Any, Emission]:
        """See `Stepper`."""
        state, emitted = self._call(step.start, state, logits, self._params, self._stop_ids)
        return state, _one(emitted)

    def advance(self, state: Any) -> tuple[Any, Emission]:
        """See `Stepper`."""
        args = (self._model.graph, self._model.leaves, state, self._params, self._stop_ids)
        state, emitted = self._call(step.decode, *args, filters=self._filters)
        return state, _one(emitted)


class SpeculativeStepper(PlainStepper):
    """A drafted block per row and step; the tokens are those that plain decoding could have given."""

    def __init__(
        self, model: Model, draft: Draft, params: Sampling, stop_ids: Array, compilations: Compilations
    ) -> None:
        super().__init__(model, params, stop_ids, compilations)
        self._draft = draft
        self._context: Any = None

    def _create(self, cache: K3Cache, rows: Rows) -> Any:
        drafter, (_, pages, page_size) = self._draft.drafter, cache.capacity
        batch, width = rows.page_table.shape
        if isinstance(drafter, NgramDrafter):
            return self._model.place(drafter.create(batch, width * buckets.PAGE_SIZE))
        assert isinstance(drafter, DSparkDrafter)
        return self._model.place(drafter.create(pages=pages, page_size=page_size, dtype=self._model.dtype))

    def prefill(self, cache: K3Cache, rows: Rows, ids: Int32[Array, "B T"]) -> tuple[Any, K3Cache]:
        """See `Stepper`."""
        if self._context is None:
            self._context = self._create(cache, rows)
        draft = self._draft
        args = (self._model.graph, self._model.leaves, draft.drafter, draft.leaves, cache, self._context, rows, ids)
        output = self._call(speculate.prefill, *args)
        self._context = output.context
        return output.logits, output.cache

    def start(self, state: step.DecodeState, logits: Array) -> tuple[Any, Emission]:
        """See `Stepper`."""
        state, emission = super().start(state, logits)
        context, self._context = self._context, None
        started = SpeculativeState(state.cache, context, state.rows, state.token, state.remaining, state.history)
        return started, emission

    def advance(self, state: Any) -> tuple[Any, Emission]:
        """See `Stepper`."""
        draft = self._draft
        args = (self._model.graph, self._model.leaves, draft.drafter, draft.leaves, state, self._params, self._stop_ids)
        options = {"rule": draft.rule, "widths": draft.widths, "filters": self._filters}
        state, block = self._call(speculate.speculate, *args, **options)
        return state, Emission(block.token, block.logprob, block.count, block.finite, block.accepted)


class IdleStepper(SpeculativeStepper):
    """Prefills with the draft and decodes without it: what a draft is compared with, for one program more."""

    def start(self, state: step.DecodeState, logits: Array) -> tuple[Any, Emission]:
        """See `Stepper`."""
        self._context = None
        return PlainStepper.start(self, state, logits)

    def advance(self, state: Any) -> tuple[Any, Emission]:
        """See `Stepper`."""
        return PlainStepper.advance(self, state)


def copy_to_host(emission: Emission) -> Emission:
    """Starts the transfer of a step's tokens."""
    jax.tree.map(lambda array: array.copy_to_host_async(), emission)
    return emission
