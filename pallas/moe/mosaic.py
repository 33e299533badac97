"""The Mosaic GPU backend of the routed experts: a streaming kernel for few tokens, a grouped one for many."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas.dispatch import require_hopper
from pallas.moe import mosaic_decode, mosaic_grouped, xla
from pallas.moe.types import Experts, PackedExperts


def experts(
    x: Float[Array, "N L"],
    ids: Int32[Array, "N k"],
    weights: Float[Array, "N k"],
    experts: Experts,
    *,
    beta: float,
    linear_beta: float,
    dtype: jnp.dtype | None = None,
) -> Float[Array, "N L"]:
    """See `pallas.moe.experts`. Refuses with `NotImplementedError` what the kernels do not serve."""
    require_hopper("moe mosaic")
    mosaic_decode.require_supported(x, experts)
    assert isinstance(experts, PackedExperts)
    return _differentiable(x, ids, weights, experts, beta, linear_beta, dtype or x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _differentiable(
    x: Array, ids: Array, weights: Array, experts: PackedExperts, beta: float, linear_beta: float, dtype: jnp.dtype
) -> Array:
    """The kernels' values; gradients of `x` and `weights` are those of the portable form, recomputed."""
    kernel = mosaic_decode if x.shape[0] <= mosaic_decode.MOST_TOKENS else mosaic_grouped
    return kernel.experts(x, ids, weights, experts, beta, linear_beta, dtype)


def _forward(x: Array, ids: Array, weights: Array, experts: PackedExperts, *scalars: Any) -> tuple:
    return _differentiable(x, ids, weights, experts, *scalars), (x, ids, weights, experts)


def _backward(beta: float, linear_beta: float, dtype: jnp.dtype, saved: tuple, gradient: Array) -> tuple:
    x, ids, weights, experts = saved
    portable = partial(xla.experts, beta=beta, linear_beta=linear_beta, dtype=dtype)
    _, pull_back = jax.vjp(lambda x, weights: portable(x, ids, weights, experts), x, weights)
    of_x, of_weights = pull_back(gradient)
    return of_x, None, of_weights, None


_differentiable.defvjp(_forward, _backward)
