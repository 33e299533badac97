"""Kernels of the experts that have no backward pass take that of the portable form, recomputed."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas.moe import xla
from pallas.moe.types import PackedExperts

Kernel = Callable[..., Array]
"""(x, ids, weights, experts, beta, linear_beta, dtype) to the weighted sums."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 5, 6, 7))
def differentiable(
    kernel: Kernel,
    x: Float[Array, "N L"],
    ids: Int32[Array, "N k"],
    weights: Float[Array, "N k"],
    experts: PackedExperts,
    beta: float,
    linear_beta: float,
    dtype: jnp.dtype,
) -> Float[Array, "N L"]:
    """The kernel's values; gradients of `x` and `weights` are the portable form's, of unquantised activations."""
    return kernel(x, ids, weights, experts, beta, linear_beta, dtype)


def _forward(kernel: Kernel, *args: Array | PackedExperts | float | jnp.dtype) -> tuple:
    return differentiable(kernel, *args), args[:4]


def _backward(_: Kernel, beta: float, linear_beta: float, dtype: jnp.dtype, saved: tuple, gradient: Array) -> tuple:
    x, ids, weights, experts = saved
    portable = partial(xla.experts, beta=beta, linear_beta=linear_beta, dtype=dtype)
    pull_back = jax.vjp(lambda x, weights: portable(x, ids, weights, experts), x, weights)[1]
    of_x, of_weights = pull_back(gradient)
    return of_x, None, of_weights, None


differentiable.defvjp(_forward, _backward)
