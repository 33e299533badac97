"""A forward pass that follows given experts, and what the routers would have chosen.

A router whose k-th and next scores are nearly equal may choose either; one such choice changes every later
layer. With the reference's choices forced, each decision and each layer can be judged on its own.
"""

import functools
from typing import NamedTuple

import jax
from jaxtyping import Array, Float32, Int32

from k3jax.cache import K3Cache, Rows
from k3jax.step import Forward, Graph


class Forced(NamedTuple):
    """Result of `extend_forced`."""

    forward: Forward
    scores: tuple[Float32[Array, "N E"], ...]
    """Biased scores by MoE layer: the routers choose the k best."""


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="cache")
def extend_forced(
    graph: Graph,
    leaves: tuple[Array, ...],
    cache: K3Cache,
    rows: Rows,
    ids: Int32[Array, "B T"],
    experts: tuple[Int32[Array, "N k"], ...],
) -> Forced:
    """`step.extend` with the `experts` of each MoE layer given for every token. Donates the cache."""
    model = graph.merge(leaves)
    output = model(ids, rows, cache, trace=True, experts=experts)
    scores = tuple(layer.scores for layer in output.trace if layer.scores is not None)
    return Forced(Forward(model.logits(output.hidden), graph.place(output.cache), output.trace), scores)
