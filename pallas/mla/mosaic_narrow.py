"""Tiles of 8-bit latents: both products take them from registers, widened to float16 there, with no copy in between.

Threads read e4m3 values of a tile from shared memory as they lie and convert pairs of them. What a thread holds of a
left operand is fixed, but which channel or token stands where in the sum of a product is free, as long as the right
operand agrees; so is which row of a product is which channel of the result. That freedom makes the reads wide and free
of bank conflicts:

* Scores: a row is a token, and a thread needs channels of two rows. It takes 16 neighbouring channels of a row, a
  quarter of a chunk. Queries are put into the same order, once a block.
* Values: a row is a channel, and a thread needs two rows and pairs of tokens. It takes 8 neighbouring channels of a
  token, two of each of the four blocks of rows.
* Row r of the scores is token `r ^ (r & 1) * 4`, or threads that read together would meet in one bank.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils, utils
from jax.experimental.mosaic.gpu.wgmma import WGMMAAccumulator, wgmma_fence, wgmma_m64
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, vector

from pallas import dispatch, inline, warp_product
from pallas.layouts import WIDE
from pallas.mla.mosaic_plan import CHUNK, NARROW_KEYS, NARROW_VALUES, PIECE, PRODUCT, TILE, Plan

STEP = 16
"""Depth of a tensor-core instruction: channels of scores, tokens of values."""
LINE = CHUNK * 2
"""Bytes of a chunk of a query, or of a tile's weights."""
VALUE_BYTES, KEY_BYTES = 8 * PIECE, 8 * CHUNK
"""Of eight tokens of a piece of values, and of keys."""
TEAMS = 3
"""Warpgroups that compute, and put queries in order."""


def add(*values: ir.Value | int) -> ir.Value:
    """Sum of 32-bit integers."""
    total, *rest = (inline.i32(x) if isinstance(x, int) else x for x in values)
    for value in rest:
        total = arith.addi(total, value)
    return total


def times(value: ir.Value, factor: int) -> ir.Value:
    """Product with a constant."""
    return arith.muli(value, inline.i32(factor))


def bits(value: ir.Value, shift: int, count: int) -> ir.Value:
    """`count` bits from `shift` on."""
    return arith.andi(arith.shrui(value, inline.i32(shift)), inline.i32((1 << count) - 1))


def _thread() -> tuple[ir.Value, ir.Value, ir.Value]:
    """(warp of the warpgroup, row of a core matrix, column of a pair) of a thread."""
    thread = utils.thread_idx()
    return bits(thread, 5, 2), bits(thread, 2, 3), bits(thread, 0, 2)


def read(address: ir.Value, offset: int, count: int) -> list[ir.Value]:
    """`count` neighbouring 32-bit words of shared memory."""
    words = ", ".join(f"${index}" for index in range(count))
    asm = f"ld.shared.v{count}.b32 {{{words}}}, [${count}+{offset}];"
    return list(utils.inline_ptx(asm, address, result_types=[inline.word()] * count, has_side_effects=True))


def widen(word: ir.Value) -> list[ir.Value]:
    """Four e4m3 values as two pairs of float16."""
    asm = """{ .reg .b16 l, h; mov.b32 {l, h}, $2;
        cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"""
    return list(utils.inline_ptx(asm, word, result_types=[inline.word(), inline.word()]))


def pair_up(first: ir.Value, second: ir.Value) -> list[ir.Value]:
    """Four values of one token and of another as two words of two pairs: (a0 b0 a1 b1), (a2 b2 a3 b3)."""
    orders = (f"prmt.b32 $0, $1, $2, {order};" for order in (0x5140, 0x7362))
    return [utils.inline_ptx(order, first, second, result_types=inline.word()) for order in orders]


def fragment(words: Sequence[ir.Value], shape: tuple[int, int]) -> mgpu.FragmentedArray:
    """A left operand of float16 from the registers that hold it, fenced from what made them."""
    layout, kind = fragmented_array.WGMMA_LAYOUT, ir.VectorType.get((2,), ir.F16Type.get())
    single = ir.VectorType.get((1,), inline.word())
    registers = np.empty(len(words), dtype=object)
    for index, word in enumerate(words):
        registers[index] = vector.bitcast(kind, vector.broadcast(single, word))
    registers = registers.reshape(layout.registers_shape(shape))
    return wgmma_fence(mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None))


class Right:
    """A right operand in shared memory, [query, depth] with depth in swizzled rows of 128 bytes."""

    def __init__(self, ref: ir.Value) -> None:
        kind = ir.MemRefType(ref.type)
        self.queries = kind.shape[0] * 8
        turned = utils.memref_transpose(ref, (1, 0, 3, 2))
        (self.base, _), _, fastest = mma_utils.create_descriptor(
            turned, swizzle=128, large_tile=(64, 64), group_size=(64, self.queries), logical_k_major=True
        )
        assert fastest == mma_utils.Dim.K

    def multiply(self, total: np.ndarray, left: mgpu.FragmentedArray, offset: int) -> np.ndarray:
        """Adds left [64, 16] x what stands `offset` bytes on."""
        f16 = ir.F16Type.get()
        return wgmma_m64(
            total,
            left,
            arith.addi(self.base, inline.i64(offset >> 4)),
            None,
            False,
            None,
            32,
            n=self.queries,
            swizzle=32,
            a_element_type=f16,
            b_element_type=f16,
        )


def _with(total: mgpu.FragmentedArray, registers: np.ndarray) -> mgpu.FragmentedArray:
    """The array with other registers, which products have written."""
    result = mgpu.FragmentedArray(_registers=registers, _layout=total.layout, _is_signed=None)
    return fragmented_array.optimization_barrier(result)


def one_ahead(load: Callable, convert: Callable, count: int) -> Iterator[Any]:
    """What was loaded for each of `count` pieces, converted; the next piece is on its way by then."""
    loaded = load(0)
    for index in range(count):
        converted = convert(loaded)
        loaded = load(index + 1) if index + 1 < count else None
        yield converted


def order_queries(plan: Plan, queries: Any) -> None:
    """Puts a share of the queries into the order in which threads hold channels, in float16, in place."""
    if plan.interpret is not None:
        return
    rows = plan.chunks * plan.most

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(WIDE),))
    def run(_: Any, queries: ir.Value) -> None:
        base, thread = inline.shared_address(queries), utils.thread_idx()
        for first in range(0, rows, TEAMS * 128):
            row = add(thread, first)
            with utils.when(arith.cmpi(arith.CmpIPredicate.ult, row, inline.i32(rows))):
                here = add(base, times(row, LINE))
                units = [add(here, times(arith.xori(bits(row, 0, 3), inline.i32(index)), 16)) for index in range(8)]
                words = [_half(word) for unit in units for word in read(unit, 0, 4)]
                for index, unit in enumerate(units):
                    _write(unit, [words[8 * quarter + index] for quarter in range(4)])

    run(queries)
    plgpu.commit_smem()


def _half(word: ir.Value) -> ir.Value:
    """A pair of bfloat16 as float16."""
    asm = """{ .reg .b32 l, h; .reg .f32 a, b; shl.b32 l, $1, 16; and.b32 h, $1, 0xffff0000;
        mov.b32 a, l; mov.b32 b, h; cvt.rn.satfinite.f16x2.f32 $0, b, a; }"""
    return utils.inline_ptx(asm, word, result_types=inline.word())


def _write(address: ir.Value, words: Sequence[ir.Value]) -> None:
    utils.inline_ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", address, *words, has_side_effects=True)


def scores(plan: Plan, tile: Any, keys: Any, queries: Any) -> jax.Array:
    """Products of a tile's tokens with the queries, [64, N] float32; `token_of` says which token a row is."""
    shape = (TILE, plan.most)
    if plan.interpret is not None:
        whole = jnp.concatenate([_values(tile), keys[...]], axis=1)
        columns = (slice(chunk * CHUNK, (chunk + 1) * CHUNK) for chunk in range(plan.chunks))
        return sum(_dot(whole[:, here], queries[chunk].T) for chunk, here in enumerate(columns))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(NARROW_VALUES), plgpu.RefType(NARROW_KEYS), plgpu.RefType(WIDE)),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=PRODUCT),
    )
    def run(_: Any, tile: ir.Value, keys: ir.Value, queries: ir.Value) -> mgpu.FragmentedArray:
        warp, row, column = _thread()
        token = arith.xori(row, times(bits(row, 0, 1), 4))
        unit = arith.xori(column, token)
        address = add(inline.shared_address(tile), times(warp, 2 * VALUE_BYTES), times(token, PIECE), times(unit, 16))
        # The other chunk of a piece.
        other = arith.xori(address, inline.i32(CHUNK))
        unit = arith.xori(column, bits(token, 1, 2))
        key = add(inline.shared_address(keys), times(warp, 2 * KEY_BYTES), times(token, CHUNK), times(unit, 16))

        def load(chunk: int) -> list[list[ir.Value]]:
            if chunk >= plan.values:
                return [read(key, half * KEY_BYTES, 4) for half in range(2)]
            here = other if chunk % 2 else address
            return [read(here, chunk // 2 * TILE * PIECE + half * VALUE_BYTES, 4) for half in range(2)]

        def words(loaded: list[list[ir.Value]]) -> list[list[ir.Value]]:
            """Of each step columns in front and behind, and of both the two rows."""
            steps = ((widen(low), widen(high)) for low, high in zip(*loaded, strict=True))
            return [[rows[half][place] for place in range(2) for half in range(2)] for rows in steps]

        if dispatch.warps_multiply():
            total = mgpu.FragmentedArray.splat(mgpu.c(0, ir.F32Type.get()), shape, fragmented_array.WGMMA_LAYOUT)
            for chunk in range(plan.chunks):
                here = utils.memref_slice(queries, chunk)
                total = warp_product.accumulate_words(total, [words(load(chunk))], here, "f16")
            return total
        total, right = WGMMAAccumulator.zero(*shape)._value, Right(utils.memref_slice(queries, 0))
        registers = total.registers.copy()
        for chunk, converted in enumerate(one_ahead(load, words, plan.chunks)):
            left = fragment([word for step in converted for word in step], (TILE, CHUNK))
            for step in range(TILE // STEP):
                offset = chunk * plan.most * LINE + step * STEP * 2
                registers = right.multiply(registers, left[:, step * STEP : (step + 1) * STEP], offset)
            nvvm.wgmma_commit_group_sync_aligned()
            if chunk:
                nvvm.wgmma_wait_group_sync_aligned(1)
        nvvm.wgmma_wait_group_sync_aligned(0)
        return _with(total, registers).to_layout(fragmented_array.WGMMA_LAYOUT)

    return run(tile, keys, queries)


def _values(tile: Any) -> jax.Array:
    return jnp.concatenate([tile[piece] for piece in range(tile.shape[0])], axis=1)


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.dot(*(x.astype(jnp.float32) for x in (left, right)), precision=jax.lax.Precision.HIGHEST)


def mix(plan: Plan, total: jax.Array, tile: Any, shares: Any, side: jax.Array) -> jax.Array:
    """Adds weighted values of a tile for the half of the channels that the warpgroup has.

    Row 64 b + 16 w + 8 h + g of the result is channel 64 w + 8 g + 2 b + h of the half.
    """
    blocks = plan.values // 2
    if plan.interpret is not None:
        half = jax.lax.dynamic_slice_in_dim(_values(tile), side * blocks * CHUNK, blocks * CHUNK, axis=1)
        return total + _dot(half.T, shares[...].T)

    @plgpu.inline_mgpu(
        arg_types=(PRODUCT, plgpu.RefType(NARROW_VALUES), plgpu.RefType(WIDE)),
        return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=PRODUCT),
    )
    def run(_: Any, total: mgpu.FragmentedArray, tile: ir.Value, shares: ir.Value) -> mgpu.FragmentedArray:
        warp, group, column = _thread()
        side = add(arith.shrui(utils.thread_idx(), inline.i32(7)), -1)  # warpgroups LEFT and RIGHT are 1 and 2
        token = times(column, 2)
        piece = add(times(side, 2), bits(warp, 1, 1))
        unit = arith.xori(add(times(bits(warp, 0, 1), 4), bits(group, 1, 2)), token)
        inside = add(times(piece, TILE * PIECE), times(token, PIECE), times(unit, 16), times(bits(group, 0, 1), 8))
        first = add(inline.shared_address(tile), inside)
        # The other token of the pair is number 5 beside this one, in the lines and so in their swizzle.
        second = arith.xori(first, inline.i32(5 * PIECE + 5 * 16))

        def load(step: int) -> list[list[list[ir.Value]]]:
            places = ((2 * step + half) * VALUE_BYTES for half in range(2))
            return [[read(address, place, 2) for address in (first, second)] for place in places]

        def words(loaded: list[list[list[ir.Value]]]) -> list[list[ir.Value]]:
            """Of each block of rows two pairs of tokens, and of both the two rows."""
            paired = ([both for a, b in zip(*pair, strict=True) for both in pair_up(a, b)] for pair in loaded)
            halves = [[word for both in pairs for word in widen(both)] for pairs in paired]
            return [[halves[half][2 * block + row] for half in range(2) for row in range(2)] for block in range(blocks)]

        steps = TILE // STEP
        if dispatch.warps_multiply():
            lefts = [list(block) for block in zip(*(words(load(step)) for step in range(steps)), strict=True)]
            return warp_product.accumulate_words(total, lefts, shares, "f16")
        total, right = WGMMAAccumulator.from_registers(total)._value, Right(shares)
        registers = total.registers.copy()
        for step, converted in enumerate(one_ahead(load, words, steps)):
            left = fragment([word for block in converted for word in block], (blocks * CHUNK, STEP))
            for block in range(blocks):
                here = left[block * CHUNK : (block + 1) * CHUNK]
                registers[block : block + 1] = right.multiply(registers[block : block + 1], here, step * STEP * 2)
            nvvm.wgmma_commit_group_sync_aligned()
            if step:
                nvvm.wgmma_wait_group_sync_aligned(1)
        nvvm.wgmma_wait_group_sync_aligned(0)
        return _with(total, registers).to_layout(fragmented_array.WGMMA_LAYOUT)

    return run(total, tile, shares)


def clean(plan: Plan, tile: Any, stored: jax.Array) -> None:
    """Zeros where a row has ended: what lies there may be NaN, which a weight of zero would not stop."""
    if plan.interpret is not None:
        inside = jnp.arange(TILE, dtype=jnp.int32)[None, :, None] < stored
        tile[...] = jnp.where(inside, tile[...], jnp.zeros((), tile.dtype))
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(NARROW_VALUES), plgpu.Layout.WG_SPLAT(())))
    def run(_: Any, tile: ir.Value, stored: mgpu.FragmentedArray) -> None:
        thread = utils.thread_idx()
        token, half = bits(thread, 1, 6), bits(thread, 0, 1)
        address = add(inline.shared_address(tile), times(token, PIECE), times(half, PIECE // 2))
        limit, zero = stored.registers.flat[0], inline.i32(0)
        with utils.when(arith.cmpi(arith.CmpIPredicate.sge, token, limit)):
            for piece in range(plan.rank // PIECE):
                for unit in range(4):
                    _write(add(address, piece * TILE * PIECE + unit * 16), [zero] * 4)

    run(tile, stored)


def token_of(plan: Plan, row: jax.Array) -> jax.Array:
    """The token of a row of the scores."""
    return row if plan.interpret is not None else row ^ ((row & 1) << 2)


def log2(plan: Plan, value: jax.Array) -> jax.Array:
    """Of a number."""
    if plan.interpret is not None:
        return jnp.log2(value)
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(splat,), return_type=plgpu.ShapeDtypeStruct((), jnp.float32, layout=splat))
    def run(_: Any, value: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        kind = ir.F32Type.get()
        found = utils.inline_ptx("lg2.approx.f32 $0, $1;", value.registers.flat[0], result_types=kind)
        return mgpu.FragmentedArray.splat(found, ())

    return run(value)
