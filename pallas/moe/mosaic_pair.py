"""Products of MXFP4 weights with activations that are held as pairs of 8-bit floats.

An activation is unit * (high + low / 16) with high and low in e4m3: high keeps four significant bits, low the next four
and more, so bfloat16 values keep all eight of theirs unless they are 2^12 times smaller than the largest that shares
their unit, which is a token's or that of a token's scale group. A code as e4m3 is a matter of masks: sign, exponent
and mantissa bits move to their places, where they read as the code's value times 2^-6, subnormals included. The product
m64k32 covers exactly one scale group of each row, so scales multiply its float32 sums and weights are never rounded.

Thread t of four holds inputs 8 t .. 8 t + 7 of a group of 32, those of even number in the first four places of the
product, those of odd number in the other four: `interleave` orders the activations alike.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector
from jaxtyping import Array, Float

from pallas import inline
from pallas.moe import mosaic_warp
from pallas.moe.mosaic_expand import DEPTH, ROWS, SWIZZLED
from pallas.moe.mxfp4 import GROUP, dequantize

E4M3 = jnp.float8_e4m3fn
LOW = 16.0
"""How much larger low parts are stored than they count."""
CODE_UNIT = 64.0
"""How much smaller codes read than they count."""
LARGEST = 6
"""Binary exponent of the largest high part of those that share a unit: no more, or the largest scale overflows."""
WIDE = (plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(128))
"""How activations lie in shared memory: lines of 128 bytes."""
TOKENS = 4
"""Tokens of a block of work, each a pair of columns of the narrowest product."""
COLUMNS = 2 * TOKENS


class Pairs(NamedTuple):
    """Activations of tokens: rows 2 n and 2 n + 1 are high and low of token n, inputs interleaved."""

    rows: Array
    unit: Array
    """What a one in `rows` counts, float32: [tokens], [blocks, tokens], or of scale groups [blocks, tokens, groups]."""


ENDS = plgpu.Layout.TILED(plgpu.Tiling(((ROWS, TOKENS), (32, 2))), warp_dims=(-4, -3), lane_dims=(-2,), vector_dim=-1)
"""[64, 4] results of a tile: a warp has 32 rows of two tokens."""


def unit_layout(blocks: int) -> Any:
    """[4, 4 * blocks] units of a box: those of token t in lanes 4 g + t."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((TOKENS, 4 * blocks),)),
        warp_dims=(plgpu.Replicated(4),),
        lane_dims=(plgpu.Replicated(8), -2),
        vector_dim=-1,
    )


def scale_layout(blocks: int) -> Any:
    """[64, 4 * blocks] scales of a box: all of rows g and g + 8 of a warp in every lane 4 g .. 4 g + 3."""
    width = 4 * blocks
    return plgpu.Layout.TILED(
        plgpu.Tiling(((ROWS, width), (16, width), (8, width))),
        warp_dims=(-6,),
        lane_dims=(-2, plgpu.Replicated(4)),
        vector_dim=-1,
    )


def interleave(x: Float[Array, "*batch K"]) -> Float[Array, "*batch K"]:
    """`x` with the inputs of each scale group in the order in which the products meet them."""
    groups = x.reshape(*x.shape[:-1], -1, 4, 4, 2)
    order = (*range(groups.ndim - 3), groups.ndim - 1, groups.ndim - 3, groups.ndim - 2)
    return groups.transpose(order).reshape(x.shape)


def place(index: Any) -> Any:
    """Where `interleave` puts input `index`; works on anything with integer operators."""
    return (index & ~31) | ((index & 1) << 4) | (((index >> 3) & 3) << 2) | ((index >> 1) & 3)


def split(x: Float[Array, "N K"], tokens: int) -> Pairs:
    """Every token on a scale of its own; tokens N .. `tokens` are zero."""
    wide = jnp.pad(x.astype(jnp.float32), ((0, tokens - x.shape[0]), (0, 0)))
    largest = lax.bitcast_convert_type(jnp.max(jnp.abs(wide), axis=1), jnp.int32) >> 23
    usable = jnp.clip(largest, LARGEST + 1, 254)
    scale = lax.bitcast_convert_type((254 + LARGEST - usable) << 23, jnp.float32)
    unit = lax.bitcast_convert_type((usable - LARGEST) << 23, jnp.float32)
    scaled = wide * scale[:, None]
    high = _four_bits(scaled)
    low = (scaled - high) * LOW
    rows = interleave(jnp.stack([high, low], axis=1).reshape(2 * tokens, -1).astype(E4M3))
    return Pairs(rows, jnp.where(largest == 255, jnp.nan, unit))  # e4m3 has no infinity


def _four_bits(x: jax.Array) -> jax.Array:
    """float32 numbers rounded to what e4m3 holds; XLA takes a conversion there and back for none at all."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
    subnormal = lax.round(x * 2.0**9, lax.RoundingMethod.TO_NEAREST_EVEN) * 2.0**-9
    return jnp.where(jnp.abs(x) < 2.0**-6, subnormal, lax.bitcast_convert_type(rounded, jnp.float32))


def _spread(word: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Codes of even and of odd number as four bytes of e4m3 each."""
    even = arith.addi(arith.muli(arith.andi(word, inline.i32(0x0F0F0F0F)), inline.i32(4)), inline.i32(0x60606060))
    odd = arith.andi(arith.shrui(word, inline.i32(2)), inline.i32(0x1C1C1C1C))
    return arith.andi(even, inline.i32(0x9C9C9C9C)), arith.ori(arith.andi(word, inline.i32(0x80808080)), odd)


def products(registers: list[list[ir.Value]], descriptors: list[ir.Value], columns: int) -> list[list[ir.Value]]:
    """Sums of [64, 32] times [32, columns] for each four registers of weights, when they are there."""
    count, each = len(registers), columns // 2
    f32 = ir.F32Type.get()
    lines = ["wgmma.fence.sync.aligned;"]
    for index in range(count):
        out = ", ".join(f"${index * each + i}" for i in range(each))
        first = count * each + 5 * index
        left = ", ".join(f"${first + i}" for i in range(4))
        shape = f"m64n{columns}k32.f32.e4m3.e4m3"
        lines.append(f"wgmma.mma_async.sync.aligned.{shape} {{{out}}}, {{{left}}}, ${first + 4}, 0, 1, 1;")
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    operands = [x for four, descriptor in zip(registers, descriptors) for x in (*four, descriptor)]
    constraints = ",".join(["=&f"] * (count * each) + ["r,r,r,r,l"] * count)
    values = inline.asm([f32] * (count * each), " ".join(lines), constraints, *operands)
    return [values[i * each : (i + 1) * each] for i in range(count)]


def factors_of(word: ir.Value) -> list[ir.Value]:
    """2^(scale - 127) of the four scales of a word."""
    shifted = [arith.shli(word, inline.i32(bits)) for bits in (23, 15, 7)] + [arith.shrui(word, inline.i32(1))]
    return [arith.bitcast(ir.F32Type.get(), arith.andi(x, inline.i32(0x7F800000))) for x in shifted]


def add_scaled(total: ir.Value, value: ir.Value, factor: ir.Value) -> ir.Value:
    """Product and sum, rounded once."""
    operands = value, factor, total
    return inline.asm([ir.F32Type.get()], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", *operands, pure=True)[0]


def accumulate(
    sums: jax.Array,
    packed: Any,
    scale: jax.Array,
    rows: Any,
    unit: jax.Array | None,
    blocks: int,
    first: int,
    warps: bool = False,
) -> jax.Array:
    """`sums` + one box of weights times activations, [64, columns] in `WGMMA` layout.

    `packed` is shared memory [64, 64 * blocks] of bytes, rows contiguous or `SWIZZLED`; `scale` is [64, 4 * blocks]
    uint8 in `scale_layout`; `rows` is shared memory [columns, inputs] in `WIDE` layout, whose block `first` begins the
    box; `unit` is [4, 4 * blocks] in `unit_layout`, or None where sums have one unit. With `warps` each warp
    multiplies for itself, and codes count `mosaic_warp.CODE_UNIT`.
    """
    columns = sums.shape[1]
    layout = plgpu.Layout.WGMMA
    width = rows.shape[1]
    units = () if unit is None else (unit,)
    boxes = plgpu.RefType(SWIZZLED if blocks == 2 else ())

    @plgpu.inline_mgpu(
        arg_types=(layout, boxes, scale_layout(blocks), plgpu.RefType(WIDE), *(unit_layout(blocks),) * len(units)),
        return_type=plgpu.ShapeDtypeStruct((ROWS, columns), jnp.float32, layout=layout),
    )
    def run(_: Any, sums: Any, packed: Any, scale: Any, rows: Any, *unit: Any) -> Any:
        values = list(inline.elements(sums.registers))
        words = [_words(register, blocks) for register in scale.registers.flat]
        factors = [[factor for word in row for factor in factors_of(word)] for row in words]
        if unit:
            mine = list(inline.elements(unit[0].registers))
            factors = [[arith.mulf(factor, one) for factor, one in zip(row, mine, strict=True)] for row in factors]
        if warps:
            made = mosaic_warp.products(packed, rows, blocks, first)
        else:
            made = _products_of_box(packed, right_descriptor(rows, width), blocks, first, columns)
        for group, product in enumerate(made):
            for index, value in enumerate(product):
                row = index // 2 % 2
                values[index] = add_scaled(values[index], value, factors[row][group])
        return mgpu.FragmentedArray(
            _registers=registers_like(values, sums.registers), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return run(sums, packed, scale, rows, *units)


def _products_of_box(packed: Any, base: ir.Value, blocks: int, first: int, columns: int) -> Iterator[list[ir.Value]]:
    """`products` of every scale group of a box; the sums of a batch of groups wait in registers."""
    weights = weights_of(inline.shared_address(packed), blocks * DEPTH // 2, swizzled=blocks == 2)
    batch = min(4 * blocks, 64 // columns)
    for start in range(0, 4 * blocks, batch):
        groups = range(start, start + batch)
        steps = [(first + group // 4) * 64 + group % 4 * 2 for group in groups]
        targets = [arith.addi(base, inline.i64(step)) for step in steps]
        yield from products([next(weights) for _ in groups], targets, columns)


def registers_like(values: list[ir.Value], like: Any) -> Any:
    """`values` in registers of the shape and type of those in `like`."""
    registers = np.empty(like.shape, dtype=object)
    left = iter(values)
    for index, register in enumerate(like.flat):
        kind = ir.VectorType(register.type)
        registers.flat[index] = vector.from_elements(kind, [next(left) for _ in range(kind.shape[0])])
    return registers


def _words(register: ir.Value, blocks: int) -> list[ir.Value]:
    """The scales of a row as words of four."""
    i32 = ir.IntegerType.get_signless(32)
    words = vector.bitcast(ir.VectorType.get((blocks,), i32), register)
    return [vector.extract(words, dynamic_position=[], static_position=[i]) for i in range(blocks)]


def weights_of(start: ir.Value, line: int, *, swizzled: bool) -> Iterator[list[ir.Value]]:
    """Four registers of each scale group of 64 lines of bytes: rows g and g + 8 of even inputs, then of odd ones.

    Lines of 128, 64 or 32 bytes begin at address `start` of shared memory, as they are or swizzled by their length.
    """
    warp, lane = inline.warp_and_lane()
    # Lane l names row l % 16 of the warp's rows; lanes 16 .. 31 name the next group.
    row = arith.addi(arith.muli(warp, inline.i32(16)), arith.remui(lane, inline.i32(16)))
    ahead = arith.divui(lane, inline.i32(16))
    start = arith.addi(start, arith.muli(row, inline.i32(line)))
    turn = arith.remui(arith.divui(row, inline.i32(DEPTH // line)), inline.i32(line // 16))
    for pair in range(line // GROUP):
        chunk = arith.addi(ahead, inline.i32(2 * pair))
        chunk = arith.xori(chunk, turn) if swizzled else chunk
        address = arith.addi(start, arith.muli(chunk, inline.i32(16)))
        text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
        loaded = inline.asm([inline.word()] * 4, text, "=r,=r,=r,=r,r", address)
        for upper, lower in (loaded[:2], loaded[2:]):
            (even, odd), (even_below, odd_below) = _spread(upper), _spread(lower)
            yield [even, even_below, odd, odd_below]


def right_descriptor(rows: Any, width: int) -> ir.Value:
    """Of activations [columns, width] as the right operand."""
    pointer = mgpu.utils.memref_ptr(rows)
    i64 = ir.IntegerType.get_signless(64)
    address = arith.shrui(arith.andi(llvm.ptrtoint(i64, pointer), inline.i64(0x3FFFF)), inline.i64(4))
    stride = width // DEPTH * 1024 >> 4  # from eight rows to the next
    return arith.ori(address, arith.ori(inline.i64(1 << 16 | stride << 32), arith.shli(inline.i64(1), inline.i64(62))))


def emulated_accumulate(
    sums: jax.Array, packed: Any, scale: jax.Array, rows: Any, unit: jax.Array | None, blocks: int, first: int
) -> jax.Array:
    """`accumulate` for interpretation on a CPU."""
    weights = interleave(dequantize(packed[...], scale, jnp.float32)) / CODE_UNIT
    inputs = rows[:, first * DEPTH : (first + blocks) * DEPTH].astype(jnp.float32)
    if unit is not None:
        inputs = inputs * jnp.repeat(jnp.repeat(unit, 2, axis=0), GROUP, axis=1)
    return sums + jnp.dot(weights, inputs.T, precision=lax.Precision.HIGHEST)


def fold(target: Any, sums: jax.Array, unit: Any, code_unit: float = CODE_UNIT) -> None:
    """target[r, n] = what token n's two columns of `sums` count; `unit` is memory [4] of float32, or None for one."""
    layout = plgpu.Layout.WGMMA
    refs = () if unit is None else (unit,)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, *(plgpu.RefType(),) * len(refs)))
    def run(_: Any, target: Any, sums: Any, *unit: Any) -> None:
        index, f32 = ir.IndexType.get(), ir.F32Type.get()
        warp, lane = inline.warp_and_lane()
        row = arith.addi(arith.muli(warp, inline.i32(16)), arith.divui(lane, inline.i32(4)))
        token = arith.index_cast(index, arith.remui(lane, inline.i32(4)))
        factor = arith.constant(f32, code_unit)
        if unit:
            factor = arith.mulf(factor, memref.load(unit[0], [token]))
        values = list(inline.elements(sums.registers))
        for half in range(2):
            high, low = values[2 * half : 2 * half + 2]
            value = arith.mulf(add_scaled(high, low, arith.constant(f32, 1 / LOW)), factor)
            memref.store(value, target, [arith.index_cast(index, arith.addi(row, inline.i32(8 * half))), token])

    run(target, sums, *refs)


def emulated_fold(target: Any, sums: jax.Array, unit: Any) -> None:
    """`fold` for interpretation on a CPU."""
    both = sums.reshape(sums.shape[0], TOKENS, 2)
    factor = CODE_UNIT if unit is None else unit[...][None] * CODE_UNIT
    target[...] = (both[:, :, 0] + both[:, :, 1] / LOW) * factor


def store_pairs(out: Any, unit: Any, value: jax.Array) -> None:
    """The pairs of value[r, n], in `ENDS` layout: out[2 n, place(r)], out[2 n + 1, place(r)], and unit[n, r / 32]."""
    column = place(plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=ENDS))
    token = plgpu.broadcasted_iota(jnp.int32, value.shape, 1, layout=ENDS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), ENDS, ENDS, ENDS))
    def run(_: Any, out: Any, unit: Any, token: Any, column: Any, value: Any) -> None:
        index = ir.IndexType.get()
        first = arith.cmpi(arith.CmpIPredicate.eq, inline.warp_and_lane()[1], inline.i32(0))
        for n, c, v in zip(*(inline.elements(x.registers) for x in (token, column, value)), strict=True):
            scale, one = scale_of_warp(v)
            writes = scf.IfOp(first)
            with ir.InsertionPoint(writes.then_block):
                group = arith.divui(c, inline.i32(GROUP))
                memref.store(one, unit, [arith.index_cast(index, n), arith.index_cast(index, group)])
                scf.yield_([])
            for part, byte in enumerate(parts_of(arith.mulf(v, scale))):
                row = arith.addi(arith.muli(n, inline.i32(2)), inline.i32(part))
                memref.store(byte, out, [arith.index_cast(index, row), arith.index_cast(index, c)])

    run(out, unit, token, column, value)


def scale_of_warp(value: ir.Value) -> tuple[ir.Value, ir.Value]:
    """What the numbers of a warp are multiplied by to become pairs, and its inverse, as `split` chooses them."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    bits = arith.andi(arith.bitcast(i32, value), inline.i32(0x7FFFFFFF))
    (largest,) = inline.asm([i32], "redux.sync.max.u32 $0, $1, 0xffffffff;", "=r,r", bits)
    largest = arith.shrui(largest, inline.i32(23))
    usable = arith.minsi(arith.maxsi(largest, inline.i32(LARGEST + 1)), inline.i32(254))
    scale = arith.shli(arith.subi(inline.i32(254 + LARGEST), usable), inline.i32(23))
    one = arith.shli(arith.subi(usable, inline.i32(LARGEST)), inline.i32(23))
    broken = arith.cmpi(arith.CmpIPredicate.eq, largest, inline.i32(255))
    one = arith.select(broken, inline.i32(0x7FC00000), one)
    return arith.bitcast(f32, scale), arith.bitcast(f32, one)


def parts_of(value: ir.Value) -> list[ir.Value]:
    """High and low part of a float32 number."""
    text = """
        .reg .b16 high, low, half, rest; .reg .b32 both; .reg .f32 left;
        cvt.rn.satfinite.e4m3x2.f32 high, 0f00000000, $2;
        cvt.rn.f16x2.e4m3x2 both, high;
        mov.b32 {half, rest}, both;
        cvt.f32.f16 left, half;
        sub.f32 left, $2, left;
        mul.f32 left, left, 0f41800000;
        cvt.rn.satfinite.e4m3x2.f32 low, 0f00000000, left;
        cvt.u32.u16 $0, high;
        cvt.u32.u16 $1, low;
    """
    i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
    parts = inline.asm([i32, i32], text, "=r,=r,f", value)
    return [arith.bitcast(ir.Float8E4M3FNType.get(), arith.trunci(i8, part)) for part in parts]


def emulated_store_pairs(out: Any, unit: Any, value: jax.Array) -> None:
    """`store_pairs` for interpretation on a CPU."""
    halves = split(value.T.reshape(-1, GROUP), value.size // GROUP)  # row: token, then scale group
    rows = halves.rows.reshape(TOKENS, -1, 2, GROUP).swapaxes(1, 2)
    out[...] = rows.reshape(COLUMNS, value.shape[0])
    unit[...] = halves.unit.reshape(TOKENS, -1)
