"""MXFP4 codes turned into the left operand of a warpgroup product, in registers.

A thread of the product m64k16 holds, of rows g and g + 8 of its warp, two pairs of neighbouring inputs. Which inputs
these are is free as long as the right operand agrees, so a thread takes the 16 bytes that are one scale group of a
row: inputs 32 t + 8 q + i, i = 0 .. 7, in word q of group t. One masked multiplication moves sign and magnitude of
the codes i and i + 4 of a word into the two bfloat16 halves of a register, where a code reads as its value times
2^-126; the product with 2^(scale - 1) is then exact. `interleave` puts the right operand in the same order.
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

from pallas.moe.mxfp4 import dequantize

ROWS = 64
"""Rows of one warpgroup product."""
DEPTH = 128
"""Inputs of one block: four scale groups."""
LARGEST_MULTIPLIER = 128
"""Largest scale s for which 2^(s - 1) is a bfloat16 number; larger ones take a second multiplication."""

SCALE_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS, 4), (16, 4), (8, 4), (1,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)
"""[64, 4] scales of one block: group t of rows g and g + 8 of a warp in lane 4 g + t."""

MASKS = ((0x000F000F, 0x1040), (0x00F000F0, 0x0104))
"""Codes of an even and an odd pair of a 16-bit half, and the factor that copies them to bits 15 .. 12 and 9 .. 6."""
FIELDS = 0x81C081C0
"""Sign, two exponent bits and one mantissa bit of each half."""


def interleave(x: Float[Array, "*batch K"]) -> Float[Array, "*batch K"]:
    """`x` with each block of 128 inputs in the order in which the product meets them."""
    blocks = x.reshape(*x.shape[:-1], -1, 4, 4, 2, 2, 2)  # group, word, half e, step r, pair b
    order = (*range(blocks.ndim - 5), *(blocks.ndim + axis for axis in (-4, -2, -1, -5, -3)))
    return blocks.transpose(order).reshape(x.shape)


def place(index: Any) -> Any:
    """Where `interleave` puts input `index` of a block; works on anything with integer operators."""
    group, word, half, step, pair = index >> 5, (index >> 3) & 3, (index >> 2) & 1, (index >> 1) & 1, index & 1
    return (word << 5) | (step << 4) | (pair << 3) | (group << 1) | half


def _i32(value: int) -> ir.Value:
    kind = ir.IntegerType.get_signless(32)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value if value < 1 << 31 else value - (1 << 32)))


def _multiply(left: ir.Value, right: ir.Value) -> ir.Value:
    """Two bfloat16 products; subnormal operands count."""
    return llvm.inline_asm(
        ir.IntegerType.get_signless(32), [left, right], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", asm_dialect=0
    )


def _power(exponent: ir.Value) -> ir.Value:
    """2^(exponent - 127) in both halves."""
    return arith.muli(exponent, _i32(0x00800080))


def _expand_group(words: list[ir.Value], scale: ir.Value) -> list[ir.Value]:
    """Sixteen registers of the 32 codes of one scale group: word, then pair."""
    limit = _i32(LARGEST_MULTIPLIER)
    factor = _power(arith.addi(arith.minui(scale, limit), _i32(126)))
    registers = []
    for word in words:
        for source in (word, arith.shrui(word, _i32(8))):
            for mask, shifts in MASKS:
                spread = arith.muli(arith.andi(source, _i32(mask)), _i32(shifts))
                registers.append(_multiply(arith.andi(spread, _i32(FIELDS)), factor))
    large = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ugt, scale, limit), [x.type for x in registers], has_else=True)
    with ir.InsertionPoint(large.then_block):
        rest = _power(arith.subi(scale, _i32(1)))
        scf.yield_([_multiply(register, rest) for register in registers])
    with ir.InsertionPoint(large.else_block):
        scf.yield_(registers)
    return list(large.results)


def _load_words(pointer: ir.Value, offset: ir.Value) -> list[ir.Value]:
    i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
    address = mgpu.utils.getelementptr(pointer, [offset], i8)
    loaded = llvm.load(ir.VectorType.get((4,), i32), address, alignment=16)
    return [vector.extract(loaded, dynamic_position=[], static_position=[i]) for i in range(4)]


def expand(packed: Any, scale: jax.Array) -> jax.Array:
    """[64, 128] bfloat16 weights in registers, inputs interleaved.

    `packed` is shared memory [64, 64] of bytes, rows contiguous; `scale` is [64, 4] int32 in `SCALE_LAYOUT`.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALE_LAYOUT),
        return_type=plgpu.ShapeDtypeStruct((ROWS, DEPTH), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def run(_: Any, source: ir.Value, scale: Any) -> Any:
        thread = arith.remui(mgpu.utils.thread_idx(), _i32(128))
        warp, lane = arith.divui(thread, _i32(32)), arith.remui(thread, _i32(32))
        pointer = mgpu.utils.memref_ptr(source)
        offset = arith.addi(arith.muli(warp, _i32(16 * DEPTH // 2)), arith.muli(lane, _i32(16)))
        layout, pair = mgpu.WGMMA_LAYOUT, ir.VectorType.get((2,), ir.BF16Type.get())
        registers = np.empty(layout.registers_shape((ROWS, DEPTH)), dtype=object)
        flat = registers.reshape(DEPTH // 8, 2)
        for half, row_scale in enumerate(scale.registers.flat):
            byte = vector.extract(row_scale, dynamic_position=[], static_position=[0])
            words = _load_words(pointer, arith.addi(offset, _i32(half * 8 * DEPTH // 2)))
            for index, value in enumerate(_expand_group(words, byte)):
                flat[index, half] = vector.bitcast(pair, vector.broadcast(ir.VectorType.get((1,), value.type), value))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return run(packed, scale)


def emulated_expand(packed: Any, scale: jax.Array) -> jax.Array:
    """`expand` for interpretation on a CPU."""
    return interleave(dequantize(packed[...], scale.astype(jnp.uint8), jnp.bfloat16))
