"""Matrix products of the warps themselves (`mma.sync`): for gemv everywhere, for others on GPUs without `wgmma`.

m16n8k16 of bfloat16 and float16 exists from compute capability 8.0 on, `wgmma` on 9.x alone. Operands lie in shared
memory as the copy engine swizzles them for `wgmma`, warp w of a warpgroup has rows 16 w .. of every 64, and sums lie in
the registers of `Layout.WGMMA`: a kernel changes nothing but its inner product. Unlike there, operands have been read
when a product is over; a barrier of the warpgroup stands between that and a copy into their place.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas import inline
from pallas.layouts import WIDE

ROWS = 64
DEPTH = 64
"""Inputs of an operand, a line of 128 bytes."""
HELD = plgpu.Layout.WGMMA
LINE = 2 * DEPTH
Words = list[ir.Value]
"""Registers of two 16-bit numbers each."""


def accumulate(
    total: jax.Array,
    lefts: Sequence[Any],
    right: Any,
    *,
    turned: bool = False,
    right_turned: bool = False,
    kinds: tuple[Any, Any] = (WIDE, WIDE),
) -> jax.Array:
    """`total` [64 * lefts, N], float32 in `HELD` layout, plus each of `lefts` [64, K] times the transpose of `right`.

    `right` is shared memory [N, K], N a multiple of 8 and K of 32; `lefts` are such memory too. With `turned` these are
    [K, 64], with `right_turned` that is [K, N]. `kinds`: how left and right memory is tiled and swizzled.
    """
    depth = right.shape[0 if right_turned else 1]

    @plgpu.inline_mgpu(
        arg_types=(HELD, plgpu.RefType(kinds[1]), *(plgpu.RefType(kinds[0]),) * len(lefts)),
        return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=HELD),
    )
    def run(_: Any, total: Any, right: Any, *lefts: Any) -> Any:
        load = _load_turned if turned else _load_left
        return _with_products(total, [partial(load, left) for left in lefts], right, depth // 16, turned=right_turned)

    return run(total, right, *lefts)


def accumulate_held(
    total: jax.Array, left: jax.Array, right: Any, *, right_turned: bool = False, kind: Any = WIDE
) -> jax.Array:
    """`accumulate` of one left operand [64, K] in registers, in `HELD` layout."""

    @plgpu.inline_mgpu(
        arg_types=(HELD, plgpu.RefType(kind), HELD),
        return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=HELD),
    )
    def run(_: Any, total: Any, right: Any, left: Any) -> Any:
        word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        bits = (vector.bitcast(word, register) for register in left.registers.flat)
        words = [vector.extract(x, dynamic_position=[], static_position=[0]) for x in bits]
        load = lambda step: words[4 * step : 4 * step + 4]  # noqa: E731
        numbers = "f16" if isinstance(left.mlir_dtype, ir.F16Type) else "bf16"
        return _with_products(total, [load], right, len(words) // 4, numbers, turned=right_turned)

    return run(total, right, left)


def zeros(shape: tuple[int, int]) -> jax.Array:
    """A total to begin with."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), HELD)


def accumulate_words(total: Any, lefts: Sequence[list[Words]], right: ir.Value, kind: str = "bf16") -> Any:
    """`accumulate` inside inline code: `lefts` are the four words of each step of 16 inputs, `kind` is f16 or bf16."""
    return _with_products(total, [left.__getitem__ for left in lefts], right, len(lefts[0]), kind)


def _with_products(
    total: Any,
    lefts: Sequence[Callable[[int], Words]],
    right: ir.Value,
    steps: int,
    kind: str | None = None,
    *,
    turned: bool = False,
) -> Any:
    """`total` plus the products of each left operand, loaded step by step, and `right`, loaded once."""
    kind = kind or str(ir.MemRefType(right.type).element_type)
    sums, parts = list(inline.elements(total.registers)), total.shape[1] // 8
    load_right = _load_right_turned if turned else _load_right
    for pair in range(steps // 2):
        # Where a right operand serves one product alone it need not wait in registers.
        rights = [load_right(right, part, pair) for part in range(parts)] if len(lefts) > 1 else None
        for block, load in enumerate(lefts):
            left = load(2 * pair), load(2 * pair + 1)
            for part in range(parts):
                both = rights[part] if rights else load_right(right, part, pair)
                mine = slice(4 * (block * parts + part), 4 * (block * parts + part) + 4)
                for step in range(2):
                    sums[mine] = _product(sums[mine], left[step], both[2 * step : 2 * step + 2], kind)
    registers, left_over = np.empty(total.registers.shape, dtype=object), iter(sums)
    for place, register in enumerate(total.registers.flat):
        held = ir.VectorType(register.type)
        registers.flat[place] = vector.from_elements(held, [next(left_over) for _ in range(held.shape[0])])
    return mgpu.FragmentedArray(_registers=registers, _layout=total.layout, _is_signed=None)


def _product(sums: Words, left: Words, right: Words, kind: str) -> Words:
    """[16, 8] sums plus [16, 16] times [16, 8]."""
    f32 = ir.F32Type.get()
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    four = llvm.StructType.get_literal([f32] * 4)
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    made = llvm.inline_asm(four, [*left, *right, *sums], text, constraints, asm_dialect=0)
    return [llvm.extractvalue(f32, made, [index]) for index in range(4)]


def load_matrices(start: ir.Value, line: ir.Value, chunk: ir.Value, *, width: int = LINE) -> Words:
    """Four 8 x 8 matrices of 16-bit numbers, a register each: lane l names line l % 8 of matrix l / 8.

    That is the 16 bytes `chunk` of `line` of shared memory in lines of `width` bytes, which are swizzled if they have
    128. A lane 4 g + t gets numbers 2 t and 2 t + 1 of line g.
    """
    if width == LINE:
        chunk = arith.xori(chunk, arith.remui(line, inline.i32(8)))
    place = arith.addi(arith.muli(line, inline.i32(width)), arith.muli(chunk, inline.i32(16)))
    return _matrices(arith.addi(start, place))


def _matrices(address: ir.Value, *, turned: bool = False) -> Words:
    """`load_matrices` from addresses; if `turned`, a lane gets of lines 2 t and 2 t + 1 number g."""
    i32 = ir.IntegerType.get_signless(32)
    text = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if turned else ''}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    kind = llvm.StructType.get_literal([i32] * 4)
    made = llvm.inline_asm(kind, [address], text, "=r,=r,=r,=r,r", asm_dialect=0, has_side_effects=True)
    return [llvm.extractvalue(i32, made, [index]) for index in range(4)]


def _place(source: Any, line: ir.Value, tile: int, chunk: ir.Value) -> ir.Value:
    """Address of 16 bytes: `chunk` of a line within its swizzled tile, the `tile`-th beside one another."""
    strides, _ = ir.MemRefType(source.type).get_strides_and_offset()
    width = ir.MemRefType(source.type).shape[3]
    inside = arith.remui(line, inline.i32(8))
    swizzle = inside if width == DEPTH else arith.divui(inside, inline.i32(2))
    if strides[0] == 8 * width:
        place = arith.muli(line, inline.i32(2 * width))
    else:
        place = arith.muli(arith.divui(line, inline.i32(8)), inline.i32(2 * strides[0]))
        place = arith.addi(place, arith.muli(inside, inline.i32(2 * width)))
    place = arith.addi(place, arith.muli(arith.xori(chunk, swizzle), inline.i32(16)))
    return arith.addi(inline.shared_address(source), arith.addi(place, inline.i32(2 * tile * strides[1])))


def _chunks(source: Any) -> int:
    """16-byte chunks of a line within a tile."""
    return ir.MemRefType(source.type).shape[3] // 8


def _load_left(source: Any, step: int) -> Words:
    """Rows g and g + 8 of the warp, then the same of the last eight inputs of the step."""
    warp, lane = inline.warp_and_lane()
    line = arith.addi(arith.muli(warp, inline.i32(16)), arith.remui(lane, inline.i32(16)))
    tile, chunk = divmod(2 * step, _chunks(source))
    return _matrices(_place(source, line, tile, arith.addi(arith.divui(lane, inline.i32(16)), inline.i32(chunk))))


def _load_turned(source: Any, step: int) -> Words:
    """The same of memory in which lines are inputs."""
    warp, lane = inline.warp_and_lane()
    line = arith.addi(arith.muli(arith.divui(lane, inline.i32(16)), inline.i32(8)), arith.remui(lane, inline.i32(8)))
    line = arith.addi(line, inline.i32(16 * step))
    chunk = arith.addi(arith.muli(warp, inline.i32(2)), arith.remui(arith.divui(lane, inline.i32(8)), inline.i32(2)))
    chunks, (strides, _) = _chunks(source), ir.MemRefType(source.type).get_strides_and_offset()
    address = _place(source, line, 0, arith.remui(chunk, inline.i32(chunks)))
    beside = arith.muli(arith.divui(chunk, inline.i32(chunks)), inline.i32(2 * strides[1]))
    return _matrices(arith.addi(address, beside), turned=True)


def _load_right(source: Any, part: int, pair: int) -> Words:
    """Eight columns' first and last eight inputs of two steps."""
    _, lane = inline.warp_and_lane()
    strides, _ = ir.MemRefType(source.type).get_strides_and_offset()
    tile, chunk = divmod(4 * pair, _chunks(source))
    ahead = arith.addi(arith.divui(lane, inline.i32(8)), inline.i32(chunk))
    address = _place(source, arith.remui(lane, inline.i32(8)), tile, ahead)
    return _matrices(arith.addi(address, inline.i32(2 * part * strides[0])))


def _load_right_turned(source: Any, part: int, pair: int) -> Words:
    """The same of memory in which lines are inputs."""
    _, lane = inline.warp_and_lane()
    tile, chunk = divmod(part, _chunks(source))
    line = arith.addi(lane, inline.i32(32 * pair))
    return _matrices(_place(source, line, tile, inline.i32(chunk)), turned=True)
