"""A forward pass that follows given experts, and what the routers would have chosen.

A router whose k-th and next scores are nearly equal may choose either; one such choice changes every later
layer. With the reference's choices forced, each decision and each layer can be judged on its own.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from k3jax.cache import K3Cache, Rows
from k3jax.layers.moe import LatentMoe
from k3jax.model import Layer
from k3jax.step import Forward, Graph
from pallas.moe import Routing
from pallas.precision import einsum


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
    scores: list[Float32[Array, "N E"]] = []
    choices = iter(experts)
    for layer in model.layers:
        if isinstance(layer.ffn, LatentMoe):
            _follow(layer, layer.ffn, next(choices), scores)
    output = model(ids, rows, cache, trace=True)
    return Forced(Forward(model.logits(output.hidden), graph.place(output.cache), output.trace), tuple(scores))


def _follow(layer: Layer, moe: LatentMoe, experts: Int32[Array, "N k"], scores: list[Float32[Array, "N E"]]) -> None:
    """Makes one layer of a merged model, which lives for one trace, use `experts` and record its scores."""

    def feed_forward(x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Routing]:
        tokens = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        score = jax.nn.sigmoid(einsum("nd,ed->ne", tokens, moe.router[...].astype(jnp.float32)))
        scores.append(score + moe.correction_bias[...][None])
        chosen = jnp.take_along_axis(score, experts, axis=-1)
        weights = chosen / jnp.sum(chosen, axis=-1, keepdims=True) * moe.scaling
        return moe(x, Routing(experts, weights))

    object.__setattr__(layer, "feed_forward", feed_forward)
