"""What becomes of a product's sums before they are stored: a residual and a norm, a gated activation, a rotation.

A product whose activations an RMSNorm makes takes them before the norm's division: the kernel that made them has
multiplied with the norm's weights, and stored the sums of squares of its tiles, so that the division is one factor for
each token, which acts on the sums. A thread holds numbers of one token; the next output is eight lanes on.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from pallas import inline
from pallas.gemv import widen
from pallas.transposed_store import emulated_store, store

TOKENS = 8
"""Rows of activations, padding included."""
LANES_OF_TOKEN = 4
"""Threads of a warp that hold numbers of the same token."""


class Finish:
    """How the sums of a product of one matrix are stored; `work` is a warpgroup of the kernel."""

    whole = False
    """Whether tiles may not overlap."""

    def outputs(self, rows: int, height: int) -> list[jax.ShapeDtypeStruct]:
        """Of a matrix of so many outputs in tiles of that height."""
        raise NotImplementedError

    def scratch(self, groups: int) -> dict[str, Any]:
        """Shared memory of its own."""
        del groups
        return {}

    def prepare(self, work: Any) -> Any:
        """What serves all tiles, fetched before the first."""
        del work

    def begin(self, work: Any, row: jax.Array) -> Any:
        """What serves the tile of outputs from `row` on, fetched before its sums are there."""
        del work, row

    def put(self, work: Any, held: tuple[Any, Any], item: jax.Array, row: jax.Array, value: jax.Array) -> None:
        """Stores a warpgroup's part of a tile; `held`: results of `prepare` and `begin`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, slots=True)
class Residual(Finish):
    """The stream after the product is added to it; operands: the stream, and the weights of the norm that follows.

    Outputs: the stream, the same in float16 (see `widen.to_half`) times the weights, sums of squares by tile.
    """

    whole = True

    def outputs(self, rows: int, height: int) -> list[jax.ShapeDtypeStruct]:
        """See `Finish`."""
        shapes = (TOKENS, rows), (TOKENS, rows), (rows // height, TOKENS)
        return [jax.ShapeDtypeStruct(*x) for x in zip(shapes, (jnp.bfloat16, jnp.float16, jnp.float32))]

    def scratch(self, groups: int) -> dict[str, Any]:
        """Squares of each warp of two tiles."""
        return {
            "cells": plgpu.SMEM((2, 4 * groups, TOKENS), jnp.float32),
            "squared": plgpu.Barrier(num_arrivals=groups, num_barriers=2),
        }

    def begin(self, work: Any, row: jax.Array) -> Any:
        """The stream and the weights."""
        stream, weights = work.extras
        output, token = places(work)
        output = jnp.minimum(output + row, weights.shape[0] - 1)
        return take(work, stream, token, output), take(work, weights, output)

    def put(self, work: Any, held: tuple[Any, Any], item: jax.Array, row: jax.Array, value: jax.Array) -> None:
        """See `Finish`."""
        stream, weights = held[1]
        after, half, squares = work.outputs
        rounded = (value + stream).astype(jnp.bfloat16)
        write(work, after, row, rounded)
        wide = rounded.astype(jnp.float32)
        write(work, half, row, widen.to_half(wide * weights))
        output, _ = places(work)
        add_squares(work, squares, item, jnp.where(output < work.call.cut.height, wide * wide, 0.0), row)


@dataclasses.dataclass(frozen=True, slots=True)
class Gated(Finish):
    """SiLU(gate) * up in float16, of rows gate 0, up 0, gate 1 and so on; operand: sums of squares of the inputs."""

    eps: float

    def outputs(self, rows: int, height: int) -> list[jax.ShapeDtypeStruct]:
        """See `Finish`."""
        del height
        return [jax.ShapeDtypeStruct((TOKENS, rows // 2), jnp.float16)]

    def prepare(self, work: Any) -> Any:
        """What the norm divides each token by, inverted."""
        return root(work, self.eps)

    def put(self, work: Any, held: tuple[Any, Any], item: jax.Array, row: jax.Array, value: jax.Array) -> None:
        """Both threads of a pair store the same."""
        value = value * held[0]
        other, (output, _) = neighbour(work, value), places(work)
        first = lax.rem(output, jnp.int32(2)) == 0
        gate, up = jnp.where(first, value, other), jnp.where(first, other, value)
        result = widen.to_half(gate / (1 + jnp.exp(-gate)) * up)
        half = work.call.cut.height // 2
        target = work.outputs[0].at[:, pl.ds(lax.div(row, jnp.int32(2)), half)]
        if work.call.emulated:
            emulated_store(target, None, work.first_row // 2, result[::2], work.call.layout)
        else:
            place = lambda column: lax.div(column, jnp.int32(2))  # noqa: E731
            store(target, None, work.first_row, result, work.call.layout, place, half)


@dataclasses.dataclass(frozen=True, slots=True)
class Normed(Finish):
    """The product of what an RMSNorm makes, in float32; operand: sums of squares of the inputs."""

    eps: float

    def outputs(self, rows: int, height: int) -> list[jax.ShapeDtypeStruct]:
        """See `Finish`."""
        del height
        return [jax.ShapeDtypeStruct((TOKENS, rows), jnp.float32)]

    def prepare(self, work: Any) -> Any:
        """What the norm divides each token by, inverted."""
        return root(work, self.eps)

    def put(self, work: Any, held: tuple[Any, Any], item: jax.Array, row: jax.Array, value: jax.Array) -> None:
        """See `Finish`."""
        write(work, work.outputs[0], row, value * held[0])


@dataclasses.dataclass(frozen=True, slots=True)
class Rotated(Finish):
    """Heads whose channels from `own` on are rotated in pairs; operand: cosines, then sines [2 * tokens, pairs]."""

    own: int
    width: int

    def outputs(self, rows: int, height: int) -> list[jax.ShapeDtypeStruct]:
        """See `Finish`."""
        del height
        return [jax.ShapeDtypeStruct((TOKENS, rows), jnp.bfloat16)]

    def begin(self, work: Any, row: jax.Array) -> Any:
        """Cosines and sines."""
        output, token = places(work)
        pair = lax.div(lax.rem(output + row, jnp.int32(self.width)) - self.own, jnp.int32(2))
        pair = jnp.maximum(pair, 0)
        return tuple(take(work, work.extras[0], token + kind, pair) for kind in (0, TOKENS))

    def put(self, work: Any, held: tuple[Any, Any], item: jax.Array, row: jax.Array, value: jax.Array) -> None:
        """See `Finish`."""
        (cos, sin), (output, _) = held[1], places(work)
        sign = jnp.where(lax.rem(output, jnp.int32(2)) == 0, -1.0, 1.0)
        turned = value * cos + neighbour(work, value) * sin * sign
        shared = lax.rem(output + row, jnp.int32(self.width)) >= self.own
        write(work, work.outputs[0], row, jnp.where(shared, turned, value).astype(jnp.bfloat16))


def places(work: Any) -> tuple[jax.Array, jax.Array]:
    """Output within the tile, and token, of each number that a warpgroup finishes."""
    call, shape = work.call, (work.call.share, work.call.columns)
    if call.emulated:
        output, token = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))
    else:
        output, token = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=call.layout) for axis in range(2))
    return output + work.first_row, token


def write(work: Any, target: Any, row: jax.Array, value: jax.Array) -> None:
    """Stores a part of the tile of outputs from `row` on."""
    call, height = work.call, work.call.cut.height
    target = target.at[:, pl.ds(row, height)]
    if call.emulated:
        emulated_store(target, None, work.first_row, value, call.layout, limit=height)
    else:
        store(target, None, work.first_row, value, call.layout, limit=height)


def take(work: Any, source: Any, *places: jax.Array) -> jax.Array:
    """`source` in device memory at these places, in float32."""
    if work.call.emulated:
        return source[...][places].astype(jnp.float32)
    return inline.gather(source, places, work.call.layout)


def root(work: Any, eps: float) -> jax.Array:
    """What an RMSNorm of the inputs divides each token by, inverted; the first operand has their sums of squares."""
    return lax.rsqrt(column_totals(work, work.extras[0]) * (1 / work.call.depth) + eps)


def neighbour(work: Any, value: jax.Array) -> jax.Array:
    """The other output of each number's pair."""
    if work.call.emulated:
        return value.reshape(-1, 2, value.shape[1])[:, ::-1].reshape(value.shape)

    @plgpu.inline_mgpu(
        arg_types=(work.call.layout,),
        return_type=plgpu.ShapeDtypeStruct(value.shape, jnp.float32, layout=work.call.layout),
    )
    def run(_: Any, value: Any) -> Any:
        return inline.numbers([mgpu.utils.shfl_bfly(x, TOKENS) for x in inline.elements(value.registers)], value)

    return run(value)


def _of_token(value: ir.Value) -> ir.Value:
    """The sum of the numbers of a token in a warp, in each of its threads."""
    for distance in (TOKENS, 2 * TOKENS):
        value = arith.addf(value, mgpu.utils.shfl_bfly(value, distance))
    return value


def column_totals(work: Any, source: Any) -> jax.Array:
    """Sums over the rows of `source` [n, tokens], where a warpgroup's numbers are."""
    call, shape = work.call, (work.call.share, work.call.columns)
    if call.emulated:
        return jnp.broadcast_to(jnp.sum(source[...], axis=0)[None], shape)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(()), call.layout),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=call.layout),
    )
    def run(_: Any, source: ir.Value, like: Any) -> Any:
        _, lane = inline.warp_and_lane()
        token, first = (inline.index(f(lane, inline.i32(TOKENS))) for f in (arith.remui, arith.divui))
        total = None
        rows, kind = ir.MemRefType(source.type).shape[0], ir.IndexType.get()
        for step in range(0, rows, LANES_OF_TOKEN):
            row = arith.addi(first, arith.constant(kind, step))
            last, there = arith.constant(kind, rows - 1), None
            if step + LANES_OF_TOKEN > rows:
                there, row = arith.cmpi(arith.CmpIPredicate.ule, row, last), arith.minui(row, last)
            value = memref.load(source, [row, token])
            if there is not None:
                value = arith.select(there, value, arith.constant(ir.F32Type.get(), 0.0))
            total = value if total is None else arith.addf(total, value)
        return inline.numbers([_of_token(total)] * like.registers.size, like)

    return run(source, places(work)[0])


def add_squares(work: Any, target: Any, item: jax.Array, squares: jax.Array, row: jax.Array) -> None:
    """target[tile] = sums over the tile's outputs: of each warp, by shared memory of all, and one stores them."""
    cells, squared = work.smem["cells"], work.smem["squared"]
    buffer, tile = lax.rem(item, jnp.int32(2)), lax.div(row, jnp.int32(work.call.cut.height))
    if work.call.emulated:
        cells[buffer, 4 * work.group] = jnp.sum(squares, axis=0)
        for warp in range(1, 4):
            cells[buffer, 4 * work.group + warp] = jnp.zeros_like(squares[0])
    else:
        _keep(cells.at[buffer], squares, work.group, work.call.layout)
    plgpu.barrier_arrive(squared.at[buffer])
    plgpu.barrier_wait(squared.at[buffer])

    @pl.when(work.group == 0)
    def _store() -> None:
        if work.call.emulated:
            target[tile] = jnp.sum(cells[buffer], axis=0)
        else:
            _sum_cells(target.at[tile], cells.at[buffer])


def _keep(cells: Any, squares: jax.Array, group: jax.Array, layout: Any) -> None:
    """cells[4 group + warp, token] = the warp's sum."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, plgpu.Layout.WG_SPLAT(())))
    def run(_: Any, cells: ir.Value, squares: Any, group: Any) -> None:
        value, *others = inline.elements(squares.registers)
        for other in others:
            value = arith.addf(value, other)
        warp, lane = inline.warp_and_lane()
        cell = arith.addi(arith.muli(group.registers.item(), inline.i32(4)), warp)
        token = arith.remui(lane, inline.i32(TOKENS))
        memref.store(_of_token(value), cells, [inline.index(cell), inline.index(token)])

    run(cells, squares, group)


def _sum_cells(target: Any, cells: Any) -> None:
    """target[token] = the sum of the warps' cells; every thread with a token stores the same."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def run(_: Any, target: ir.Value, cells: ir.Value) -> None:
        _, lane = inline.warp_and_lane()
        token = inline.index(arith.remui(lane, inline.i32(TOKENS)))
        kind, total = ir.IndexType.get(), None
        for cell in range(ir.MemRefType(cells.type).shape[0]):
            value = memref.load(cells, [arith.constant(kind, cell), token])
            total = value if total is None else arith.addf(total, value)
        memref.store(total, target, [token])

    run(target, cells)
