"""Blocks of one expert and up to four of its tokens, with their activations as pairs, by one kernel.

Every thread block serves one block of work. All of them find the blocks for themselves, from a word of bits for each
expert in shared memory, which says what tokens chose it: blocks lie in the order of experts, tokens in theirs.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf
from jaxtyping import Array, BFloat16, Int32

from pallas import inline
from pallas.moe.mosaic_pair import COLUMNS, E4M3, TOKENS, Pairs
from pallas.moe.mosaic_quantize import (
    THREADS,
    WARPS,
    exponent_of,
    leave_maxima,
    load,
    pairs_of,
    scale_of,
    vectors_of,
    write_unit,
)

MOST_TOKENS = 32
"""Bits of a word."""
MOST_CHOSEN = THREADS // TOKENS
WORDS = 8
"""Of shared memory: the sums of four warps, then what block this is: expert, tokens, number of blocks."""


def arrange(
    x: BFloat16[Array, "N K"], ids: Int32[Array, "N k"], num_experts: int, blocks: int
) -> tuple[Array, Array, Array, Pairs]:
    """(expert of each block, [1] number of blocks, pair of each column, activations of each block).

    What lies behind the last block, and columns without a token, hold anything; their pair is -1 in real blocks.
    """
    width, k = x.shape[1], ids.shape[1]

    def body(x: Any, ids: Any, expert: Any, used: Any, pair: Any, rows: Any, unit: Any, *scratch: Any) -> None:
        number = lax.axis_index("block").astype(jnp.int32)
        _arrange(x, ids, (expert, used, pair, rows, unit), scratch, number, k)

    spec, smem = jax.ShapeDtypeStruct, plgpu.SMEM
    kernel = plgpu.kernel(
        body,
        out_type=(
            spec((blocks,), jnp.int32),
            spec((1,), jnp.int32),
            spec((blocks, TOKENS), jnp.int32),
            spec((blocks * COLUMNS, width), E4M3),
            spec((blocks, TOKENS), jnp.float32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=1,
        thread_name="group",
        scratch_types=(
            smem((-(-num_experts // THREADS) * THREADS,), jnp.int32),
            smem((WORDS,), jnp.int32),
            smem((1, WARPS, TOKENS), jnp.int32),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name="moe_arrange",
    )
    expert, used, pair, rows, unit = kernel(x, ids)
    return expert, used, pair, Pairs(rows, unit)


def _arrange(x: Any, ids: Any, outputs: tuple, scratch: tuple, number: jax.Array, k: int) -> None:
    refs = (x, ids, *outputs, *scratch)

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * len(refs), plgpu.Layout.WG_SPLAT))
    def run(_: Any, *args: Any) -> None:
        x, ids, expert, used, pair, rows, unit, masks, words, largest, number = args
        number = number.registers.item()
        thread = arith.remui(mgpu.utils.thread_idx(), inline.i32(THREADS))
        chosen = mgpu.utils.memref_ptr(ids)
        _mark(chosen, inline.shared_address(masks), thread, ids.type.shape[0] * k, masks.type.shape[0] // THREADS, k)
        _find(
            inline.shared_address(masks),
            inline.shared_address(words),
            thread,
            number,
            masks.type.shape[0] // THREADS,
            ids.type.shape[0],
        )
        who, bits, count = (memref.load(words, [inline.index(inline.i32(WARPS + i))]) for i in range(3))
        only = arith.cmpi(arith.CmpIPredicate.eq, arith.ori(thread, number), inline.i32(0))
        some = arith.cmpi(arith.CmpIPredicate.sgt, count, inline.i32(0))
        _store_if(only, count, used, [inline.index(inline.i32(0))])
        _store_if(
            only, arith.select(some, who, inline.i32(0)), expert, [inline.index(inline.i32(0))]
        )  # is read whatever there is
        real = scf.IfOp(arith.cmpi(arith.CmpIPredicate.slt, number, count))
        with ir.InsertionPoint(real.then_block):
            first = arith.cmpi(arith.CmpIPredicate.eq, thread, inline.i32(0))
            _store_if(first, who, expert, [inline.index(number)])
            tokens = _tokens(bits)
            _pairs_of_block(chosen, mgpu.utils.memref_ptr(pair), tokens, who, number, thread, k)
            _fill(x, rows, unit, largest, tokens, number, thread)
            scf.yield_([])

    run(*refs, number)


def _store_if(condition: ir.Value, value: ir.Value, ref: ir.Value, place: list[ir.Value]) -> None:
    writes = scf.IfOp(condition)
    with ir.InsertionPoint(writes.then_block):
        memref.store(value, ref, place)
        scf.yield_([])


def _mark(chosen: ir.Value, masks: ir.Value, thread: ir.Value, pairs: int, each: int, k: int) -> None:
    """masks[e] = the tokens that chose expert e."""
    text = ".reg .b32 a; mad.lo.u32 a, $1, 4, $0;"
    text += "".join(f"st.shared.b32 [a+{4 * THREADS * i}], 0;" for i in range(each))
    inline.asm([], text, "r,r", masks, thread)
    mgpu.utils.warpgroup_barrier()
    lines = [".reg .b32 e, n, a, b; .reg .b64 p; .reg .pred in, is;"]
    for first in range(0, pairs, THREADS):
        lines.append(f"add.s32 n, $2, {first}; setp.lt.u32 in, n, {pairs}; mul.wide.u32 p, n, 4; add.s64 p, p, $1;")
        lines.append(f"mov.b32 e, -1; @in ld.global.b32 e, [p]; setp.ge.s32 is, e, 0; div.u32 n, n, {k};")
        lines.append("mov.b32 b, 1; shl.b32 b, b, n; mad.lo.s32 a, e, 4, $0; @is red.shared.or.b32 [a], b;")
    inline.asm([], " ".join(lines), "r,l,r", masks, chosen, thread)
    mgpu.utils.warpgroup_barrier()


def _find(masks: ir.Value, words: ir.Value, thread: ir.Value, number: ir.Value, each: int, tokens: int) -> None:
    """words[4 ..] = expert and tokens of block `number`, if there is one, and how many there are."""
    lines = [".reg .b32 a, c, t, v, lane, warp; .reg .pred p, q;"]
    lines.append(f"mul.lo.u32 a, $3, {4 * each}; add.s32 a, a, $1; mov.b32 c, 0;")
    for i in range(each):
        lines.append(f".reg .b32 m{i}, n{i}; ld.shared.b32 m{i}, [a+{4 * i}]; popc.b32 n{i}, m{i};")
        lines.append(f"add.s32 n{i}, n{i}, {TOKENS - 1}; shr.u32 n{i}, n{i}, 2; add.s32 c, c, n{i};")
    lines.append("mov.b32 v, c; and.b32 lane, $3, 31; shr.u32 warp, $3, 5;")
    for distance in (1, 2, 4, 8, 16):
        lines.append(f"shfl.sync.up.b32 t|p, v, {distance}, 0, 0xffffffff; @p add.s32 v, v, t;")
    lines.append("mad.lo.u32 a, warp, 4, $2; setp.eq.u32 q, lane, 31; @q st.shared.b32 [a], v; sub.s32 $0, v, c;")
    before = inline.asm([inline.word()], " ".join(lines), "=&r,r,r,r", masks, words, thread)[0]
    mgpu.utils.warpgroup_barrier()
    lines = [".reg .b32 a, t, o, total, warp, m, n; .reg .pred p, q;"]
    lines.append("shr.u32 warp, $2, 5; mov.b32 o, $4; mov.b32 total, 0;")
    for i in range(WARPS):
        lines.append(f"ld.shared.b32 t, [$1+{4 * i}]; add.s32 total, total, t;")
        lines.append(f"setp.gt.u32 p, warp, {i}; @p add.s32 o, o, t;")
    lines.append(f"setp.eq.u32 q, $2, 0; @q st.shared.b32 [$1+{4 * (WARPS + 2)}], total;")
    lines.append(f"mul.lo.u32 a, $2, {4 * each}; add.s32 a, a, $0;")
    for i in range(each):  # o: number of the first block of this expert; n: how many it has
        lines.append(f"ld.shared.b32 m, [a+{4 * i}]; popc.b32 n, m; add.s32 n, n, {TOKENS - 1}; shr.u32 n, n, 2;")
        lines.append("sub.s32 t, $3, o; setp.lt.u32 p, t, n; add.s32 o, o, n;")
        for gone in range(1, -(-tokens // TOKENS)):  # tokens of this expert's blocks in front
            lines.append(f"setp.ge.u32 q, t, {gone}; and.pred q, q, p;")
            lines += ["add.s32 n, m, -1; @q and.b32 m, m, n;"] * TOKENS
        lines.append(f"@p st.shared.b32 [$1+{4 * (WARPS + 1)}], m;")
        lines.append(f"mad.lo.u32 n, $2, {each}, {i}; @p st.shared.b32 [$1+{4 * WARPS}], n;")
    inline.asm([], " ".join(lines), "r,r,r,r,r", masks, words, thread, number, before)
    mgpu.utils.warpgroup_barrier()


def _tokens(bits: ir.Value) -> list[ir.Value]:
    """The four lowest bits that are set, -1 for none."""
    found = []
    for _ in range(TOKENS):
        text = ".reg .b32 r; .reg .pred p; brev.b32 r, $1; clz.b32 $0, r; setp.eq.u32 p, $1, 0; selp.b32 $0, -1, $0, p;"
        found.append(inline.asm([inline.word()], text, "=&r,r", bits)[0])
        bits = arith.andi(bits, arith.subi(bits, inline.i32(1)))
    return found


def _pairs_of_block(
    chosen: ir.Value, pair: ir.Value, tokens: list[ir.Value], who: ir.Value, number: ir.Value, thread: ir.Value, k: int
) -> None:
    """pair[number, c] = where token c names the expert: thread 32 c + s looks at slot s."""
    lines = [".reg .b32 c, s, t, e, n; .reg .b64 p, o; .reg .pred in, is, no;"]
    lines.append("shr.u32 c, $2, 5; and.b32 s, $2, 31; mov.b32 t, $5;")
    for column in range(1, TOKENS):
        lines.append(f"setp.eq.u32 is, c, {column}; selp.b32 t, ${5 + column}, t, is;")
    lines.append(f"setp.lt.u32 in, s, {k}; setp.ge.and.s32 in, t, 0, in; mad.lo.s32 n, t, {k}, s; mov.b32 e, -1;")
    lines.append("mul.wide.s32 p, n, 4; add.s64 p, p, $0; @in ld.global.b32 e, [p]; setp.eq.and.s32 is, e, $3, in;")
    lines.append("mad.lo.u32 c, $4, 4, c; mul.wide.u32 o, c, 4; add.s64 o, o, $1; @is st.global.b32 [o], n;")
    lines.append("setp.lt.s32 no, t, 0; setp.eq.and.u32 no, s, 0, no; @no st.global.b32 [o], -1;")
    inline.asm([], " ".join(lines), "l,l,r,r,r,r,r,r,r", chosen, pair, thread, who, number, *tokens)


def _fill(
    x: Any, rows: Any, unit: Any, largest: Any, tokens: list[ir.Value], number: ir.Value, thread: ir.Value
) -> None:
    """Pairs and units of the block's tokens."""
    width = x.type.shape[1]
    vectors = width // 8
    source, target = mgpu.utils.memref_ptr(x), mgpu.utils.memref_ptr(rows)
    known = [arith.maxsi(token, inline.i32(0)) for token in tokens]
    firsts = [arith.muli(token, inline.i32(vectors)) for token in known]
    leave_maxima(source, largest, firsts, vectors, thread)
    mgpu.utils.warpgroup_barrier()
    for column, token in enumerate(tokens):
        exponent = exponent_of(largest, column, thread)
        write_unit(unit, [number, column], thread, exponent)
        scale = scale_of(exponent[0])
        there = scf.IfOp(arith.cmpi(arith.CmpIPredicate.sge, token, inline.i32(0)))
        with ir.InsertionPoint(there.then_block):
            for vector, inside in vectors_of(thread, vectors, THREADS):
                with inside:
                    parts = pairs_of(load(source, arith.addi(vector, firsts[column])), scale)
                    _store(
                        target,
                        vector,
                        arith.addi(arith.muli(number, inline.i32(COLUMNS)), inline.i32(2 * column)),
                        width,
                        parts,
                    )
            scf.yield_([])


def _store(target: ir.Value, vector: ir.Value, row: ir.Value, width: int, parts: list[ir.Value]) -> None:
    """Inputs 8 `vector` .. of rows `row` (high) and `row` + 1 (low), even ones of the group of 32 in front."""
    lines = [".reg .b32 c, l; .reg .b64 a, o;"]
    lines.append("shr.u32 c, $1, 2; shl.b32 c, c, 5; and.b32 l, $1, 3; shl.b32 l, l, 2; add.s32 c, c, l;")
    lines.append(f"mul.wide.u32 a, $2, {width}; add.s64 a, a, $0; cvt.u64.u32 o, c; add.s64 a, a, o;")
    for odd in range(2):
        for part in range(2):
            lines.append(f"st.global.b32 [a+{16 * odd + width * part}], ${3 + 2 * odd + part};")
    inline.asm([], " ".join(lines), "l,r,r,r,r,r,r", target, vector, row, *parts)
