"""Public functions of Stable LatentMoE (report section 2.3)."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas import gemv
from pallas.dispatch import Implementation, select
from pallas.moe import mosaic, mosaic_front, mosaic_route, mxfp4, mxfp8, triton, xla
from pallas.moe.types import Experts, Front, Routing
from pallas.precision import einsum

dequantize = mxfp4.dequantize
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
    logits = einsum("nd,ed->ne", x.astype(jnp.float32), router.astype(jnp.float32))
    return choose(logits, correction_bias, k=k, scaling=scaling, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("k", "scaling", "implementation"))
def choose(
    logits: Float32[Array, "N E"],
    correction_bias: Float32[Array, " E"],
    *,
    k: int,
    scaling: float = 1.0,
    implementation: Implementation = None,
) -> Routing:
    """`route` from the router's logits."""
    backends = {"mosaic": mosaic_route.on_gpu, "xla": xla.choose}
    return select(implementation, **backends)(logits, correction_bias, k=k, scaling=scaling)


@functools.partial(jax.jit, static_argnames=("k", "scaling", "implementation"))
def front(
    x: Float[Array, "N D"],
    router: Float[Array, "E D"],
    correction_bias: Float32[Array, " E"],
    matrices: tuple[Float[Array, "... D"], ...],
    *,
    k: int,
    scaling: float = 1.0,
    implementation: Implementation = None,
) -> Front:
    """The routing of each token, and the products of `x` with the last axis of each of `matrices`, in the dtype of `x`.

    Meant for a few tokens, which pass all weights in one launch (see `pallas.gemv.project`); of one token a kernel that
    serves it routes in the same launch. Logits are float32.
    """

    def by_launches(*args: Any, **options: Any) -> Front:
        return _front(*args, **options, implementation=implementation)

    sizes = [math.prod(matrix.shape[:-1]) for matrix in (router, *matrices)]
    together = x.shape[0] == 1 and mosaic_front.settings_for(sizes) is not None
    backends = {"mosaic": mosaic_front.on_gpu} if together else {}
    run = select(implementation if together else None, **backends, xla=by_launches)
    return run(x, router, correction_bias, matrices, k=k, scaling=scaling)


def _front(
    x: Array,
    router: Array,
    correction_bias: Array,
    matrices: tuple[Array, ...],
    *,
    k: int,
    scaling: float,
    implementation: Implementation,
) -> Front:
    kinds = (jnp.float32, *(x.dtype,) * len(matrices))
    logits, *products = gemv.project(x, router, *matrices, dtypes=kinds, implementation=implementation)
    routing = choose(logits, correction_bias, k=k, scaling=scaling, implementation=implementation)
    return Front(routing, tuple(products))


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
    activations: mxfp8.Activations = None,
    implementation: Implementation = None,
) -> Float[Array, "N L"]:
    """Weighted sum of the chosen experts' outputs; the ids of one token are distinct, -1 is a slot without an expert.

    Weights act after w2; product and sum in float32, rounded once to `dtype` (default: that of `x`). With
    `activations="mxfp8"` both products take their inputs in that format, from `mxfp8.FEWEST_TOKENS` tokens on. Raises
    `ValueError` for an expert named twice by a token where ids are known, that is outside of `jax.jit`.
    """
    if not isinstance(ids, Tracer):
        require_distinct(ids)
    if x.shape[0] < mxfp8.FEWEST_TOKENS:
        activations = None
    options = {"dtype": jnp.dtype(dtype or x.dtype), "activations": activations, "implementation": implementation}
    return _experts(x, ids, weights, experts, beta=beta, linear_beta=linear_beta, **options)


@functools.partial(jax.jit, static_argnames=("beta", "linear_beta", "dtype", "activations", "implementation"))
def _experts(
    x: Array, ids: Array, weights: Array, experts: Experts, *, implementation: Implementation, **options: Any
) -> Array:
    backends = {"mosaic": mosaic.experts, "triton": triton.experts, "xla": xla.experts}
    return select(implementation, **backends)(x, ids, weights, experts, **options)
