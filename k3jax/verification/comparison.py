"""A model against a file of reference outputs, quantity by quantity."""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int

from k3jax.runtime import Model
from k3jax.states import States, kda_states
from k3jax.verification import golden
from k3jax.verification.compare import Comparison, compare
from k3jax.verification.golden import Case, Golden
from k3jax.verification.observe import in_chunks, observe, observe_forced

CHUNK = 40
"""Tokens per piece of the chunked run; no multiple of a KDA chunk or an MLA page."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """What is allowed."""

    tolerance: float
    """Relative RMS of any array."""
    margin: float
    """Distance of the k-th score from the next one up to which a router may choose otherwise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    """One file's prompts on one model; all of them share the programs of the longest."""

    model: Model
    golden: Golden
    bounds: Bounds

    @property
    def _sizes(self) -> dict[str, int]:
        """Padded length of a call, and tokens of cache."""
        cases = self.golden.cases
        return {
            "size": -(-max(len(case.input_ids) for case in cases) // 32) * 32,
            "room": max(len(case.input_ids) + len(case.decode_ids) for case in cases),
        }

    def run(self) -> Iterator[Comparison]:
        """Every quantity of every prompt, then the logits and states of a chunked run.

        Raises `PromptError` when a prompt does not fit the model.
        """
        for case in self.golden.cases:
            self.model.read(case.arrays["input_ids"], f"{case.name}.input_ids")
            if case.decode_ids:
                self.model.read(case.arrays["decode_ids"], f"{case.name}.decode_ids")
            yield from self._compare(case)

    def _compare(self, case: Case) -> Iterator[Comparison]:
        sizes = self._sizes
        states = observe(self.model, case.input_ids, case.decode_ids, **sizes)
        theirs, forced = case.arrays.get("router_ids"), None
        states = _in_order_of(states, np.sort(states.router_ids))  # a file's weights follow ascending ids
        if theirs is not None and theirs.shape != states.router_ids.shape:
            yield compare(f"{case.name}.router_ids", states.router_ids, theirs, 0.0)
        elif theirs is not None and np.array_equal(np.sort(states.router_ids), np.sort(theirs)):
            yield Comparison(f"{case.name}.router_ids", 0.0, f"{theirs.size} ids are equal", True)
            states = _in_order_of(states, theirs)
        elif theirs is not None:
            forced = theirs
            states, scores = observe_forced(self.model, case.input_ids, theirs, case.decode_ids, **sizes)
            yield compare_choices(f"{case.name}.router_ids", scores, theirs, self.bounds.margin)
        yield from self._in_one_go(case, states)
        yield from self._in_chunks(case, forced)

    def _in_one_go(self, case: Case, states: States) -> Iterator[Comparison]:
        ours = _by_name(states)
        for name, theirs in case.arrays.items():
            if name in ours:
                yield compare(f"{case.name}.{name}", ours[name], theirs, self.bounds.tolerance)
            elif name not in ("input_ids", "decode_ids", "router_ids"):
                yield Comparison(f"{case.name}.{name}", np.inf, "this model's layer has no such state", False)

    def _in_chunks(self, case: Case, forced: Int[np.ndarray, "M T k"] | None) -> Iterator[Comparison]:
        if len(case.input_ids) < 2 or "logits" not in case.arrays:
            return
        logits, cache = in_chunks(self.model, case.input_ids, CHUNK, **self._sizes, experts=forced)
        yield compare(f"{case.name}.logits (chunked)", logits, case.arrays["logits"], self.bounds.tolerance)
        for layer, state in kda_states(cache).items():
            if (theirs := case.arrays.get(f"kda_state.{layer}")) is not None:
                name = f"{case.name}.kda_state.{layer} (chunked)"
                yield compare(name, state, theirs, self.bounds.tolerance)


def _by_name(states: States) -> dict[str, np.ndarray]:
    """Our arrays under the names of a golden file."""
    whole = [name for name in golden.WHOLE if not name.endswith("_ids")]
    named = {name: getattr(states, name) for name in whole}
    for kind in golden.BY_LAYER:
        named |= {f"{kind}.{layer}": array for layer, array in getattr(states, kind).items()}
    return named


def _in_order_of(states: States, experts: Int[np.ndarray, "M T k"]) -> States:
    """The states with each token's experts in the order of `experts`, which are the same ones."""
    mine, theirs = np.argsort(states.router_ids, axis=-1), np.argsort(np.argsort(experts, axis=-1), axis=-1)
    order = np.take_along_axis(mine, theirs, axis=-1)
    weights = np.take_along_axis(states.router_weights, order, axis=-1)
    return dataclasses.replace(states, router_ids=experts, router_weights=weights)


def compare_choices(
    name: str, scores: Float[np.ndarray, "M T E"], theirs: Int[np.ndarray, "M T k"], allowed: float
) -> Comparison:
    """Whether each choice of `theirs` is the k best of `scores`; margins up to `allowed` may go either way."""
    k = theirs.shape[-1]
    order = np.argsort(-scores, axis=-1, kind="stable")
    ranked = np.take_along_axis(scores, order, axis=-1)
    ours = np.sort(order[..., :k])
    differs = (ours != np.sort(theirs)).any(axis=-1)
    # Where every expert is chosen no next score exists, and any difference is an error.
    following = ranked[..., k] if k < ranked.shape[-1] else np.full(ranked.shape[:-1], -np.inf)
    margin = np.where(differs, ranked[..., k - 1] - following, -np.inf)
    worst = np.unravel_index(np.argmax(margin), margin.shape)
    if not differs.any():
        return Comparison(name, 0.0, f"{theirs.size} ids are equal when earlier choices are", True)
    widest = float(margin[worst])
    index = ", ".join(str(int(i)) for i in worst)
    detail = (
        f"{differs.sum()} of {differs.size} choices differ; widest margin {widest:.1e} (allowed {allowed:g}) "
        f"at [{index}]: ours {ours[worst].tolist()}, theirs {np.sort(theirs[worst]).tolist()}"
    )
    return Comparison(name, widest, detail, widest <= allowed)
