"""Public functions of Stable LatentMoE (report section 2.3)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas.dispatch import Implementation, select
from pallas.moe import mosaic, mxfp4, xla
from pallas.moe.types import Experts, Routing

dequantize = mxfp4.dequantize
require_finite = mxfp4.require_finite
Known = Array | np.ndarray


@functools.partial(jax.jit, static_argnames=("k", "scaling", "implementation"))
def route(
    x: Float[Array, "N D"],
    router: Float[Array, "E D"],
    correction_bias: Float[Array, " E"],
    *,
    k: int,
    scaling: float = 1.0,
    implementation: Implementation = None,
) -> Routing:
    """The `k` experts of each token; the bias moves the choice only, never the weights.

    Logits and sigmoid in float32. Ties go to the lower expert id.
    """
    return select(implementation, xla=xla.route)(x, router, correction_bias, k=k, scaling=scaling)


@functools.partial(jax.jit, static_argnames=("k", "scaling"))
def choose(
    logits: Float32[Array, "N E"], correction_bias: Float32[Array, " E"], *, k: int, scaling: float = 1.0
) -> Routing:
    """`route` from the router's logits."""
    return xla.choose(logits, correction_bias, k=k, scaling=scaling)


@functools.partial(jax.jit, static_argnames="num_experts")
def expert_load(ids: Int32[Array, "N k"], num_experts: int) -> Int32[Array, " E"]:
    """How many of the tokens chose each expert; slots without an expert (-1) count nowhere."""
    return jnp.bincount(jnp.where(ids < 0, num_experts, ids).reshape(-1), length=num_experts + 1)[:-1].astype(jnp.int32)


def require_distinct(ids: Int32[Known, "N k"]) -> None:
    """Raises `ValueError` for a token that names an expert twice; slots without an expert (-1) may repeat."""
    ordered = np.sort(np.asarray(ids), axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        token, slot = np.argwhere(twice)[0]
        raise ValueError(
            f"token {token} names expert {ordered[token, slot]} twice; the experts of a token are distinct"
        )


def experts(
    x: Float[Known, "N L"],
    ids: Int32[Known, "N k"],
    weights: Float[Known, "N k"],
    experts: Experts,
    *,
    beta: float,
    linear_beta: float,
    dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> Float[Array, "N L"]:
    """Weighted sum of the chosen experts' outputs; the ids of one token are distinct, -1 is a slot without an expert.

    Weights act after w2; product and sum in float32, rounded once to `dtype` (default: that of `x`). Raises
    `ValueError` for an expert named twice by a token where ids are known, that is outside of `jax.jit`.
    """
    if not isinstance(ids, Tracer):
        require_distinct(ids)
    scalars = {"beta": beta, "linear_beta": linear_beta}
    return _experts(
        x, ids, weights, experts, dtype=jnp.dtype(dtype or x.dtype), implementation=implementation, **scalars
    )


@functools.partial(jax.jit, static_argnames=("beta", "linear_beta", "dtype", "implementation"))
def _experts(
    x: Array, ids: Array, weights: Array, experts: Experts, *, implementation: Implementation, **options: Any
) -> Array:
    return select(implementation, mosaic=mosaic.experts, xla=xla.experts)(x, ids, weights, experts, **options)
