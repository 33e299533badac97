"""Products of the KDA prefill kernels by single warps, for GPUs without warpgroup products."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.state.types import TransposeTransform
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas.warp_product import accumulate, accumulate_held, zeros

CHUNK = 32
NARROW = (plgpu.TilingTransform((8, CHUNK)), plgpu.SwizzleTransform(64))
"""How lines of 64 bytes lie in shared memory."""


def product(shape: tuple[int, int], *pairs: tuple[Any, Any]) -> jax.Array:
    """`mosaic_chunk.tensor_core_product`: right operands lie in shared memory, left ones there or in registers."""
    total = zeros(shape)
    for left, right in pairs:
        transforms = getattr(right, "transforms", ())
        turned = not (transforms and isinstance(transforms[-1], TransposeTransform))
        right = right if turned else type(right)(right.ref, transforms[:-1])
        if hasattr(left, "transforms"):  # a part of shared memory
            total = accumulate(total, [left], right, right_turned=turned)
        else:
            total = accumulate_held(total, left, right, right_turned=turned)
    return total


def advance(
    state: jax.Array, stage: tuple, decay: Callable[[int], jax.Array], meanwhile: Callable[[], None]
) -> tuple[jax.Array, jax.Array]:
    """`mosaic_state.advance`, one product after another."""
    query, pull, push, key, inverse, attention = stage
    state = state * decay(0)
    operand = state.astype(jnp.bfloat16)
    shape = (state.shape[0], CHUNK)
    write = accumulate(zeros(shape), [push], inverse, turned=True, kinds=(NARROW, NARROW))
    written = accumulate_held(write, operand, pull).astype(jnp.bfloat16)
    meanwhile()
    after = accumulate_held(state, written, key, right_turned=True, kind=NARROW)
    reading = zeros(shape)
    if query is not None:
        reading = accumulate_held(reading, operand, query)
        reading = accumulate_held(reading, written, attention, kind=NARROW)
    return after * decay(1), reading
