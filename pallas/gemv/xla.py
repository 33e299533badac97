"""The portable skinny product."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas.precision import einsum


def matmuls(
    x: Float[Array, "M K"], weights: tuple[Float[Array, "_ K"], ...], dtypes: tuple[jnp.dtype, ...]
) -> tuple[Float[Array, "M _"], ...]:
    """See `pallas.gemv.matmuls`."""
    return tuple(einsum("mk,nk->mn", x, matrix, out=dtype) for matrix, dtype in zip(weights, dtypes, strict=True))
