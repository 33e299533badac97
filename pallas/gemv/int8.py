"""Matrices in 8 bits: int8 codes and a float32 scale for each output."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8, Shaped

BOX = 128
"""Inputs that the kernel takes at a time."""
LARGEST = 127
"""Of the codes: -128 is left out, so that rounding is symmetric."""


class Int8Matrix(NamedTuple):
    """A matrix [*outputs, *inputs], of which each output's inputs are its codes times its scale."""

    codes: Int8[Array, "*outputs K"]
    """The inputs as one axis, in the order of `interleave`."""
    scale: Float32[Array, "*outputs"]


@functools.partial(jax.jit, static_argnames="contract")
def quantize(matrix: Float[Array, "..."], *, contract: int = 1) -> Int8Matrix:
    """The nearest codes of a matrix whose last `contract` axes are the inputs; an output's largest input gets 127."""
    outputs, inputs = matrix.shape[:-contract], math.prod(matrix.shape[-contract:])
    values = matrix.reshape(*outputs, inputs).astype(jnp.float32)
    scale = jnp.max(jnp.abs(values), axis=-1) / LARGEST
    steps = values / jnp.where(scale > 0, scale, 1.0)[..., None]
    return Int8Matrix(interleave(jnp.round(steps).astype(jnp.int8)), scale)


def interleave(x: Shaped[Array, "*batch K"]) -> Shaped[Array, "*batch K"]:
    """Inputs in the order in which the kernel's threads take them; as they are where they do not fill boxes.

    Of the 128 inputs of a box, thread t of four takes 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of every sixteen.
    """
    if x.shape[-1] % BOX:
        return x
    boxes = x.reshape(*x.shape[:-1], x.shape[-1] // BOX, BOX // 16, 2, 4, 2)
    sixteen, half, thread, pair = range(boxes.ndim - 4, boxes.ndim)
    order = (*range(sixteen), thread, sixteen, half, pair)
    return boxes.transpose(order).reshape(x.shape)


def restore(x: Shaped[Array, "*batch K"]) -> Shaped[Array, "*batch K"]:
    """The inverse of `interleave`."""
    if x.shape[-1] % BOX:
        return x
    boxes = x.reshape(*x.shape[:-1], x.shape[-1] // BOX, 4, BOX // 16, 2, 2)
    thread, sixteen, half, pair = range(boxes.ndim - 4, boxes.ndim)
    order = (*range(thread), sixteen, half, thread, pair)
    return boxes.transpose(order).reshape(x.shape)
