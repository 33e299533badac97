"""Matrix products with the precision rule of the whole project."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def einsum(equation: str, *operands: Float[Array, "..."], out: jnp.dtype | None = None) -> Float[Array, "..."]:
    """`jnp.einsum` that accumulates in float32 and rounds once to `out` (default: the operands' dtype).

    float32 operands are multiplied at HIGHEST precision: TF32 would lose three digits of a router
    logit or of a parity run. Products of bfloat16 operands are exact in float32 anyway.
    """
    dtype = operands[0].dtype
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    product = jnp.einsum(equation, *operands, precision=precision, preferred_element_type=jnp.float32)
    return product.astype(dtype if out is None else out)
