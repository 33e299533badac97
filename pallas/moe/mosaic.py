"""The Mosaic GPU backend of the routed experts: a streaming kernel for few tokens, a grouped one for many."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas.dispatch import BLACKWELL, HOPPER, require_capability
from pallas.moe import mosaic_decode, mosaic_grouped, mosaic_mxfp8
from pallas.moe.gradient import differentiable
from pallas.moe.mxfp8 import Activations
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
    activations: Activations = None,
) -> Float[Array, "N L"]:
    """See `pallas.moe.experts`. Refuses with `NotImplementedError` what the kernels do not serve."""
    if activations is None:
        require_capability("moe mosaic", HOPPER, BLACKWELL)
    else:
        require_capability("moe mosaic with MXFP8 activations", HOPPER)
    mosaic_decode.require_supported(x, experts)
    assert isinstance(experts, PackedExperts)
    if activations is not None:
        kernel = mosaic_mxfp8.experts
    elif x.shape[0] <= mosaic_decode.MOST_TOKENS:
        kernel = mosaic_decode.experts
    else:
        kernel = mosaic_grouped.experts
    return differentiable(kernel, x, ids, weights, experts, beta, linear_beta, dtype or x.dtype)
