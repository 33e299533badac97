"""Times of the programs of `k3jax.speculation.programs` on a device."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from k3jax.cache import K3Cache
from k3jax.speculation import bench, parts
from k3jax.speculation.programs import TOP_P, Programs
from k3jax.speculation.state import SpeculativeState
from pallas import timing


@dataclasses.dataclass(slots=True)
class Stopwatch:
    """Times each program, as soon as it is there, on what the ones before it made. No array is read meanwhile."""

    programs: Programs
    loaded: bench.Loaded
    experts: list[Array] = dataclasses.field(default_factory=list)
    """The experts that a block reached, by MoE layer; set by `times`."""

    def times(self) -> Iterator[tuple[str, float]]:
        """Microseconds of each part and of both kinds of decoding, as they are measured. Uses the states up."""
        run, loaded = self.programs, self.loaded
        state, bare = loaded.speculative, _copy(bench.bare(loaded.speculative))
        context, *draft = bench.draft_inputs(loaded, loaded.leaves)
        yield "draft", self._time("draft", lambda pools: run["draft"](pools, *draft).pools, _copy(context))
        block = run["draft"](_copy(context), *draft)
        markov = (loaded.draft_leaves, block._replace(pools=()), bare.token, bare.rows, loaded.params)
        yield "markov", self._time("markov", lambda _: run["markov"](*markov), None)
        proposal = run["markov"](*markov)

        def verify(cache: K3Cache) -> bench.Verify:
            return run["verify"](cache, bare, loaded.leaves, proposal.token)

        yield "verify", self._time("verify", lambda cache: verify(cache).cache, _copy(state.cache))
        verified = verify(_copy(state.cache))
        self.experts = verified.experts
        accept = (verified.logits, proposal, bare, parts.Given(loaded.params, loaded.stop_ids))
        yield "accept", self._time("accept", lambda _: run["accept"](*accept), None)
        rest = (bare, loaded.draft_leaves, verified.pending, verified.features, run["accept"](*accept))
        pools = (verified.cache, _copy(context))
        yield "commit", self._time("commit", lambda pools: run["commit"](pools, *rest), pools)
        yield from self._steps()
        for name, inputs in ((f"markov{TOP_P}", markov), (f"accept{TOP_P}", accept)):
            yield name, self._time(name, lambda _, name=name, inputs=inputs: run[name](*inputs), None)

    def _steps(self) -> Iterator[tuple[str, float]]:
        """The two kinds of decoding, whole."""
        run, loaded = self.programs, self.loaded
        shared = (loaded.params, loaded.stop_ids)

        def whole(state: SpeculativeState) -> SpeculativeState:
            return run["whole"](loaded.leaves, loaded.draft_leaves, state, *shared)[0]

        yield "plain", self._time("plain", lambda state: run["plain"](loaded.leaves, state, *shared)[0], loaded.plain)
        yield "whole", self._time("whole", whole, loaded.speculative)

    def _time(self, name: str, call: Callable[[Any], Any], carry: Any) -> float:
        """Once the program is there: by the device's clock on a GPU, otherwise by the host's."""
        _ = self.programs[name]
        measure = timing.device_call_us if jax.default_backend() == "gpu" else timing.median_call_us
        return measure(call, carry, 1)


def _copy(tree: Any) -> Any:
    """What a program may use up."""
    return jax.tree.map(jnp.copy, tree)


def distinct(experts: list[Array], tokens: int | None) -> float:
    """Distinct experts that the first `tokens` of a block reach: the mean over the MoE layers."""
    return float(np.mean([len(np.unique(np.asarray(layer)[:tokens])) for layer in experts]))
