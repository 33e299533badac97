"""Weights of 8 bits as the left operand of tensor-core products: int8 codes widened to float16 in registers.

float16 takes half the instructions of bfloat16, whose seven bits of mantissa cannot hold a code beside a larger number.

For a product of 64 rows and 16 inputs, of a warpgroup or of its single warps, lane 4 g + t of a warp holds, of its rows
g and g + 8, inputs 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. `int8.interleave` makes thread t's 32 codes of a row neighbours,
so that it reads 16 bytes at a time. Boxes of 64 rows and 128 inputs lie in shared memory as the copy engine swizzles
them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from pallas import inline
from pallas.gemv.int8 import BOX, restore

ROWS = 64
SWIZZLED = (plgpu.TilingTransform((8, BOX)), plgpu.SwizzleTransform(128))
"""How a box lies in shared memory: a line of 128 bytes for each row."""
HALF = BOX // 2
HALF_SCALE, HALF_LARGEST = 16.0, 65504.0
"""What activations are divided by to become float16, and the largest such number."""
BYTES = 16
"""Read at a time: the codes of four products of 16 inputs."""


def to_half(x: jax.Array) -> jax.Array:
    """Activations for products in float16: a `HALF_SCALE`-th of them, exact from 2^-10 on, at most `HALF_LARGEST`."""
    scaled = jnp.clip(x.astype(jnp.float32) * (1 / HALF_SCALE), -HALF_LARGEST, HALF_LARGEST)
    return scaled.astype(jnp.float16)


def _pair(word: ir.Value, high: bool) -> ir.Value:
    """Two codes of a word, whose sign bits are turned, as two float16 numbers.

    0x64 above a byte is 1024 plus the byte as such a number, and the turned codes are 128 too large.
    """
    bytes_of_pair = "0x4342" if high else "0x4140"
    code = (
        f"{{ .reg .b32 wide, base; prmt.b32 wide, $1, 0x64, {bytes_of_pair}; "
        "mov.b32 base, 0x64806480; sub.f16x2 $0, wide, base; }"
    )
    return llvm.inline_asm(ir.IntegerType.get_signless(32), [word], code, "=r,r", asm_dialect=0)


def widen(codes: Any, part: int) -> jax.Array:
    """[64, 64] float16 of one half of a box: `codes` is shared memory [64, 128] of int8, `SWIZZLED`, interleaved."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(SWIZZLED),),
        return_type=plgpu.ShapeDtypeStruct((ROWS, HALF), jnp.float16, layout=plgpu.Layout.WGMMA),
    )
    def run(_: Any, source: ir.Value) -> Any:
        i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
        warp, lane = inline.warp_and_lane()
        row, member = arith.divui(lane, inline.i32(4)), arith.remui(lane, inline.i32(4))
        chunk = arith.xori(arith.addi(arith.muli(member, inline.i32(2)), inline.i32(part)), row)
        first = arith.addi(arith.muli(warp, inline.i32(16 * BOX)), arith.muli(row, inline.i32(BOX)))
        first = arith.addi(first, arith.muli(chunk, inline.i32(BYTES)))
        layout, pair = mgpu.WGMMA_LAYOUT, ir.VectorType.get((2,), ir.F16Type.get())
        registers = np.empty(layout.registers_shape((ROWS, HALF)), dtype=object)
        flat = registers.reshape(HALF // 8, 2)
        pointer = mgpu.utils.memref_ptr(source)
        for lower in range(2):
            address = mgpu.utils.getelementptr(pointer, [arith.addi(first, inline.i32(lower * 8 * BOX))], i8)
            words = llvm.load(ir.VectorType.get((4,), i32), address, alignment=BYTES)
            for step in range(4):
                word = vector.extract(words, dynamic_position=[], static_position=[step])
                word = arith.xori(word, inline.i32(0x80808080))
                for high in range(2):
                    value = _pair(word, bool(high))
                    value = vector.bitcast(pair, vector.broadcast(ir.VectorType.get((1,), i32), value))
                    flat[2 * step + high, lower] = value
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return run(codes)


def emulated_widen(codes: Any, part: int) -> jax.Array:
    """`widen` for interpretation on a CPU."""
    return restore(codes[...]).astype(jnp.float16)[:, part * HALF : (part + 1) * HALF]


def by_row(values: Any, offset: jax.Array, shape: tuple[int, int], layout: Any) -> jax.Array:
    """values[offset + r] in every column of row r, from global memory; behind the last one it counts again."""
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + offset
    row = jnp.minimum(row, values.shape[0] - 1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(()), layout),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout),
    )
    def run(_: Any, values: ir.Value, row: Any) -> Any:
        registers = np.empty(row.registers.shape, dtype=object)
        for index, register in np.ndenumerate(row.registers):
            size = ir.VectorType(register.type).shape[0] if isinstance(register.type, ir.VectorType) else None
            scalar = vector.extract(register, dynamic_position=[], static_position=[0]) if size else register
            loaded = memref.load(values, [arith.index_cast(ir.IndexType.get(), scalar)])
            # Neighbours in a register are of one row.
            kind = ir.VectorType.get((size,), loaded.type) if size else None
            registers[index] = vector.broadcast(kind, loaded) if size else loaded
        return mgpu.FragmentedArray(_registers=registers, _layout=row.layout, _is_signed=None)

    return run(values, row)


def emulated_by_row(values: Any, offset: jax.Array, shape: tuple[int, int], layout: Any) -> jax.Array:
    """`by_row` for interpretation on a CPU."""
    del layout
    row = jnp.minimum(offset + jnp.arange(shape[0], dtype=jnp.int32), values.shape[0] - 1)
    return jnp.broadcast_to(values[...][row][:, None], shape)
