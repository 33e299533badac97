"""MXFP4 codes turned into e4m3 numbers, in registers: the left operand of products with MXFP8 activations.

An e2m1 code times 2^d is an e4m3 number for d = -5 .. 6. So the scales of a row's groups in a box (128 or 256 inputs)
fold into its codes, relative to the largest of them: exact where that is at most 2^11 times another; what is smaller
still counts as zero. One factor for each row and box remains, for the sums of the box's products.

A thread of the product m64k32 holds, of rows g and g + 8 of its warp, four inputs in each half of the depth. As in
`mosaic_expand` a thread takes whole scale groups and the activations are permuted instead (`interleave`): all of a
group's codes share one table of eight magnitudes, which byte permutations read. Thread t of four has groups
`blocks` * t + block of the box; word q of a group gives inputs 8 q .. 8 q + 7 to product q of the block.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxtyping import Array, Shaped

from pallas import inline
from pallas.moe.mosaic_expand import DEPTH, ROWS, SWIZZLED, blocks_of_box, chunk, load_words, scale_layout
from pallas.moe.mxfp4 import dequantize

E4M3 = jnp.float8_e4m3fn
TOP = 12
"""Level of groups with a box's largest scale: their codes read as their value times 2^6; level 0 reads as zero."""
ROW = plgpu.Layout.WGMMA.reduce(1)
"""One number for each row of a product."""
CODE_UNIT = 2.0**-6
"""What codes count beside the factor of their row and box."""
LOW, HIGH = 0x0C080000, 0x1C181410
"""Magnitudes 0 .. 3 and 4 .. 7 as e4m3 at level 0, exponents below zero standing for zero."""
LOW_STEP, HIGH_STEP = 0x08080800, 0x08080808
"""From one level to the next."""


def interleave(x: Shaped[Array, "*batch K"]) -> Shaped[Array, "*batch K"]:
    """`x` with the inputs of each box in the order in which the products meet them."""
    boxes = x.reshape(*x.shape[:-1], -1, 4, blocks_of_box(x.shape[-1]), 8, 4)
    # thread, block, half word, input -> block, half word, thread, input
    order = (*range(boxes.ndim - 4), *(boxes.ndim + axis for axis in (-3, -2, -4, -1)))
    return boxes.transpose(order).reshape(x.shape)


def place(index: Any, blocks: int) -> Any:
    """Where `interleave` puts input `index` of a box; works on anything with integer operators."""
    group, half_word, least = index >> 5, (index >> 2) & 7, index & 3
    thread, block = (group, 0) if blocks == 1 else (group >> 1, group & 1)
    return (block << 7) | (half_word << 4) | (thread << 2) | least


def _word(operands: list[ir.Value], text: str, constraints: str) -> ir.Value:
    return inline.asm([inline.word()], text, constraints, *operands, pure=True)[0]


def _permute(low: ir.Value, high: ir.Value, selector: ir.Value) -> ir.Value:
    """Four bytes of eight, chosen by the lower nibbles of `selector`."""
    return _word([low, high, selector], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")


def _items(register: ir.Value) -> list[ir.Value]:
    count = ir.VectorType(register.type).shape[0]
    return [vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(count)]


def levels(scale: jax.Array, blocks: int) -> tuple[jax.Array, jax.Array]:
    """([64, 4 * blocks] levels of a box's groups in `scale_layout`, [64] float32 factors of its rows).

    `scale` is [64, 4 * blocks] int32 in `scale_layout`.
    """
    layout = scale_layout(blocks)
    kinds = (
        plgpu.ShapeDtypeStruct(scale.shape, jnp.int32, layout=layout),
        plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=ROW),
    )

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=kinds)
    def run(_: Any, scale: Any) -> Any:
        rows = [_items(register) for register in scale.registers.flat]
        own = [row[0] if blocks == 1 else arith.maxui(*row) for row in rows]
        both = arith.ori(own[0], arith.shli(own[1], inline.i32(16)))
        for distance in (1, 2):  # the four threads of a row
            text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
            both = _word([both, _word([both], text, "=r,r")], "max.u16x2 $0, $1, $2;", "=r,r,r")
        largest = [arith.andi(both, inline.i32(0xFFFF)), arith.shrui(both, inline.i32(16))]
        level, factor = np.empty_like(scale.registers), np.empty((1, 1, 2, 1), dtype=object)
        f32, zero = ir.F32Type.get(), inline.i32(0)
        for half, (row, top) in enumerate(zip(rows, largest, strict=True)):
            above = [arith.maxsi(arith.subi(arith.addi(x, inline.i32(TOP)), top), zero) for x in row]
            level.flat[half] = vector.from_elements(scale.registers.flat[half].type, above)
            bits = arith.bitcast(f32, arith.shli(top, inline.i32(23)))
            factor.flat[half] = vector.broadcast(ir.VectorType.get((1,), f32), bits)
        shape = mgpu.WGMMA_ROW_LAYOUT.registers_shape((ROWS,))
        ends = mgpu.FragmentedArray(_registers=factor.reshape(shape), _layout=mgpu.WGMMA_ROW_LAYOUT, _is_signed=None)
        return mgpu.FragmentedArray(_registers=level, _layout=scale.layout, _is_signed=scale.is_signed), ends

    return run(scale)


def emulated_levels(scale: jax.Array, blocks: int) -> tuple[jax.Array, jax.Array]:
    """`levels` for interpretation on a CPU."""
    largest = jnp.max(scale, axis=1)
    return jnp.maximum(scale + TOP - largest[:, None], 0), lax.bitcast_convert_type(largest << 23, jnp.float32)


def _table(level: ir.Value) -> list[ir.Value]:
    """The eight magnitudes at a level."""
    zero, none = inline.i32(0), arith.cmpi(arith.CmpIPredicate.eq, level, inline.i32(0))
    halves = ((LOW, LOW_STEP), (HIGH, HIGH_STEP))
    return [
        arith.select(none, zero, arith.addi(inline.i32(first), arith.muli(level, inline.i32(step))))
        for first, step in halves
    ]


def _numbers(word: ir.Value, table: list[ir.Value]) -> list[ir.Value]:
    """The eight codes of a word as four e4m3 bytes in each of two registers."""
    magnitudes, shifted, signs = (
        arith.andi(word, inline.i32(0x77777777)),
        arith.shli(word, inline.i32(4)),
        inline.i32(0x80808080),
    )
    registers = []
    # Signs of even codes stand at the top of the shifted word's bytes, those of odd codes at the top of the word's.
    for selector, order in ((magnitudes, 0x5140), (arith.shrui(magnitudes, inline.i32(16)), 0x7362)):
        sign = arith.andi(_permute(shifted, word, inline.i32(order)), signs)
        registers.append(arith.ori(_permute(*table, selector), sign))
    return registers


def expand(packed: Any, level: jax.Array, blocks: int, block: int) -> jax.Array:
    """[64, 128] e4m3 weights of one block of a box in registers, inputs interleaved.

    `packed` is shared memory [64, 64 * blocks] of bytes, rows contiguous or `SWIZZLED`; `level` is [64, 4 * blocks]
    int32 from `levels`.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(SWIZZLED if blocks == 2 else ()), scale_layout(blocks)),
        return_type=plgpu.ShapeDtypeStruct((ROWS, DEPTH), E4M3, layout=plgpu.Layout.WGMMA_8BIT),
    )
    def run(_: Any, source: ir.Value, level: Any) -> Any:
        warp, lane = inline.warp_and_lane()
        pointer, row_bytes = mgpu.utils.memref_ptr(source), blocks * DEPTH // 2
        offset = arith.addi(arith.muli(warp, inline.i32(16 * row_bytes)), chunk(lane, blocks, block))
        layout, four = mgpu.WGMMA_LAYOUT_8BIT, ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
        registers = np.empty(layout.registers_shape((ROWS, DEPTH)), dtype=object)
        flat = registers.reshape(DEPTH // 16, 2)
        for half, row_levels in enumerate(level.registers.flat):
            table = _table(_items(row_levels)[block])
            words = load_words(pointer, arith.addi(offset, inline.i32(half * 8 * row_bytes)))
            values = [value for word in words for value in _numbers(word, table)]
            for index, value in enumerate(values):
                flat[index, half] = vector.bitcast(four, vector.broadcast(ir.VectorType.get((1,), value.type), value))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return run(packed, level)


def emulated_expand(packed: Any, level: jax.Array, blocks: int, block: int) -> jax.Array:
    """`expand` for interpretation on a CPU."""
    scale = jnp.where(level == 0, 0, level + 127 - TOP // 2).astype(jnp.uint8)
    values = jnp.where(jnp.repeat(level, 32, axis=1) == 0, 0.0, dequantize(packed[...], scale))
    return interleave(values.astype(E4M3))[:, block * DEPTH : (block + 1) * DEPTH]


def promote(sums: jax.Array, part: jax.Array, factor: jax.Array) -> jax.Array:
    """`sums` + `part` * `factor` of the row, [64, N] in `WGMMA` layout, each with one rounding."""
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout, layout, ROW),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=layout),
    )
    def run(_: Any, sums: Any, part: Any, factor: Any) -> Any:
        factors = [_items(register)[0] for register in factor.registers.flat]
        out, f32 = np.empty_like(sums.registers), ir.F32Type.get()
        pairs = zip(sums.registers.flat, part.registers.flat, strict=True)
        for index, (total, value) in enumerate(pairs):
            row = factors[index % 2]
            ends = [
                inline.asm([f32], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", v, row, t, pure=True)[0]
                for v, t in zip(_items(value), _items(total), strict=True)
            ]
            out.flat[index] = vector.from_elements(total.type, ends)
        return mgpu.FragmentedArray(_registers=out, _layout=sums.layout, _is_signed=None)

    return run(sums, part, factor)


def emulated_promote(sums: jax.Array, part: jax.Array, factor: jax.Array) -> jax.Array:
    """`promote` for interpretation on a CPU."""
    return sums + part * factor[:, None]
