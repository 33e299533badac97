"""What the four warpgroups of a decode block do: fetch tiles, score them, mix the two halves of their values.

A tile of 64 tokens lies in shared memory as chunks of 64 channels. Every chunk has a barrier that says it is full and
one that says it is free again, so that scores begin with the first chunk of a tile, and a chunk is fetched anew as soon
as its own product has read it.

Weights are 2^(score - top). A query's top is a whole number that is raised only where a score exceeds it by more than
`SLACK`, so that most tiles need no maximum, which is a reduction across warps, and find all sums as they shall be. Any
top gives the same bits: scores are rounded to multiples of 2^-13 first, hence a difference is exact, and tops differ by
powers of two.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from pallas.mla.mosaic_plan import CHUNK, LOG2_E, LOWEST, PER_QUERY, PRODUCT, STAGES, TILE, Plan
from pallas.mla.mosaic_product import product_for

SCORE, LEFT, RIGHT, FETCH = range(4)
REGISTERS = {SCORE: 184, LEFT: 136, RIGHT: 136, FETCH: 56}
REGISTERS_NARROW = {SCORE: 136, LEFT: 136, RIGHT: 136, FETCH: 104}
ROUND = 1.5 * 2**10
"""Added to a score, it leaves multiples of 2^-13, for scores of less than 2^9."""
SLACK = 8.0
"""Weights are 2^SLACK at most."""
SCALAR = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))
NARROW = plgpu.Layout.TILED(plgpu.Tiling(((16, 64), (4, 64), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
"""[16, 64]: eight neighbouring values a thread, which are 8 bytes of 8-bit latents and 16 of bfloat16."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """References: arguments, results, then shared memory and barriers."""

    absorbed: Any
    shared: Any
    pool: Any
    table: Any
    starts: Any
    lengths: Any
    scales: Any
    mixed: Any
    stats: Any
    queries: Any
    """[chunk, query, channel] of this block."""
    tiles: Any
    """[stage, chunk, token, channel]."""
    shares: Any
    """[stage, query, token]: weights of a tile, relative to the largest so far."""
    raised: Any
    """[stage]: whether tops are raised for a tile."""
    shrinks: Any
    """[stage, query]: what the sum so far is multiplied by if they are."""
    tops: Any
    """[query]: what weights are relative to."""
    asked: Any
    full: Any
    scored: Any
    free: Any
    staging: Any = None
    """Shared memory where 8-bit latents land, and its barrier."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What one block does: tiles first .. first + count of a row, for one group of queries."""

    row: jax.Array
    group: jax.Array
    part: jax.Array
    """The first of its parts."""
    step: jax.Array | int
    """Tiles of a part."""
    length: jax.Array
    first: jax.Array
    count: jax.Array


def synchronize_warpgroup(plan: Plan) -> None:
    """Ordinary stores to shared memory become visible to the warpgroup."""
    if plan.interpret is not None:
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def wait(_: Any) -> None:
        mgpu.warpgroup_barrier()

    wait()


def each_part(plan: Plan, work: Work, run: Callable[[jax.Array, jax.Array, jax.Array], None]) -> None:
    """Calls `run` with each part of a block, and the first and last of its tiles as the block counts them."""

    def turn(index: jax.Array, _: None) -> None:
        first = index * work.step
        run(work.part + index, first, jnp.minimum(first + work.step, work.count))

    if plan.turns == 1:
        run(work.part, jnp.int32(0), work.count)
    else:
        lax.fori_loop(0, (work.count + work.step - 1) // work.step, turn, None)


def ask(plan: Plan, memory: Memory, row: jax.Array, group: jax.Array) -> None:
    """Starts the copy of the queries, which needs no length: it travels while lengths and page numbers do."""
    mine = pl.ds(group * plan.most, plan.most)
    for chunk in range(plan.chunks):
        source, begin = (memory.absorbed, 0) if chunk < plan.values else (memory.shared, plan.own - plan.rank)
        columns = pl.ds(begin + chunk * CHUNK, CHUNK)
        plgpu.copy_gmem_to_smem(source.at[row, mine, columns], memory.queries.at[chunk], memory.asked)


def _release(plan: Plan, memory: Memory, slot: jax.Array, chunk: Any) -> None:
    """Says that a chunk has been read."""
    plgpu.barrier_arrive(memory.free.at[slot * plan.chunks + chunk])


def _drain(plan: Plan, memory: Memory, work: Work) -> None:
    """Sees the last chunks fall free. Only the interpreter needs that: it takes an arrival unseen for a fault."""
    if plan.interpret is None:
        return
    for back in range(STAGES):
        tile = work.count - 1 - back
        for chunk in range(plan.chunks):
            index = tile % STAGES * plan.chunks + chunk
            pl.when(tile >= 0)(lambda index=index: plgpu.barrier_wait(memory.free.at[index]))


def fetch(plan: Plan, memory: Memory, work: Work) -> None:
    """Fetches tiles chunk by chunk, as places fall free."""
    plgpu.set_max_registers(REGISTERS[FETCH], action="decrease")

    def numbers(tile: jax.Array) -> list[jax.Array]:
        token = (work.first + tile) * TILE
        return [
            memory.table[work.row, jnp.minimum(token // plan.page + copy, plan.pages - 1)]
            for copy in range(plan.copies)
        ]

    def one(tile: jax.Array, pages: list[jax.Array]) -> list[jax.Array]:
        slot = tile % STAGES
        following = numbers(tile + 1)
        inside = (work.first + tile) * TILE % plan.page if plan.copies == 1 else 0
        for chunk in range(plan.chunks):
            index, columns = slot * plan.chunks + chunk, pl.ds(chunk * CHUNK, CHUNK)
            pl.when(tile >= STAGES)(lambda index=index: plgpu.barrier_wait(memory.free.at[index]))
            for copy, page in enumerate(pages):
                there = memory.pool.at[page, pl.ds(inside, min(plan.page, TILE)), columns]
                here = memory.tiles.at[slot, chunk]
                here = here if plan.copies == 1 else here.at[pl.ds(copy * plan.page, plan.page)]
                plgpu.copy_gmem_to_smem(there, here, memory.full.at[index])
        return following

    lax.fori_loop(0, work.count, one, numbers(jnp.int32(0)))
    _drain(plan, memory, work)


def fetch_narrow(plan: Plan, memory: Memory, work: Work) -> None:
    """Latents of 8 bits go through a buffer of their own, and widened into the tile."""
    plgpu.set_max_registers(REGISTERS_NARROW[FETCH], action="decrease")
    staged, landed = memory.staging
    pieces, _, piece_width = staged.shape

    def number(tile: jax.Array) -> jax.Array:
        return memory.table[work.row, (work.first + tile) * TILE // plan.page]

    def start_copy(tile: jax.Array) -> None:
        there = pl.ds((work.first + tile) * TILE % plan.page, TILE)
        for piece in range(pieces):
            columns = pl.ds(piece * piece_width, piece_width)
            plgpu.copy_gmem_to_smem(memory.pool.at[number(tile), there, columns], staged.at[piece], landed)

    def one(tile: jax.Array, _: None) -> None:
        slot = tile % STAGES
        pl.when(tile == 0)(lambda: start_copy(tile))
        factor = memory.scales[number(tile)]
        plgpu.barrier_wait(landed)
        parts = {}
        for token in range(0, TILE, 16):
            for chunk in range(plan.chunks):
                column = chunk * CHUNK
                here = staged.at[column // piece_width, pl.ds(token, 16), pl.ds(column % piece_width, CHUNK)]
                parts[token, chunk] = plgpu.load(here, layout=NARROW, optimized=False)
        plgpu.commit_smem()
        pl.when(tile + 1 < work.count)(lambda: start_copy(tile + 1))
        for chunk in range(plan.chunks):
            index = slot * plan.chunks + chunk
            pl.when(tile >= STAGES)(lambda index=index: plgpu.barrier_wait(memory.free.at[index]))
        for (token, chunk), piece in parts.items():
            wide = (piece.astype(jnp.float32) * factor).astype(jnp.bfloat16)
            memory.tiles[slot, chunk, pl.ds(token, 16)] = wide
        plgpu.commit_smem()
        for chunk in range(plan.chunks):
            plgpu.barrier_arrive(memory.full.at[slot * plan.chunks + chunk])

    lax.fori_loop(0, work.count, one, None)
    _drain(plan, memory, work)


def _scores(plan: Plan, memory: Memory, slot: jax.Array) -> jax.Array:
    """Products of a tile's keys with the queries, chunk by chunk as they land."""
    product = product_for(plan.interpret)

    def chunks() -> Any:
        for chunk in range(plan.chunks):
            plgpu.barrier_wait(memory.full.at[slot * plan.chunks + chunk])
            yield memory.tiles.at[slot, chunk], memory.queries.at[chunk].transpose((1, 0))

    return product.chain((TILE, plan.most), chunks())


def _clean(plan: Plan, memory: Memory, slot: jax.Array, stored: jax.Array) -> None:
    """Zeros where a row has ended: what lies there may be NaN, which a weight of zero would not stop."""
    inside = plgpu.broadcasted_iota(jnp.int32, (TILE, CHUNK), 0, layout=PRODUCT) < stored
    for chunk in range(plan.values):
        there = memory.tiles.at[slot, chunk]
        there[...] = jnp.where(inside, plgpu.load(there, layout=PRODUCT), jnp.bfloat16(0))
    plgpu.commit_smem()


def _any_positive(plan: Plan, values: jax.Array) -> jax.Array:
    """Whether any of a warpgroup's values is positive: a vote, far cheaper than a maximum."""
    if plan.interpret is not None:
        return jnp.any(values > 0).astype(jnp.int32)

    @plgpu.inline_mgpu(arg_types=(PRODUCT,), return_type=SCALAR)
    def vote(_: Any, values: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        most = None
        for register in values.registers.flat:
            for index in range(ir.VectorType(register.type).shape[0]):
                value = llvm.extractelement(register, mgpu.c(index, i32))
                most = value if most is None else arith.maximumf(most, value)
        asm = """{ .reg .pred p, q; setp.gt.f32 q, $1, 0f00000000;
            barrier.cta.red.or.pred.aligned p, $2, 128, q; selp.u32 $0, 1, 0, p; }"""
        barrier = mgpu.warpgroup_barrier_idx(sync=False)
        found = mgpu.inline_ptx(asm, most, barrier, result_types=i32, has_side_effects=True, convergent=True)
        return FragmentedArray.splat(found, (), is_signed=True)

    return vote(values)


def score(plan: Plan, memory: Memory, work: Work) -> None:
    """Scores and weights of every tile; at the end, each query's top and the sum of its weights."""
    registers = REGISTERS_NARROW if plan.narrow else REGISTERS
    plgpu.set_max_registers(registers[SCORE], action="increase")
    shape, most = (TILE, plan.most), plan.most
    position = memory.starts[work.row]

    def spread(x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(x, shape, (1,))

    def load(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=PER_QUERY, optimized=False)

    def raise_tops(slot: jax.Array, scores: jax.Array, before: jax.Array, total: jax.Array) -> tuple:
        memory.tops[...] = jnp.maximum(before, jnp.round(scores.max(axis=0) - ROUND))
        synchronize_warpgroup(plan)
        top = load(memory.tops)
        shrink = jnp.exp2(before - top)
        memory.shrinks[slot] = shrink
        return top, total * spread(shrink)

    def one(tile: jax.Array, carry: tuple[jax.Array, jax.Array], masked: bool) -> tuple[jax.Array, jax.Array]:
        before, total = carry
        slot, begin = tile % STAGES, (work.first + tile) * TILE
        scores = _scores(plan, memory, slot) * (plan.scale * LOG2_E) + ROUND
        for chunk in range(plan.values, plan.chunks):
            _release(plan, memory, slot, chunk)
        if masked:
            pl.when(begin + TILE > work.length)(lambda: _clean(plan, memory, slot, work.length - begin))
            token, column = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=PRODUCT) for axis in (0, 1))
            last = jnp.minimum(position + (column + work.group * most) // plan.heads, work.length - 1)
            scores = jnp.where((token + begin) <= last, scores, LOWEST)
        exceeds = _any_positive(plan, scores - spread(before + (ROUND + SLACK)))
        raise_them = lambda: raise_tops(slot, scores, before, total)  # noqa: E731
        top, total = lax.cond(exceeds > 0, raise_them, lambda: (before, total))
        memory.raised[slot] = exceeds
        share = jnp.exp2(scores - spread(top + ROUND))
        narrow = plgpu.layout_cast(share.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
        memory.shares.at[slot].transpose((1, 0))[...] = narrow
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.scored.at[slot])
        return top, total + share

    low = plgpu.layout_cast(jnp.full((most,), LOWEST, jnp.float32), PER_QUERY)
    none = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), PRODUCT)
    # Tiles that every query sees whole need no mask.
    seen = jnp.minimum(position + work.group * most // plan.heads, work.length - 1) + 1

    def of_part(part: jax.Array, first: jax.Array, last: jax.Array) -> None:
        memory.tops[...] = low
        synchronize_warpgroup(plan)
        whole = jnp.clip(seen // TILE - work.first, first, last)
        carry = lax.fori_loop(first, whole, lambda *args: one(*args, False), (low, none))
        top, total = lax.fori_loop(whole, last, lambda *args: one(*args, True), carry)
        memory.stats[work.row, work.group, part, 0] = top
        memory.stats[work.row, work.group, part, 1] = total.sum(axis=0)

    plgpu.barrier_wait(memory.asked)
    each_part(plan, work, of_part)


def _store_turned(plan: Plan, there: Any, values: jax.Array) -> None:
    """Stores [channel, query] values where channels stand side by side."""
    if plan.interpret is not None:
        there[...] = values.T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PRODUCT))
    def store(_: Any, there: Any, values: Any) -> None:
        values.foreach(lambda value, at: memref.store(value, there, [at[1], at[0]]))

    store(there, values)


def mix(plan: Plan, memory: Memory, work: Work, side: jax.Array) -> None:
    """Weighted values of every tile for one half of the channels."""
    registers = REGISTERS_NARROW if plan.narrow else REGISTERS
    plgpu.set_max_registers(registers[LEFT], action="increase")
    blocks = plan.values // 2
    base, product = side * blocks, product_for(plan.interpret)

    def one(tile: jax.Array, carry: jax.Array) -> jax.Array:
        slot = tile % STAGES
        plgpu.barrier_wait(memory.scored.at[slot])

        def shrink() -> jax.Array:
            factor = plgpu.load(memory.shrinks.at[slot], layout=PER_QUERY, optimized=False)
            return carry * lax.broadcast_in_dim(factor, carry.shape, (1,))

        carry = lax.cond(memory.raised[slot] > 0, shrink, lambda: carry)
        values = [memory.tiles.at[slot, base + block].transpose((1, 0)) for block in range(blocks)]
        done = lambda block: _release(plan, memory, slot, base + block)  # noqa: E731
        return product.blocks(carry, values, memory.shares.at[slot].transpose((1, 0)), done)

    none = plgpu.layout_cast(jnp.zeros((blocks * CHUNK, plan.most), jnp.float32), PRODUCT)
    channels = pl.ds(base * CHUNK, blocks * CHUNK)

    def of_part(part: jax.Array, first: jax.Array, last: jax.Array) -> None:
        there = memory.mixed.at[work.row, work.group, part, :, channels]
        _store_turned(plan, there, lax.fori_loop(first, last, one, none))

    each_part(plan, work, of_part)
