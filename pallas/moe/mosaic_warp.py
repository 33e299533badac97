"""Products of MXFP4 weights with pairs of e4m3 by the warps themselves, for GPUs without warpgroup products.

Compute capability 10.x has no `wgmma`, and its e4m3 product of single warps is conversions and float16 products. So
both operands become float16 here, exactly: a byte of weights is two codes, which one instruction converts there, two
bytes of activations are two e4m3 numbers, which another converts. `mma.sync` m16n8k16 then sums in float32. Inputs of a
scale group meet in the order of the codes: thread t of four holds inputs 8 t .. 8 t + 7.
"""

from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas import dispatch, inline
from pallas.moe.mosaic_expand import DEPTH
from pallas.warp_product import load_matrices

LINE = 128
"""Bytes of activations that lie together, eight times."""
CODE_UNIT = 1.0
"""How much smaller codes read than they count."""


def products(packed: Any, rows: Any, blocks: int, first: int) -> Iterator[list[ir.Value]]:
    """Sums of [64, 32] times [32, 8] for each scale group of a box, as a thread holds them.

    `packed` is shared memory [64, 64 * blocks] of bytes, `rows` [8, inputs], whose block `first` begins the box: see
    `mosaic_pair.accumulate`.
    """
    warp, lane = inline.warp_and_lane()
    row = arith.addi(arith.muli(warp, inline.i32(16)), arith.remui(lane, inline.i32(16)))
    codes, width = inline.shared_address(packed), blocks * DEPTH // 2
    activations = inline.shared_address(rows)
    own = arith.remui(lane, inline.i32(8))
    for pair in range(2 * blocks):
        ahead = arith.addi(arith.divui(lane, inline.i32(16)), inline.i32(2 * pair))
        left = load_matrices(codes, row, ahead, width=width)
        start = arith.addi(activations, inline.i32((first + pair // 2) * 8 * LINE))
        chunk = arith.addi(arith.divui(lane, inline.i32(8)), inline.i32(pair % 2 * 4))
        right = load_matrices(start, own, chunk)
        for group in range(2):
            upper, lower = left[2 * group : 2 * group + 2]
            inputs = _activations(*right[2 * group : 2 * group + 2])
            yield _product(_codes(upper), _codes(lower), inputs)


def _words(operands: list[ir.Value], text: str, constraints: str) -> list[ir.Value]:
    """Four words that `text` makes."""
    i32 = ir.IntegerType.get_signless(32)
    kind = llvm.StructType.get_literal([i32] * 4)
    made = llvm.inline_asm(kind, operands, "{" + text + "}", constraints, asm_dialect=0)
    return [llvm.extractvalue(i32, made, [index]) for index in range(4)]


def _codes(word: ir.Value) -> list[ir.Value]:
    """The eight codes of a word as four pairs of float16 numbers."""
    if dispatch.capability()[0] >= dispatch.BLACKWELL:
        text = ".reg .b8 b0, b1, b2, b3; mov.b32 {b0, b1, b2, b3}, $4;"
        text += "".join(f"cvt.rn.f16x2.e2m1x2 ${index}, b{index};" for index in range(4))
    else:  # the same by masks: codes read as their value times 2^-14
        text = ".reg .b32 x, y;"
        for index in range(4):
            text += f"shr.u32 x, $4, {8 * index}; and.b32 x, x, 0xff; shl.b32 y, x, 12; or.b32 x, x, y;"
            text += "shl.b32 y, x, 12; and.b32 y, y, 0x80008000; shl.b32 x, x, 9; and.b32 x, x, 0x0e000e00;"
            text += f"or.b32 x, x, y; mov.b32 y, 0x74007400; mul.rn.f16x2 ${index}, x, y;"
    return _words([word], text, "=&r,=&r,=&r,=&r,r")


def _activations(even: ir.Value, odd: ir.Value) -> list[ir.Value]:
    """Eight e4m3 numbers, those of even and of odd place, as pairs of float16 numbers in order."""
    text = ".reg .b32 low, high; .reg .b16 h0, h1, h2, h3; prmt.b32 low, $4, $5, 0x5140; prmt.b32 high, $4, $5, 0x7362;"
    text += "mov.b32 {h0, h1}, low; mov.b32 {h2, h3}, high;"
    text += "".join(f"cvt.rn.f16x2.e4m3x2 ${index}, h{index};" for index in range(4))
    return _words([even, odd], text, "=&r,=&r,=&r,=&r,r,r")


def _product(upper: list[ir.Value], lower: list[ir.Value], inputs: list[ir.Value]) -> list[ir.Value]:
    """Rows g and g + 8 of a warp, two columns each, of one scale group."""
    f32 = ir.F32Type.get()
    kind = llvm.StructType.get_literal([f32] * 4)
    out, zero = "{$0, $1, $2, $3}", "{z, z, z, z}"
    step = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    text = f"{{ .reg .f32 z; mov.f32 z, 0f00000000; {step} {out}, {{$4, $8, $5, $9}}, {{$12, $13}}, {zero};"
    text += f" {step} {out}, {{$6, $10, $7, $11}}, {{$14, $15}}, {out}; }}"
    constraints = ",".join(["=&f"] * 4 + ["r"] * 12)
    made = llvm.inline_asm(kind, [*upper, *lower, *inputs], text, constraints, asm_dialect=0)
    return [llvm.extractvalue(f32, made, [index]) for index in range(4)]
