"""Quantile Balancing: the routers' correction biases from one forward pass (report 2.3.3, appendices C and D).

With scores s, bias b and cutoff alpha_i = the (k+1)-th largest of s_i + b, the bias that would put expert
j exactly at the cutoff of token i is r_ij = alpha_i - s_ij. Its k/n-quantile over the tokens of a step
gives every expert the same load; the mean over experts is then removed. The result routes the next step.

At scale the quantile comes from integer histograms: counts of micro-batches and devices add up exactly,
so one all-reduce makes every device read the same quantile, within one bin of the exact one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from pallas.precision import einsum

BINS = 1000


class Routed(NamedTuple):
    """Integer statistics of one step per MoE layer; they add over micro-batches and devices."""

    histogram: Int32[Array, "*layers E bins"]
    """Tokens by required bias."""
    load: Int32[Array, "*layers E"]
    """Tokens sent to each expert."""


def router_scores(x: Array, router: Array) -> Float32[Array, "N E"]:
    """Sigmoid scores in float32, as the router computes them."""
    return jax.nn.sigmoid(einsum("nd,ed->ne", x.astype(jnp.float32), router.astype(jnp.float32)))


def required_bias(scores: Float32[Array, "N E"], bias: Float32[Array, " E"], k: int) -> Float32[Array, "N E"]:
    """R = alpha - s. Raises `ValueError` unless 0 < k < E: with k = E there is no cutoff."""
    if not 0 < k < scores.shape[1]:
        raise ValueError(f"k is {k} with {scores.shape[1]} experts; expected 0 < k < number of experts")
    top, _ = jax.lax.top_k(scores + bias[None], k + 1)
    return top[:, k, None] - scores


def exact(required: Float32[Array, "N E"], k: int, valid: Bool[Array, " N"] | None = None) -> Float32[Array, " E"]:
    """The next bias from all required biases: the value that exactly q = m k / n tokens lie below."""
    tokens, experts = required.shape
    valid = jnp.ones(tokens, bool) if valid is None else valid
    ordered = jnp.sort(jnp.where(valid[:, None], required, jnp.inf), axis=0)
    target = jnp.sum(valid, dtype=jnp.int32) * k // experts
    bias = jnp.take(ordered, target, axis=0)
    return bias - jnp.mean(bias)


def count(
    scores: Float32[Array, "N E"],
    bias: Float32[Array, " E"],
    k: int,
    valid: Bool[Array, " N"],
    bins: int = BINS,
) -> Routed:
    """Histogram of the required biases and loads of the valid tokens of a (micro-)batch."""
    experts = scores.shape[1]
    low, width = _range(bias, bins)
    required = required_bias(scores, bias, k)
    # A product with the reciprocal: compilers may or may not turn a division into one, and edges would move.
    index = jnp.clip(jnp.floor((required - low) * (1 / width)), 0, bins - 1).astype(jnp.int32)
    ones = jnp.broadcast_to(valid[:, None], required.shape).astype(jnp.int32)
    expert = jnp.broadcast_to(jnp.arange(experts, dtype=jnp.int32)[None], required.shape)
    histogram = jnp.zeros((experts, bins), jnp.int32).at[expert, index].add(ones)
    _, chosen = jax.lax.top_k(scores + bias[None], k)
    load = jnp.zeros(experts, jnp.int32).at[chosen].add(ones[:, :k])
    return Routed(histogram, load)


def _range(bias: Float32[Array, " E"], bins: int) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """Lowest possible required bias and the bin width: scores lie in (0, 1), cutoffs in (min b, 1 + max b)."""
    low, high = jnp.min(bias), jnp.max(bias)
    return low - 1, (high - low + 2) / bins


def next_bias(routed: Routed, bias: Float32[Array, " E"]) -> Float32[Array, " E"]:
    """The next bias of one layer from the counts of the whole step; unchanged when no token was counted.

    The target rank is q = m k / n; the quantile is interpolated inside the first bin whose cumulative
    count reaches ceil(q).
    """
    histogram = routed.histogram
    experts, bins = histogram.shape
    routes = jnp.sum(routed.load)  # = m k
    target = routes.astype(jnp.float32) / experts
    low, width = _range(bias, bins)
    cumulative = jnp.cumsum(histogram, axis=1)
    position = jnp.argmax(cumulative >= -(-routes // experts), axis=1)[:, None]
    inside = jnp.take_along_axis(histogram, position, axis=1).astype(jnp.float32)
    before = jnp.take_along_axis(cumulative, position, axis=1).astype(jnp.float32) - inside
    fraction = jnp.clip((target - before) / jnp.maximum(inside, 1), 0, 1)
    quantile = (low + (position.astype(jnp.float32) + fraction) * width)[:, 0]
    return jnp.where(routes > 0, quantile - jnp.mean(quantile), bias)


def imbalance(load: Int32[Array, "*layers E"]) -> Float32[Array, "*layers"]:
    """Largest expert load over the mean load: 1 is perfect balance."""
    values = load.astype(jnp.float32)
    return jnp.max(values, axis=-1) / jnp.maximum(jnp.mean(values, axis=-1), 1)
