"""Matrix products of Mosaic GPU kernels, and what stands for them where a kernel is interpreted on a CPU."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas import dispatch, warp_product


class Product(NamedTuple):
    """Products of shared memory into float32."""

    chain: Callable[[tuple[int, int], Iterable[tuple[Any, Any]]], jax.Array]
    """(shape, pairs of operands, taken one by one) -> the sum of left times the transpose of right."""
    blocks: Callable[[jax.Array, Sequence[Any], Any, Callable[[int], None]], jax.Array]
    """(what to add to, left operands whose transposes stand one below another, right operand, called with the number of
    a block once its operands have been read) -> the sum of their products with the transpose of right."""


def _chain(shape: tuple[int, int], pairs: Iterable[tuple[Any, Any]]) -> jax.Array:
    def run(total: Any) -> jax.Array:
        for left, right in pairs:
            plgpu.wgmma(total, left, right.transpose((1, 0)))
        return total[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def _blocks(start: jax.Array, lefts: Sequence[Any], right: Any, done: Callable[[int], None]) -> jax.Array:
    rows = start.shape[0] // len(lefts)

    def run(total: Any) -> None:
        for index, left in enumerate(lefts):
            operands = left.transpose((1, 0)), right.transpose((1, 0))
            plgpu.wgmma(total.at[pl.ds(index * rows, rows)], *operands)
        for index in range(len(lefts)):
            plgpu.wgmma_wait(len(lefts) - 1 - index)
            done(index)

    return pl.run_state(run)(plgpu.ACC.init(start))


def _warp_chain(shape: tuple[int, int], pairs: Iterable[tuple[Any, Any]]) -> jax.Array:
    total = warp_product.zeros(shape)
    for left, right in pairs:
        total = warp_product.accumulate(total, [left], right)
    return total


def _warp_blocks(start: jax.Array, lefts: Sequence[Any], right: Any, done: Callable[[int], None]) -> jax.Array:
    total = warp_product.accumulate(start, lefts, right, turned=True)
    for index in range(len(lefts)):
        done(index)
    return total


def _dot(left: Any, right: Any, *, turned: bool = False) -> jax.Array:
    left = left[...].T if turned else left[...]
    return jnp.dot(left, right[...].T, preferred_element_type=jnp.float32)


def _emulated_chain(shape: tuple[int, int], pairs: Iterable[tuple[Any, Any]]) -> jax.Array:
    total = jnp.zeros(shape, jnp.float32)
    for left, right in pairs:
        total += _dot(left, right)
    return total


def _emulated_blocks(start: jax.Array, lefts: Sequence[Any], right: Any, done: Callable[[int], None]) -> jax.Array:
    rows, sums = start.shape[0] // len(lefts), []
    for index, left in enumerate(lefts):
        sums.append(start[index * rows : (index + 1) * rows] + _dot(left, right, turned=True))
        done(index)
    return jnp.concatenate(sums)


WARPGROUPS = Product(_chain, _blocks)
"""Those of warpgroups (`wgmma`)."""
WARPS = Product(_warp_chain, _warp_blocks)
"""Those of single warps, where there are none of warpgroups."""
EMULATED = Product(_emulated_chain, _emulated_blocks)
"""Ordinary products, since interpretation knows no tensor cores."""


def product_for(interpret: Any) -> Product:
    """The products that a kernel uses."""
    if interpret is not None:
        return EMULATED
    return WARPS if dispatch.warps_multiply() else WARPGROUPS
