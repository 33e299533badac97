"""Activations of up to four tokens turned into pairs of e4m3 by the kernel that reads them.

Every block of a decode kernel does this for itself, while its first weights are under way: cheaper than two small
kernels in front. The numbers are those of `mosaic_pair.split`.
"""

from collections.abc import Iterator
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf

from pallas import inline
from pallas.moe.mosaic_expand import DEPTH
from pallas.moe.mosaic_pair import COLUMNS, LARGEST, TOKENS, WIDE, split

THREADS = 128
INPUTS = 8
"""bfloat16 numbers that a thread takes at once."""
WARPS = 4


def quantize(x: Any, rows: Any, unit: Any, largest: Any, groups: int) -> None:
    """Pairs of x, [tokens, K] bfloat16 in memory, into `rows` and `unit` [4] in shared memory.

    `rows` is [buffers, 8, width] in `WIDE` layout, `largest` [groups, 4, 4] int32 of scratch. All warpgroups take part;
    `rows` needs a fence and a barrier behind it.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(WIDE), plgpu.RefType(), plgpu.RefType()))
    def run(_: Any, x: Any, rows: Any, unit: Any, largest: Any) -> None:
        tokens, width = x.type.shape
        vectors = width // INPUTS
        source = mgpu.utils.memref_ptr(x)
        thread = mgpu.utils.thread_idx()
        mine = arith.remui(thread, inline.i32(THREADS))
        firsts = [inline.i32(token * vectors) for token in range(tokens)]
        leave_maxima(source, largest, firsts, vectors, thread)
        mgpu.utils.warpgroup_barrier()
        exponents = [exponent_of(largest, token, thread) for token in range(tokens)]
        for token in range(TOKENS):
            write_unit(unit, [token], mine, exponents[token] if token < tokens else None)
        target = llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(rows))
        scales = [scale_of(exponent) for exponent, _ in exponents]
        for number, inside in vectors_of(thread, vectors, groups * THREADS):
            with inside:
                for token in range(TOKENS):
                    parts = [inline.i32(0)] * 4
                    if token < tokens:
                        parts = pairs_of(load(source, arith.addi(number, firsts[token])), scales[token])
                    _store(target, number, token, parts)

    run(x, rows, unit, largest)


def emulated_quantize(x: Any, rows: Any, unit: Any, largest: Any, groups: int) -> None:
    """`quantize` for interpretation on a CPU."""
    pairs = split(x[...], TOKENS)
    rows[...] = pairs.rows.reshape(COLUMNS, rows.shape[0], rows.shape[2]).swapaxes(0, 1)
    unit[...] = pairs.unit


class _Inside:
    """A region that is left out where a vector does not exist."""

    def __init__(self, number: ir.Value, count: int) -> None:
        self.branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ult, number, inline.i32(count)))
        self.point = ir.InsertionPoint(self.branch.then_block)

    def __enter__(self) -> None:
        self.point.__enter__()

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            scf.yield_([])
        self.point.__exit__(*error)


def vectors_of(thread: ir.Value, count: int, threads: int) -> Iterator[tuple[ir.Value, Any]]:
    """(number, where it exists) of the vectors that a thread takes."""
    for first in range(0, count, threads):
        number = arith.addi(thread, inline.i32(first))
        yield number, _Inside(number, count)


def load(source: ir.Value, number: ir.Value) -> list[ir.Value]:
    """Vector `number` of eight numbers as four words."""
    i32 = ir.IntegerType.get_signless(32)
    address = arith.muli(number, inline.i32(2 * INPUTS))
    text = ".reg .b64 a; cvt.u64.u32 a, $5; add.s64 a, a, $4; ld.global.v4.b32 {$0, $1, $2, $3}, [a];"
    return inline.asm([i32] * 4, text, "=r,=r,=r,=r,l,r", source, address)


def leave_maxima(source: ir.Value, largest: ir.Value, firsts: list[ir.Value], vectors: int, thread: ir.Value) -> None:
    """The largest magnitude that each warp met, as bits of bfloat16, of the tokens that begin at vectors `firsts`."""
    i32 = ir.IntegerType.get_signless(32)
    mine, group = arith.remui(thread, inline.i32(THREADS)), arith.divui(thread, inline.i32(THREADS))
    warp, lane = arith.divui(mine, inline.i32(32)), arith.remui(mine, inline.i32(32))
    for token, begin in enumerate(firsts):
        top = inline.i32(0)
        for first in range(0, vectors, THREADS):
            number = arith.minui(arith.addi(mine, inline.i32(first)), inline.i32(vectors - 1))
            text = "".join(f"and.b32 t, ${i}, 0x7fff7fff; max.u16x2 $0, $0, t;" for i in range(2, 6))
            words = load(source, arith.addi(number, begin))
            (top,) = inline.asm([i32], ".reg .b32 t; mov.b32 $0, $1;" + text, "=&r,r,r,r,r,r", top, *words)
        text = ".reg .b32 t; and.b32 t, $1, 0xffff; shr.u32 $0, $1, 16; max.u32 $0, $0, t;"
        text += "redux.sync.max.u32 $0, $0, 0xffffffff;"
        (top,) = inline.asm([i32], text, "=&r,r", top)
        writes = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, lane, inline.i32(0)))
        with ir.InsertionPoint(writes.then_block):
            memref.store(top, largest, [inline.index(group), inline.index(warp), inline.index(inline.i32(token))])
            scf.yield_([])


def exponent_of(largest: ir.Value, token: int, thread: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(usable exponent, whether the token holds an infinity or a NaN)."""
    group = inline.index(arith.divui(thread, inline.i32(THREADS)))
    tops = [
        memref.load(largest, [group, inline.index(inline.i32(warp)), inline.index(inline.i32(token))])
        for warp in range(WARPS)
    ]
    top = arith.maxui(arith.maxui(tops[0], tops[1]), arith.maxui(tops[2], tops[3]))
    exponent = arith.shrui(top, inline.i32(7))
    usable = arith.minsi(arith.maxsi(exponent, inline.i32(LARGEST + 1)), inline.i32(254))
    return usable, arith.cmpi(arith.CmpIPredicate.eq, exponent, inline.i32(255))


def scale_of(exponent: ir.Value) -> ir.Value:
    """What numbers are multiplied by."""
    return arith.bitcast(ir.F32Type.get(), arith.shli(arith.subi(inline.i32(254 + LARGEST), exponent), inline.i32(23)))


def write_unit(unit: ir.Value, place: list[Any], mine: ir.Value, exponent: tuple[ir.Value, ir.Value] | None) -> None:
    """unit[place], by one thread of each warpgroup."""
    bits = inline.i32(0)
    if exponent is not None:
        bits = arith.shli(arith.subi(exponent[0], inline.i32(LARGEST)), inline.i32(23))
        bits = arith.select(exponent[1], inline.i32(0x7FC00000), bits)
    writes = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, mine, inline.i32(0)))
    with ir.InsertionPoint(writes.then_block):
        index = [inline.index(inline.i32(x) if isinstance(x, int) else x) for x in place]
        memref.store(arith.bitcast(ir.F32Type.get(), bits), unit, index)
        scf.yield_([])


def pairs_of(words: list[ir.Value], scale: ir.Value) -> list[ir.Value]:
    """High and low parts of the numbers of even place, then of those of odd place, four bytes each."""
    text = [".reg .b16 h0, h1, l0, l1, p, q; .reg .b32 both; .reg .f32 a, b, r, s;"]
    for odd in range(2):
        for half in range(2):
            for name, word in (("a", 4 + 2 * half), ("b", 5 + 2 * half)):
                take = f"and.b32 both, ${word}, 0xffff0000;" if odd else f"shl.b32 both, ${word}, 16;"
                text.append(f"{take} mov.b32 {name}, both; mul.rn.f32 {name}, {name}, $8;")
            text.append(f"cvt.rn.satfinite.e4m3x2.f32 h{half}, b, a; cvt.rn.f16x2.e4m3x2 both, h{half};")
            text.append("mov.b32 {p, q}, both; cvt.f32.f16 r, p; cvt.f32.f16 s, q;")
            text.append("sub.rn.f32 r, a, r; sub.rn.f32 s, b, s;")
            text.append("mul.rn.f32 r, r, 0f41800000; mul.rn.f32 s, s, 0f41800000;")
            text.append(f"cvt.rn.satfinite.e4m3x2.f32 l{half}, s, r;")
        text.append(f"mov.b32 ${2 * odd}, {{h0, h1}}; mov.b32 ${2 * odd + 1}, {{l0, l1}};")
    i32 = ir.IntegerType.get_signless(32)
    return inline.asm([i32] * 4, " ".join(text), "=&r,=&r,=&r,=&r,r,r,r,r,f", *words, scale)


def _store(target: ir.Value, number: ir.Value, token: int, parts: list[ir.Value]) -> None:
    """Where the products look for inputs 8 `number` .. of a token."""
    line, within = arith.shrui(number, inline.i32(4)), arith.andi(number, inline.i32(15))
    chunk = arith.muli(arith.shrui(within, inline.i32(2)), inline.i32(2))
    start = arith.addi(
        arith.muli(line, inline.i32(8 * DEPTH)), arith.muli(arith.andi(number, inline.i32(3)), inline.i32(4))
    )
    for odd in range(2):
        for part in range(2):
            row = 2 * token + part
            place = arith.muli(arith.xori(arith.addi(chunk, inline.i32(odd)), inline.i32(row)), inline.i32(16))
            address = arith.addi(target, arith.addi(arith.addi(start, place), inline.i32(row * DEPTH)))
            inline.asm([], "st.shared.b32 [$0], $1;", "r,r", address, parts[2 * odd + part])
