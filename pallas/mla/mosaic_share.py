"""Sums of parts as their threads hold them, and the join of a row's parts.

A thread of a warpgroup that mixes values holds sums of channels for queries 8 j + 2 c and the next, c being its place
in a group of four. They are stored as pairs of bfloat16, `QUAD` of them side by side, so that a warp stores whole
lines; weights are bfloat16 as well, so that rounding sums to as many bits costs little.

A warp joins `PIECE` bytes of every part: `LANES` lanes take every eighth part each, and their sums are added in a
fixed order, so that it does not matter who joins what. In the launch that made the parts the blocks of a row and group
meet first (`mosaic_meet`); until then the warps go through the program once without a load or store: instructions
that have run before come from a near cache.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas import inline
from pallas.layouts import WHOLE
from pallas.mla import mosaic_meet
from pallas.mla.mosaic_columns import float_text
from pallas.mla.mosaic_plan import LOWEST, PRODUCT, WARPS, Plan, parts_of

TEAMS, LANES = 8, 4
"""Of a warp: lanes of a team have the same parts."""
QUAD = 4
"""Pairs of sums that lie side by side: 16 bytes."""
PIECE = LANES * QUAD * 4
AT_ONCE = 9
"""Parts of a lane whose loads are in flight at once."""
BLOCKS = 1024
"""About so many blocks of a launch of its own are enough."""


def pairs(plan: Plan) -> int:
    """Pairs of sums that a thread holds."""
    return plan.values * plan.most // 8


def words(plan: Plan) -> int:
    """Pairs of a part: of two warpgroups."""
    return 2 * 128 * pairs(plan)


def store(plan: Plan, there: Any, total: jax.Array, side: jax.Array) -> None:
    """Stores the sums of a warpgroup for one part."""
    blocks, eights = plan.values // 2, plan.most // 8
    order = list(itertools.product(range(eights), range(blocks), range(2)))
    rounding = " ".join(f"cvt.rn.bf16x2.f32 {name}, ${2 * i + 2}, ${2 * i + 1};" for i, name in enumerate("abcd"))
    text = f"{{ .reg .b32 a, b, c, d; {rounding} st.global.v4.b32 [$0], {{a, b, c, d}}; }}"

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PRODUCT, WHOLE))
    def run(_: Any, there: ir.Value, total: Any, side: Any) -> None:
        values = np.empty((blocks, eights, 2, 2), dtype=object)
        values.flat = list(inline.elements(total.registers))
        ordered = [values[block, eight, half, place] for eight, block, half in order for place in range(2)]
        pointer = _place_of_thread(plan, there, side.registers.item())
        for first in range(0, len(ordered), 2 * QUAD):
            address = arith.addi(pointer, inline.i64(first // (2 * QUAD) * 128 * QUAD * 4))
            utils.inline_ptx(text, address, *ordered[first : first + 2 * QUAD], has_side_effects=True)

    run(there, total, side)


def _place_of_thread(plan: Plan, there: ir.Value, side: ir.Value) -> ir.Value:
    """Address of a thread's first quad: threads of a warp with the same queries stand side by side."""
    warp, lane = inline.warp_and_lane()
    i32 = inline.i32
    place = arith.addi(arith.muli(arith.andi(lane, i32(3)), i32(8)), arith.shrui(lane, i32(2)))
    place = arith.addi(place, arith.muli(warp, i32(32)))
    offset = arith.addi(arith.muli(side, i32(words(plan) * 2)), arith.muli(place, i32(QUAD * 4)))
    wide = ir.IntegerType.get_signless(64)
    return arith.addi(llvm.ptrtoint(wide, utils.memref_ptr(there)), arith.extui(wide, offset))


class _Program:
    """PTX of a warp that joins pieces; operands: parts, statistics, output, worker, group, parts that are used."""

    def __init__(self, plan: Plan, queries: int, workers: int, warps: int, *, meets: bool) -> None:
        self.plan, self.queries, self.workers, self.warps, self.meets = plan, queries, workers, warps, meets
        self.quads, self.blocks = pairs(plan) // QUAD, plan.values // 2
        self.count = -(-plan.parts // TEAMS)
        """Parts of a lane."""
        self.chunks, self.batch = -(-self.count // LANES), min(self.count, AT_ONCE)
        self.stride = words(plan) * 4

    def text(self) -> str:
        """All of it."""
        return "\n".join(["{", self.registers(), self.begin(), *self.body(), *self.output(), self.end(), "}"])

    def registers(self) -> str:
        """Declarations."""
        return f""".reg .pred p, live; .reg .b32 lane, item, quad, team, at, s, t, u, side, c, w, half, query, channel;
            .reg .b32 used, limit, again, v<{QUAD * self.batch}>; .reg .b64 stats, out, place; .reg .b16 l, k;
            .reg .f32 x, y, g, r, wx, wy, tx, ty, m<{2 * self.chunks}>, n<{2 * self.chunks}>, a<{2 * QUAD}>;"""

    def begin(self) -> str:
        """Which piece is this warp's first, and where it lies."""
        pieces, quads, blocks = self.stride // PIECE, self.quads, self.blocks // 2
        start = f"mov.b32 used, $5; mov.b32 limit, {self.queries};"
        if self.meets:
            barrier = f"barrier.cta.arrive {mosaic_meet.WRITTEN}, {mosaic_meet.THREADS};"
            start = f"{barrier} mov.b32 used, 0; mov.b32 limit, 0; mov.b32 again, 1;"
        return f"""{start}
            PASS: bar.warp.sync 0xffffffff; mov.u32 item, %tid.x; and.b32 lane, item, 31;
            shr.u32 item, item, 5; mad.lo.u32 item, item, {self.workers}, $3;
            shr.u32 team, lane, 2; and.b32 u, lane, 3;
            NEXT: setp.ge.u32 p, item, {pieces}; @p bra DONE;
            mul.lo.u32 at, item, {PIECE}; mad.lo.u32 at, u, {QUAD * 4}, at; mad.lo.u32 at, team, {self.stride}, at;
            cvt.u64.u32 place, at; add.u64 place, place, $0;
            and.b32 half, item, 1; shr.u32 c, item, 1; and.b32 c, c, 3; shr.u32 w, item, 3; and.b32 w, w, 3;
            shr.u32 quad, item, 5; div.u32 side, quad, {quads}; rem.u32 quad, quad, {quads};
            div.u32 query, quad, {blocks}; rem.u32 quad, quad, {blocks};
            shl.b32 query, query, 3; mad.lo.u32 query, c, 2, query;
            mad.lo.u32 s, u, {TEAMS}, team; shr.u32 t, query, 1; mad.lo.u32 t, t, {self.plan.parts}, s;
            mad.wide.u32 stats, t, 16, $1; mad.lo.u32 query, $4, {self.plan.most}, query;"""

    def body(self) -> Iterator[str]:
        """Sums of a lane's parts, then of all."""
        for chunk in range(self.chunks):
            yield self.load_statistics(chunk)
        yield from (f"mov.b32 a{i}, {float_text(0.0)};" for i in range(2 * QUAD))
        for first in range(0, self.count, self.batch):
            many = range(first, min(self.count, first + self.batch))
            for number in many:
                yield self.load(number, number - first)
            if first == 0:
                yield from self.weights()
            for number in many:
                yield from self.add(number, number - first)
        for step in (4, 8, 16):
            yield from (f"shfl.sync.bfly.b32 g, a{i}, {step}, 31, -1; add.f32 a{i}, a{i}, g;" for i in range(2 * QUAD))

    def load_statistics(self, chunk: int) -> str:
        """Tops and sums of both queries for the lane's part TEAMS * (LANES * chunk + u) + team."""
        first, places = TEAMS * LANES * chunk, (2 * chunk, 2 * chunk + 1)
        clear = [f"mov.b32 m{i}, {float_text(LOWEST)}; mov.b32 n{i}, {float_text(0.0)};" for i in places]
        names = ", ".join(f"{name}{i}" for name in "mn" for i in places)
        return f"""{" ".join(clear)} add.u32 t, s, {first}; setp.lt.s32 p, t, used;
            @p ld.relaxed.gpu.global.v4.f32 {{{names}}}, [stats+{16 * first}];"""

    def load(self, number: int, slot: int) -> str:
        """The lane's quad of its part `number`; zeros where no part has been written, whatever lies there."""
        names = [f"v{QUAD * slot + i}" for i in range(QUAD)]
        clear = " ".join(f"mov.b32 {name}, 0;" for name in names)
        there = f"[place+{number * TEAMS * self.stride}]"
        return f"""{clear} add.u32 t, team, {TEAMS * number}; setp.lt.s32 p, t, used;
            @p ld.relaxed.gpu.global.v4.b32 {{{", ".join(names)}}}, {there};"""

    def weights(self) -> Iterator[str]:
        """Powers of two by which parts count, in place of their tops, and the sums of all; tops are whole numbers."""
        for top, total, query in (("x", "tx", 0), ("y", "ty", 1)):
            names = [(f"m{2 * chunk + query}", f"n{2 * chunk + query}") for chunk in range(self.chunks)]
            yield f"mov.b32 {top}, {names[0][0]};"
            yield from (f"max.f32 {top}, {top}, {name};" for name, _ in names[1:])
            yield from (f"shfl.sync.bfly.b32 g, {top}, {1 << i}, 31, -1; max.f32 {top}, {top}, g;" for i in range(5))
            yield f"mov.b32 {total}, {float_text(0.0)};"
            for m, n in names:
                yield f"sub.f32 {m}, {m}, {top}; ex2.approx.ftz.f32 {m}, {m}; fma.rn.f32 {total}, {n}, {m}, {total};"
            yield from (
                f"shfl.sync.bfly.b32 g, {total}, {1 << i}, 31, -1; add.f32 {total}, {total}, g;" for i in range(5)
            )

    def add(self, number: int, slot: int) -> Iterator[str]:
        """Adds part `number` with the weights that lane `number` of the team knows."""
        yield f"and.b32 t, lane, {32 - LANES}; or.b32 t, t, {number % LANES};"
        chunk = number // LANES
        yield from (f"shfl.sync.idx.b32 w{'xy'[i]}, m{2 * chunk + i}, t, 31, -1;" for i in range(2))
        for pair in range(QUAD):
            word = f"v{QUAD * slot + pair}"
            yield f"shl.b32 t, {word}, 16; mov.b32 g, t; fma.rn.f32 a{2 * pair}, g, wx, a{2 * pair};"
            yield f"and.b32 t, {word}, 0xffff0000; mov.b32 g, t; fma.rn.f32 a{2 * pair + 1}, g, wy, a{2 * pair + 1};"

    def output(self) -> Iterator[str]:
        """The first four teams store a pair of the quad each."""
        for i in range(1, QUAD):
            yield f"setp.eq.u32 p, team, {i}; selp.f32 a0, a{2 * i}, a0, p; selp.f32 a1, a{2 * i + 1}, a1, p;"
        for total, value in (("tx", "a0"), ("ty", "a1")):
            yield f"max.f32 {total}, {total}, {float_text(1e-30)}; rcp.approx.ftz.f32 r, {total};"
            yield f"mul.f32 {value}, {value}, r;"
        # Block and half of a product's rows; u is the row in eight of them.
        yield "mad.lo.u32 t, quad, 4, team; shr.u32 s, t, 1; and.b32 t, t, 1; mad.lo.u32 u, half, 4, u;"
        factors = {"w": 64, "u": 8, "s": 2, "t": 1} if self.plan.narrow else {"s": 64, "w": 16, "t": 8, "u": 1}
        yield f"mul.lo.u32 channel, side, {64 * self.blocks};"
        yield from (f"mad.lo.u32 channel, {name}, {factor}, channel;" for name, factor in factors.items())
        yield f"""and.b32 u, lane, 3; setp.lt.u32 live, team, {QUAD}; cvt.rn.bf16x2.f32 t, a1, a0; mov.b32 {{l, k}}, t;
            mad.lo.u32 at, query, {self.plan.rank}, channel; mul.wide.u32 out, at, 2; add.u64 out, out, $2;
            setp.lt.and.u32 p, query, limit, live; @p st.global.b16 [out], l;
            add.u32 query, query, 1; setp.lt.and.u32 p, query, limit, live;
            @p st.global.b16 [out+{2 * self.plan.rank}], k;
            add.u32 item, item, {self.workers * self.warps}; bra NEXT;"""

    def end(self) -> str:
        """Once more, in earnest, when all blocks have met."""
        if not self.meets:
            return "DONE:"
        return f"""DONE: setp.eq.u32 p, again, 0; @p bra END; barrier.cta.sync {mosaic_meet.MET}, {mosaic_meet.THREADS};
            mov.b32 again, 0; mov.b32 used, $5; mov.b32 limit, {self.queries}; bra PASS; END:"""


def share(
    plan: Plan,
    refs: tuple[Any, Any, Any],
    numbers: tuple[jax.Array, jax.Array, jax.Array],
    workers: int,
    warps: int,
    *,
    meets: bool,
) -> None:
    """Joins a share of a row's parts for a group: `refs` are parts, statistics and the row's output.

    `numbers`: this block's of `workers`, the group's, that of parts that are used. `meets`: when all blocks have met.
    """
    text = _Program(plan, refs[2].shape[0], workers, warps, meets=meets).text()

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3 + (WHOLE,) * 3)
    def run(_: Any, *args: Any) -> None:
        places = [utils.memref_ptr(ref) for ref in args[:3]]
        operands = [number.registers.item() for number in args[3:]]
        utils.inline_ptx(text, *places, *operands, has_side_effects=True, convergent=True)

    run(*refs, *numbers)


def join(
    plan: Plan,
    mixed: Int32[Array, "B G S words"],
    stats: Float32[Array, "B G pairs S 4"],
    length: Int32[Array, " B"],
    queries: int,
) -> BFloat16[Array, "B Q R"]:
    """The same by a launch of its own, in blocks of one warpgroup."""
    rows, groups = mixed.shape[:2]
    workers = -(-words(plan) * 4 // PIECE // WARPS)
    while workers > WARPS and rows * groups * workers > BLOCKS:
        workers = -(-workers // 2)

    def body(mixed: Any, stats: Any, lengths: Any, output: Any) -> None:
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
        worker, group, row = (lax.axis_index(name) for name in ("workers", "groups", "rows"))
        used = parts_of(lengths[row], plan.parts, plan.least)
        refs = mixed.at[row, group], stats.at[row, group], output.at[row]
        share(plan, refs, (worker, group, used), workers, WARPS, meets=False)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, queries, plan.rank), jnp.bfloat16),
        grid=(workers, groups, rows),
        grid_names=("workers", "groups", "rows"),
        num_threads=1,
        thread_name="team",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
        ),
        kernel_name="mla_join",
    )(mixed, stats, length)
