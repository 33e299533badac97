"""Eight rows of a vocabulary as tiles of 64: tile row 8 r + s has tokens 8 s to 8 s + 7 of every 64 of row r.

So a reduction over a tile's columns leaves the registers of one warp with two rows whole, eight lanes exchange the
rest, and a warp reads 64 neighbours at a time. What is known of a row stands at all of its eight tile rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector

from pallas import inline

ROWS, PARTS = 8, 8
TILE = ROWS * PARTS
NEAR = 8
"""Columns of a tile that are neighbours in a row."""
PRODUCT = plgpu.Layout.WGMMA
"""Of a tile, [64, columns]."""
TALL = PRODUCT.reduce(1)
"""Of one number for each tile row, [64]."""
LAST = 2**31 - 1
"""Behind all tokens."""


class Tiles:
    """Access to tiles; `emulated` for interpretation on a CPU."""

    def __init__(self, emulated: bool) -> None:
        self.emulated = emulated

    def count(self, shape: tuple[int, ...], axis: int) -> jax.Array:
        """The number of each place along an axis."""
        if self.emulated:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        layout = PRODUCT if len(shape) == 2 else TALL
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

    def row(self, *columns: int) -> jax.Array:
        """The row, 0 to 7, of each place of a tile, or of each tile row."""
        return self.count((TILE, *columns), 0) // PARTS

    def place(self, first: Any, columns: int) -> jax.Array:
        """Where in a row each place of a tile is that begins at `first`."""
        shape = (TILE, columns)
        part, column = self.count(shape, 0) % PARTS, self.count(shape, 1)
        return column // NEAR * (PARTS * NEAR) + part * NEAR + column % NEAR + first

    def load(self, source: Any, row: jax.Array, place: jax.Array) -> jax.Array:
        """source[row, place] of device memory; places of neighbours in a tile must be neighbours."""
        if self.emulated:
            return source[...][row, place]
        return gather(source, row, place, PRODUCT if row.ndim == 2 else TALL)

    def store(self, target: Any, row: jax.Array, column: Any, value: jax.Array, rows: int = ROWS) -> None:
        """target[row, column] = value of device memory, once for each of the first `rows` rows; all [64]."""
        if not self.emulated:
            column = jnp.broadcast_to(jnp.asarray(column, jnp.int32), row.shape) if jnp.ndim(column) == 0 else column
            _store(target, row, column, value, rows)
            return
        for r in range(rows):
            at = r * PARTS
            target[row[at], column if jnp.ndim(column) == 0 else column[at]] = value[at]

    def exp(self, x: jax.Array) -> jax.Array:
        """Of a tile, to a few parts in ten million: one instruction and a product."""
        return jnp.exp(x) if self.emulated else _exp(x)

    def spread(self, x: jax.Array, columns: int) -> jax.Array:
        """A number of each tile row at all its places."""
        return lax.broadcast_in_dim(x, (TILE, columns), (0,))

    def over_parts(self, combine: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """Joins what the eight tile rows of each row have, for all of them."""
        for distance in (1, 2, 4):
            x = combine(x, _swapped(x, distance) if self.emulated else _exchange(x, 4 * distance))
        return x

    def largest(self, value: jax.Array, token: jax.Array) -> jax.Array:
        """The first of the tokens that have the largest value of a tile's row."""
        best = self.over_parts(jnp.maximum, jnp.max(value, axis=1))
        tokens = jnp.where(value == self.spread(best, value.shape[1]), token, LAST)
        return self.over_parts(jnp.minimum, jnp.min(tokens, axis=1))

    def synchronize(self) -> None:
        """Warps of a warpgroup see each other's stores to shared memory."""
        if not self.emulated:
            inline.synchronize()


def _swapped(x: jax.Array, distance: int) -> jax.Array:
    """`_exchange` for interpretation on a CPU."""
    return lax.rev(x.reshape(-1, 2, distance), (1,)).reshape(x.shape)


def _numbers(registers: np.ndarray) -> list[tuple[tuple, ir.Value, int]]:
    """Each register's index, its first number, and how many it has."""
    found = []
    for index, register in np.ndenumerate(registers):
        size = ir.VectorType(register.type).shape[0] if isinstance(register.type, ir.VectorType) else 0
        first = vector.extract(register, dynamic_position=[], static_position=[0]) if size else register
        found.append((index, first, size))
    return found


def gather(source: Any, row: jax.Array, place: jax.Array, layout: Any) -> jax.Array:
    """source[row, place] of device memory; of a register's places the first is read, and what follows it."""
    kind = jnp.dtype(source.dtype)
    told = jnp.int8 if kind == jnp.bool_ else kind
    width = source.shape[-1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout, layout),
        return_type=plgpu.ShapeDtypeStruct(row.shape, told, layout=layout),
    )
    def run(_: Any, source: ir.Value, row: Any, place: Any) -> Any:
        element = mgpu.utils.dtype_to_ir_type(told)
        pointer = mgpu.utils.memref_ptr(source)
        registers = np.empty(row.registers.shape, dtype=object)
        pairs = zip(_numbers(row.registers), _numbers(place.registers), strict=True)
        for (index, r, size), (_, p, _) in pairs:
            at = arith.addi(arith.muli(r, inline.i32(width)), p)
            address = mgpu.utils.getelementptr(pointer, [at], element)
            wide = ir.VectorType.get((size,), element) if size else element
            registers[index] = llvm.load(wide, address, alignment=max(size, 1) * jnp.dtype(told).itemsize)
        signed = True if jnp.issubdtype(told, jnp.integer) else None
        return mgpu.FragmentedArray(_registers=registers, _layout=row.layout, _is_signed=signed)

    return run(source, *(plgpu.layout_cast(x, layout) for x in (row, place)))


def _store(target: Any, row: jax.Array, column: jax.Array, value: jax.Array, rows: int) -> None:
    """By the first lane of each row's eight tile rows."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TALL, TALL, TALL))
    def run(_: Any, target: ir.Value, row: Any, column: Any, value: Any) -> None:
        warp, lane = inline.warp_and_lane()
        arrays = (list(inline.elements(x.registers)) for x in (row, column, value))
        for half, (r, c, v) in enumerate(zip(*arrays, strict=True)):
            own = arith.addi(arith.muli(warp, inline.i32(2)), inline.i32(half))
            first = arith.cmpi(arith.CmpIPredicate.eq, lane, inline.i32(0))
            there = arith.cmpi(arith.CmpIPredicate.ult, own, inline.i32(rows))
            wanted = scf.IfOp(arith.andi(first, there))
            with ir.InsertionPoint(wanted.then_block):
                memref.store(v, target, [inline.index(r), inline.index(c)])
                scf.yield_([])

    run(target, *(plgpu.layout_cast(x, TALL) for x in (row, column, value)))


def _exp(x: jax.Array) -> jax.Array:
    @plgpu.inline_mgpu(arg_types=(PRODUCT,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=PRODUCT))
    def run(_: Any, x: Any) -> Any:
        return x.exp(approx=True)

    return run(x)


def _exchange(x: jax.Array, distance: int) -> jax.Array:
    """What the lane at a distance has."""

    @plgpu.inline_mgpu(arg_types=(TALL,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=TALL))
    def run(_: Any, x: Any) -> Any:
        registers = np.empty(x.registers.shape, dtype=object)
        for index, register in np.ndenumerate(x.registers):
            registers[index] = mgpu.utils.shfl_bfly(register, distance)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)

    return run(plgpu.layout_cast(x, TALL))
