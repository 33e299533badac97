"""The portable skinny product."""

from jaxtyping import Array, Float

from pallas.precision import einsum


def matmul(x: Float[Array, "M K"], weights: Float[Array, "N K"]) -> Float[Array, "M N"]:
    """See `pallas.gemv.matmul`."""
    return einsum("mk,nk->mn", x, weights)
