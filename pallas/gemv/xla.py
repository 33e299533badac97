"""The portable skinny product."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas.gemv.int8 import Int8Matrix, interleave
from pallas.precision import einsum


def matmuls(
    x: Float[Array, "M K"], weights: tuple[Float[Array, "_ K"] | Int8Matrix, ...], dtypes: tuple[jnp.dtype, ...]
) -> tuple[Float[Array, "M _"], ...]:
    """See `pallas.gemv.matmuls`."""
    return tuple(
        int8_product(x, matrix, dtype) if isinstance(matrix, Int8Matrix) else einsum("mk,nk->mn", x, matrix, out=dtype)
        for matrix, dtype in zip(weights, dtypes, strict=True)
    )


def int8_product(x: Float[Array, "M K"], matrix: Int8Matrix, dtype: jnp.dtype) -> Float[Array, "M N"]:
    """The codes are exact in the dtype of x; float32 sums are scaled and rounded once."""
    sums = einsum("mk,nk->mn", interleave(x), matrix.codes.astype(x.dtype), out=jnp.dtype(jnp.float32))
    return (sums * matrix.scale[None]).astype(dtype)
