"""Public functions of the skinny product."""

import functools
import math

import jax
from jaxtyping import Array, Float

from pallas.dispatch import Implementation, select
from pallas.gemv import mosaic, xla
from pallas.precision import einsum

FEW_ROWS = mosaic.MOST_TOKENS
"""Up to this many rows a product is bound by reading the weights."""


@functools.partial(jax.jit, static_argnames="implementation")
def matmul(
    x: Float[Array, "M K"], weights: Float[Array, "N K"], *, implementation: Implementation = None
) -> Float[Array, "M N"]:
    """X times the transpose of `weights`, accumulated in float32 and rounded once."""
    return select(implementation, mosaic=mosaic.on_gpu, xla=xla.matmul)(x, weights)


def project(
    x: Float[Array, "..."], weights: Float[Array, "..."], *, contract: int = 1, implementation: Implementation = None
) -> Float[Array, "..."]:
    """[*batch, *inputs] times [*outputs, *inputs] -> [*batch, *outputs], the last `contract` axes being the inputs.

    Few rows go through `matmul`, many through one ordinary product.
    """
    batch, inputs, outputs = x.shape[:-contract], x.shape[-contract:], weights.shape[:-contract]
    if math.prod(batch) <= FEW_ROWS:
        flat = x.reshape(math.prod(batch), math.prod(inputs))
        product = matmul(flat, weights.reshape(math.prod(outputs), math.prod(inputs)), implementation=implementation)
        return product.reshape(*batch, *outputs)
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    rows, columns, summed = ("".join(next(letters) for _ in axes) for axes in (batch, outputs, inputs))
    return einsum(f"{rows}{summed},{columns}{summed}->{rows}{columns}", x, weights)
