"""What the kernels for few heads share: a cluster of four blocks a head, each with 32 of its values.

With few heads the full-head kernels leave most of the chip idle, and what a token costs is the way of 64 KB through one
multiprocessor. The columns of a state do not depend on one another, so a quarter of them a block does the same
arithmetic; only the RMS of the output spans them, and its four partial sums are exchanged through the cluster's shared
memory. Sums associate as in the full-head kernels, so results are theirs bit for bit.

A warp has a quarter of the keys, a lane one column. `Cluster` holds what cannot be said in Pallas terms; interpreted on
a CPU, a head has one block and `Alone` stands in for it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas.kda.mosaic_token import (
    CHANNELS,
    GATE,
    KEY,
    MULTIPROCESSORS,
    QUERY,
    RETAIN,
    ROW_LAYOUT,
    ROWS,
    VALUE,
    padded,
    pl_ds,
    sigmoid,
    spread,
)

PARTS = 4
"""Blocks of a head, one for each quarter of the values."""
COLUMNS = CHANNELS // PARTS
QUARTER = CHANNELS // 4

TILE = plgpu.Layout.TILED(
    plgpu.Tiling(((CHANNELS, COLUMNS), (QUARTER, COLUMNS), (1,))), warp_dims=(-5,), lane_dims=(-2,), vector_dim=-1
)
"""[128, 32] of a state: a quarter of the keys a warp, a column a lane."""
COLUMN = TILE.reduce(0)
"""[32]: a column a lane, in every warp."""
TOKENS = plgpu.Layout.TILED(plgpu.Tiling(((ROWS, COLUMNS), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
"""[4, 32]: a token a warp, a column a lane."""
CHANNEL = plgpu.Layout.TILED(plgpu.Tiling(((CHANNELS,), (32,), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
"""[..., 128]: a channel a thread."""
FOURS = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS, COLUMNS), (4,))),
    warp_dims=(-3,),
    lane_dims=(plgpu.Replicated(4), -2),
    vector_dim=-1,
)
"""[4, 32]: a token a warp, four columns a lane, as the full-head kernels have them when they sum over values."""


def pays(items: int) -> bool:
    """Whether so many heads of rows are few enough to be split: their blocks repeat the work that needs all keys.

    On an H200, with three blocks a multiprocessor (96 heads) decode took 15.7 us against 11.6 unsplit, verify inside a
    step 15.0 against 11.4; with one at most (12 heads) decode 5.3 against 6.0, verify 10.4 against 12.1.
    """
    return items * PARTS <= MULTIPROCESSORS


def _f32(length: int) -> Any:
    return ir.VectorType.get((length,), ir.F32Type.get())


def _add(a: Any, b: Any) -> Any:
    return arith.addf(a, b, fastmath=arith.FastMathFlags.contract)


def _i32(value: int) -> Any:
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _at(base: Any, index: Any) -> Any:
    return utils.getelementptr(base, [index], ir.F32Type.get())


def _pieces(value: Any, length: int) -> list[Any]:
    """The elements of a vector, as vectors of one."""
    return [utils.vector_slice(value, slice(index, index + 1)) for index in range(length)]


@plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(),),
    return_type=plgpu.ShapeDtypeStruct((CHANNELS, COLUMNS), jnp.float32, layout=TILE),
)
def _over_columns(_: Any, row: Any) -> Any:
    """A row of 128 keys in shared memory over the columns of a tile, four keys a load."""
    base, layout = utils.memref_ptr(row), TILE.to_mgpu()
    first = arith.muli(utils.warp_idx(), _i32(QUARTER))
    registers = []
    for key in range(0, QUARTER, 4):
        registers += _pieces(llvm.load(_f32(4), _at(base, arith.addi(first, _i32(key)))), 4)
    shaped = np.array(registers, dtype=object).reshape(layout.registers_shape((CHANNELS, COLUMNS)))
    return mgpu.FragmentedArray(_registers=shaped, _layout=layout, _is_signed=None)


@plgpu.inline_mgpu(
    arg_types=(TILE, TILE, plgpu.RefType()),
    return_type=(plgpu.ShapeDtypeStruct((COLUMNS,), jnp.float32, layout=COLUMN),) * 2,
)
def _column_sums(_: Any, first: Any, second: Any, scratch: Any) -> Any:
    """Sums over the keys of two tiles, with one barrier: even and odd keys of a quarter, then pairs of quarters."""
    thread, layout = utils.thread_idx(), COLUMN.to_mgpu()
    base = utils.memref_ptr(scratch)

    def quarter(tile: Any) -> Any:
        keys = list(tile.registers.flat)
        return _add(functools.reduce(_add, keys[0::2]), functools.reduce(_add, keys[1::2]))

    place = lambda warp: arith.muli(arith.addi(lane, _i32(32 * warp)), _i32(2))  # noqa: E731
    lane = arith.remui(thread, _i32(32))
    own = utils.vector_concat([quarter(first), quarter(second)])
    llvm.store(own, _at(base, arith.muli(thread, _i32(2))))
    utils.warpgroup_barrier()
    parts = [llvm.load(_f32(2), _at(base, place(warp))) for warp in range(4)]
    total = _add(_add(parts[0], parts[1]), _add(parts[2], parts[3]))
    return tuple(
        mgpu.FragmentedArray(
            _registers=np.array([piece], dtype=object).reshape(layout.registers_shape((COLUMNS,))),
            _layout=layout,
            _is_signed=None,
        )
        for piece in _pieces(total, 2)
    )


def _share(tokens: int) -> Callable[[Any], None]:
    """Sends a block's row of `sums` [parts, tokens] to the other blocks of the cluster, and waits for theirs."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=None)
    def share(_: Any, sums: Any) -> None:
        thread, base = utils.thread_idx(), utils.memref_ptr(sums)
        i32 = ir.IntegerType.get_signless(32)
        block = arith.index_cast(i32, utils.cluster_idx())
        sends = arith.cmpi(arith.CmpIPredicate.ult, thread, _i32(PARTS * tokens))
        with utils.when(sends):
            index = arith.addi(arith.muli(block, _i32(tokens)), arith.remui(thread, _i32(tokens)))
            source = _at(base, index)
            target = utils.get_cluster_ptr(source, arith.divui(thread, _i32(tokens)), generic=False)
            llvm.store(llvm.load(ir.F32Type.get(), source), target)
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], "barrier.cluster.arrive.release.aligned;", "", has_side_effects=True)
        llvm.inline_asm(void, [], "barrier.cluster.wait.acquire.aligned;", "", has_side_effects=True)

    return share


def _load_rows(dtype: Any) -> Callable[[Any], Any]:
    """Loads [3, 128] with a row a warp; the fourth warp gets the third row again."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((ROWS, CHANNELS), dtype, layout=ROW_LAYOUT),
    )
    def load(_: Any, rows: Any) -> Any:
        layout, element = ROW_LAYOUT.to_mgpu(), ir.MemRefType(rows.type).element_type
        value = llvm.load(ir.VectorType.get((4,), element), _row_address(rows))
        shaped = np.array([value], dtype=object).reshape(layout.registers_shape((ROWS, CHANNELS)))
        return mgpu.FragmentedArray(_registers=shaped, _layout=layout, _is_signed=None)

    return load


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW_LAYOUT), return_type=None)
def _store_rows(_: Any, rows: Any, value: Any) -> None:
    """Overwrites [3, 128] with the first three rows."""
    with utils.when(arith.cmpi(arith.CmpIPredicate.ult, utils.warp_idx(), _i32(3))):
        llvm.store(value.registers.item(), _row_address(rows))


def _row_address(rows: Any) -> Any:
    """Where a thread's four channels of its warp's row lie."""
    lane = arith.remui(utils.thread_idx(), _i32(32))
    row = arith.minui(utils.warp_idx(), _i32(2))
    offset = arith.addi(arith.muli(row, _i32(CHANNELS)), arith.muli(lane, _i32(4)))
    return utils.getelementptr(utils.memref_ptr(rows), [offset], ir.MemRefType(rows.type).element_type)


class Cluster:
    """Four blocks a head, on a GPU."""

    parts, columns = PARTS, COLUMNS

    def __init__(self, tokens: int) -> None:
        self.share = _share(tokens)

    over_columns = staticmethod(_over_columns)
    column_sums = staticmethod(_column_sums)
    store_rows = staticmethod(_store_rows)

    @staticmethod
    def load_rows(rows: Any) -> jax.Array:
        """[3, 128] of device memory with a row a warp, and a fourth row that means nothing."""
        return _load_rows(rows.dtype)(rows)


class Alone:
    """One block a head, interpreted on a CPU, where layouts mean nothing."""

    parts, columns = 1, CHANNELS

    def __init__(self, tokens: int) -> None:
        self.share = lambda _: None

    @staticmethod
    def over_columns(row: Any) -> jax.Array:
        """The row over the columns of a state."""
        return jnp.broadcast_to(row[...][:, None], (CHANNELS, CHANNELS))

    @staticmethod
    def load_rows(rows: Any) -> jax.Array:
        """Three rows, and a fourth that means nothing."""
        return jnp.concatenate([rows[...], rows[pl_ds(2, 1)]])

    @staticmethod
    def store_rows(rows: Any, value: jax.Array) -> None:
        """Overwrites three rows with the first three."""
        rows[...] = value[:3]

    @staticmethod
    def column_sums(first: jax.Array, second: jax.Array, scratch: Any) -> tuple[jax.Array, jax.Array]:
        """Sums over the keys of two states."""
        return first.sum(axis=0), second.sum(axis=0)


def split_scratch(split: Any, tokens: int) -> dict[str, Any]:
    """Shared memory of a block: operands of each token, and what the blocks of a head exchange."""
    rows = padded(tokens)
    return {
        "vectors": plgpu.SMEM((5, rows, CHANNELS), jnp.float32),
        "overlaps": plgpu.SMEM((rows,), jnp.float32),
        "readings": plgpu.SMEM((rows, split.columns), jnp.float32),
        "sums": plgpu.SMEM((split.parts, rows), jnp.float32),
        "partial": plgpu.SMEM((2, 2 * CHANNELS), jnp.float32),
    }


def step(
    split: Any,
    state: jax.Array,
    vectors: Any,
    token: int | jax.Array,
    columns: Any,
    beta: jax.Array,
    overlap: jax.Array,
    scratch: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`mosaic_token.step` on a block's columns; `scratch` is not that of the token before."""
    query, key, retain = (split.over_columns(vectors.at[plane, token]) for plane in (QUERY, KEY, RETAIN))
    decayed = lax.optimization_barrier(state * retain)
    predicted, reading = split.column_sums(decayed * key, decayed * query, scratch)
    value = plgpu.load(vectors.at[VALUE, token, columns], layout=COLUMN, optimized=False)
    write = beta * (value - predicted)
    after = decayed + key * spread(write, 1, state.shape, TILE)
    return after, reading + overlap * write, write


def exchange_sums(split: Any, readings: Any, sums: Any, part: jax.Array, dtype: jnp.dtype) -> None:
    """Fills `sums` [parts, tokens] with each block's sum of squares of every token's rounded readings."""
    for first in range(0, readings.shape[0], ROWS):
        rows = pl_ds(first, ROWS)
        tile = plgpu.load(readings.at[rows], layout=FOURS, optimized=False).astype(dtype).astype(jnp.float32)
        sums[part, rows] = (tile * tile).sum(axis=1)
    plgpu.commit_smem()
    split.share(sums)


def outputs(
    split: Any, first: int, buffers: dict[str, Any], columns: Any, weight: jax.Array, eps: float, dtype: Any
) -> jax.Array:
    """The gated and normed outputs of four tokens, [4, columns], rounded to `dtype`."""
    rows, shape = pl_ds(first, ROWS), (ROWS, split.columns)
    load = lambda ref, layout: plgpu.load(ref, layout=layout, optimized=False)  # noqa: E731
    partial = [load(buffers["sums"].at[part, rows], TOKENS.reduce(1)) for part in range(split.parts)]
    total = partial[0] if split.parts == 1 else (partial[0] + partial[1]) + (partial[2] + partial[3])
    scale = spread(lax.rsqrt(total / CHANNELS + eps), 0, shape, TOKENS)
    rounded = load(buffers["readings"].at[rows], TOKENS).astype(dtype).astype(jnp.float32)
    gate = load(buffers["vectors"].at[GATE, rows, columns], TOKENS)
    return (rounded * scale * weight * sigmoid(gate)).astype(dtype)
