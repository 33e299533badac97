"""MXFP4 codes turned into the left operand of a warpgroup product, in registers.

A thread of the product m64k16 holds, of rows g and g + 8 of its warp, two pairs of neighbouring inputs. Which inputs
these are is free as long as the right operand agrees, so a thread takes the 16 bytes that are one scale group of a
row. Weights come in boxes of 64 rows and 128 or 256 inputs; a box of two blocks lies in shared memory as the copy
engine swizzles it. Thread t of four has groups `blocks` * t + block of the box, inputs 8 q + i, i = 0 .. 7, in word q
of a group. One masked multiplication moves sign and magnitude of the codes i and i + 4 of a word into the two bfloat16
halves of a register, where a code reads as its value times 2^-126; the product with 2^(scale - 1) is then exact.
`interleave` puts the right operand in the same order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector
from jaxtyping import Array, Float

from pallas import inline
from pallas.moe.mxfp4 import dequantize

ROWS = 64
"""Rows of one warpgroup product."""
DEPTH = 128
"""Inputs of one block: four scale groups."""
LARGEST_MULTIPLIER = 128
"""Largest scale s for which 2^(s - 1) is a bfloat16 number; larger ones take a second multiplication."""

SWIZZLED = (plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(128))
"""How a box of two blocks lies in shared memory."""


def scale_layout(blocks: int) -> Any:
    """[64, 4 * blocks] scales of a box: groups `blocks` * t .. of rows g and g + 8 of a warp in lane 4 g + t."""
    width = 4 * blocks
    return plgpu.Layout.TILED(
        plgpu.Tiling(((ROWS, width), (16, width), (8, width), (blocks,))),
        warp_dims=(-7,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def blocks_of_box(depth: int) -> int:
    """Blocks of 128 inputs in a box: two where the depth allows, whose rows are whole 128-byte lines."""
    return 2 if depth % (2 * DEPTH) == 0 else 1


MASKS = ((0x000F000F, 0x1040), (0x00F000F0, 0x0104))
"""Codes of an even and an odd pair of a 16-bit half, and the factor that copies them to bits 15 .. 12 and 9 .. 6."""
FIELDS = 0x81C081C0
"""Sign, two exponent bits and one mantissa bit of each half."""


def interleave(x: Float[Array, "*batch K"]) -> Float[Array, "*batch K"]:
    """`x` with the inputs of each box in the order in which the products meet them."""
    boxes = x.reshape(*x.shape[:-1], -1, 4, blocks_of_box(x.shape[-1]), 4, 2, 2, 2)
    # thread, block, word, half e, step r, pair b -> block, word, step, pair, thread, half
    order = (*range(boxes.ndim - 6), *(boxes.ndim + axis for axis in (-5, -4, -2, -1, -6, -3)))
    return boxes.transpose(order).reshape(x.shape)


def place(index: Any, blocks: int) -> Any:
    """Where `interleave` puts input `index` of a box; works on anything with integer operators."""
    group, word, half, step, pair = index >> 5, (index >> 3) & 3, (index >> 2) & 1, (index >> 1) & 1, index & 1
    thread, block = (group, 0) if blocks == 1 else (group >> 1, group & 1)
    return (block << 7) | (word << 5) | (step << 4) | (pair << 3) | (thread << 1) | half


def _multiply(left: ir.Value, right: ir.Value) -> ir.Value:
    """Two bfloat16 products; subnormal operands count."""
    return inline.asm([inline.word()], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", left, right, pure=True)[0]


def _power(exponent: ir.Value) -> ir.Value:
    """2^(exponent - 127) in both halves."""
    return arith.muli(exponent, inline.i32(0x00800080))


def _expand_word(word: ir.Value, factor: ir.Value) -> list[ir.Value]:
    """Four registers of the eight codes of a word: codes j and j + 4 in register j."""
    registers = []
    for source in (word, arith.shrui(word, inline.i32(8))):
        for mask, shifts in MASKS:
            spread = arith.muli(arith.andi(source, inline.i32(mask)), inline.i32(shifts))
            registers.append(_multiply(arith.andi(spread, inline.i32(FIELDS)), factor))
    return registers


def _expand_group(words: list[ir.Value], scale: ir.Value) -> list[ir.Value]:
    """Sixteen registers of the 32 codes of one scale group: word, then pair."""
    limit = inline.i32(LARGEST_MULTIPLIER)
    factor = _power(arith.addi(arith.minui(scale, limit), inline.i32(126)))
    registers = [register for word in words for register in _expand_word(word, factor)]
    large = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ugt, scale, limit), [x.type for x in registers], has_else=True)
    with ir.InsertionPoint(large.then_block):
        rest = _power(arith.subi(scale, inline.i32(1)))
        scf.yield_([_multiply(register, rest) for register in registers])
    with ir.InsertionPoint(large.else_block):
        scf.yield_(registers)
    return list(large.results)


def load_words(pointer: ir.Value, offset: ir.Value) -> list[ir.Value]:
    """The four words of a scale group."""
    i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
    address = mgpu.utils.getelementptr(pointer, [offset], i8)
    loaded = llvm.load(ir.VectorType.get((4,), i32), address, alignment=16)
    return [vector.extract(loaded, dynamic_position=[], static_position=[i]) for i in range(4)]


def expand(packed: Any, scale: jax.Array, blocks: int, block: int) -> jax.Array:
    """[64, 128] bfloat16 weights of one block of a box in registers, inputs interleaved.

    `packed` is shared memory [64, 64 * blocks] of bytes, rows contiguous or `SWIZZLED`; `scale` is [64, 4 * blocks]
    int32 in `scale_layout`.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(SWIZZLED if blocks == 2 else ()), scale_layout(blocks)),
        return_type=plgpu.ShapeDtypeStruct((ROWS, DEPTH), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def run(_: Any, source: ir.Value, scale: Any) -> Any:
        warp, lane = inline.warp_and_lane()
        pointer = mgpu.utils.memref_ptr(source)
        row_bytes = blocks * DEPTH // 2
        offset = arith.addi(arith.muli(warp, inline.i32(16 * row_bytes)), chunk(lane, blocks, block))
        layout, pair = mgpu.WGMMA_LAYOUT, ir.VectorType.get((2,), ir.BF16Type.get())
        registers = np.empty(layout.registers_shape((ROWS, DEPTH)), dtype=object)
        flat = registers.reshape(DEPTH // 8, 2)
        for half, row_scale in enumerate(scale.registers.flat):
            byte = vector.extract(row_scale, dynamic_position=[], static_position=[block])
            words = load_words(pointer, arith.addi(offset, inline.i32(half * 8 * row_bytes)))
            for index, value in enumerate(_expand_group(words, byte)):
                flat[index, half] = vector.bitcast(pair, vector.broadcast(ir.VectorType.get((1,), value.type), value))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return run(packed, scale)


def chunk(lane: ir.Value, blocks: int, block: int) -> ir.Value:
    """Byte of row g = lane / 4 of a warp's rows where the group of thread t = lane % 4 begins."""
    if blocks == 1:
        return arith.muli(lane, inline.i32(16))
    row, thread = arith.divui(lane, inline.i32(4)), arith.remui(lane, inline.i32(4))
    chunk = arith.xori(arith.addi(arith.muli(thread, inline.i32(2)), inline.i32(block)), row)
    return arith.addi(arith.muli(row, inline.i32(DEPTH)), arith.muli(chunk, inline.i32(16)))


def emulated_expand(packed: Any, scale: jax.Array, blocks: int, block: int) -> jax.Array:
    """`expand` for interpretation on a CPU."""
    values = interleave(dequantize(packed[...], scale.astype(jnp.uint8), jnp.bfloat16))
    return values[:, block * DEPTH : (block + 1) * DEPTH]
