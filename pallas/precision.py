"""Matrix products with the precision rule of the whole project."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_HIGHEST = jax.lax.Precision.HIGHEST


def einsum(equation: str, *operands: Float[Array, "..."], out: jnp.dtype | None = None) -> Float[Array, "..."]:
    """`jnp.einsum` that accumulates in float32 and rounds once to `out` (default: the operands' dtype).

    float32 operands are multiplied at HIGHEST precision: TF32 would lose three digits of a router
    logit or of a parity run. Products of bfloat16 operands are exact in float32 anyway.
    """
    dtype = operands[0].dtype
    if dtype == jnp.float32:
        product = jnp.einsum(equation, *operands, precision=_HIGHEST, preferred_element_type=jnp.float32)
    else:
        product: Array = _narrow(equation, *operands)  # pyright: ignore[reportAssignmentType]
    return product.astype(dtype if out is None else out)


def _widened(equation: str, *operands: Float[Array, "..."]) -> Float[Array, "..."]:
    wide = (operand.astype(jnp.float32) for operand in operands)
    return jnp.einsum(equation, *wide, precision=_HIGHEST, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _narrow(equation: str, *operands: Array) -> Array:
    """bfloat16 operands, float32 result."""
    narrow = functools.partial(jnp.einsum, equation, preferred_element_type=jnp.float32)
    # XLA's CPU backend refuses some bfloat16 products with float32 results; widened operands give the same sums.
    return jax.lax.platform_dependent(*operands, cpu=functools.partial(_widened, equation), default=narrow)


def _narrow_forward(equation: str, *operands: Array) -> tuple[Array, tuple[Array, ...]]:
    return _narrow(equation, *operands), operands


def _narrow_backward(equation: str, operands: tuple[Array, ...], gradient: Array) -> tuple[Array, ...]:
    """Rounds the gradient to the operands' dtype first: a float32 one would make float32 products of the transposes."""
    dtype = operands[0].dtype
    _, transpose = jax.vjp(lambda *x: jnp.einsum(equation, *x, preferred_element_type=dtype), *operands)
    return transpose(gradient.astype(dtype))


_narrow.defvjp(_narrow_forward, _narrow_backward)
