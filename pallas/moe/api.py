"""Public functions of Stable LatentMoE (report section 2.3)."""

import functools

import jax
from jaxtyping import Array, Float, Int32

from pallas.dispatch import Implementation, select
from pallas.moe import mxfp4, xla
from pallas.moe.types import Experts, Routing

dequantize = mxfp4.dequantize


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


@functools.partial(jax.jit, static_argnames=("beta", "linear_beta", "implementation"))
def experts(
    x: Float[Array, "N L"],
    ids: Int32[Array, "N k"],
    weights: Float[Array, "N k"],
    experts: Experts,
    *,
    beta: float,
    linear_beta: float,
    implementation: Implementation = None,
) -> Float[Array, "N L"]:
    """Weighted sum of the chosen experts' outputs; the ids of one token are distinct.

    Weights act after w2; product and sum in float32, rounded once.
    """
    return select(implementation, xla=xla.experts)(x, ids, weights, experts, beta=beta, linear_beta=linear_beta)
