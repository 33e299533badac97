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
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas import inline
from pallas.layouts import WIDE
from pallas.mla import mosaic_columns, mosaic_meet, mosaic_narrow, mosaic_share
from pallas.mla.mosaic_plan import (
    CHUNK,
    LOG2_E,
    LOWEST,
    MOST_QUERIES,
    NARROW_KEYS,
    NARROW_VALUES,
    PER_QUERY,
    PIECE,
    PRODUCT,
    TILE,
    Plan,
)
from pallas.mla.mosaic_product import product_for
from pallas.mla.mosaic_signals import Form, Kind

SCORE, LEFT, RIGHT, FETCH = range(4)
REGISTERS = {SCORE: 184, LEFT: 136, RIGHT: 136, FETCH: 56}
REGISTERS_NARROW = {SCORE: 152, LEFT: 160, RIGHT: 160, FETCH: 40}
"""For 8-bit latents and many queries: what mixes values holds a left operand too, what fetches asks for whole tiles."""
ROUND = 1.5 * 2**10
"""Added to a score, it leaves multiples of 2^-13, for scores of less than 2^9."""
SLACK = 8.0
"""Weights are 2^SLACK at most."""
SCALAR = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))


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
    cells: Any
    """[warp, query]: of a tile's reduction."""
    asked: Any
    full: Any
    scored: Any
    free: Any
    keys: Any = None
    """[stage, token, channel]: of 8-bit latents what is keys only; `tiles` is [stage, piece, token, channel] then."""
    ready: Any = None
    """The barrier for queries that stand in order, which 8-bit latents need."""


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


def kinds(plan: Plan) -> dict[str, Kind]:
    """The barriers of a block."""
    slots, chunks = plan.stages * plan.pieces, plan.copies * plan.together
    if plan.narrow:
        chunks = 1 + plan.rank // PIECE
    found = {
        "asked": Kind(1, copies=2, chunks=plan.chunks),
        "full": Kind(slots, copies=chunks if plan.narrow else plan.copies, chunks=chunks),
        "scored": Kind(plan.stages, groups=1),
        # Both halves of the channels free a tile of 8-bit latents.
        "free": Kind(slots, groups=2 if plan.narrow else plan.together),
    }
    return {**found, "ready": Kind(1, groups=3)} if plan.narrow else found


TILES = mosaic_gpu.TileTransform((8, CHUNK))
CHUNKS_OF_TILES = (TILES, mosaic_gpu.TransposeTransform((1, 0, 2, 3)))
CHUNKS_OF_LINES = (mosaic_gpu.TileTransform((CHUNK,)), mosaic_gpu.TransposeTransform((1, 0, 2)))
"""Lines of a chunk lie one below the other, in tiles of eight or not: any number of queries, zeros behind them."""


def forms(plan: Plan) -> dict[str, Form]:
    """How copies lie in shared memory."""
    lines = {"transforms": WIDE, "swizzle": 128, "source": CHUNKS_OF_LINES, "fold": (1, 3), "chunked": True}
    tile = Form(transforms=WIDE, swizzle=128, source=(TILES,))
    if plan.together > 1:
        tile = dataclasses.replace(tile, source=CHUNKS_OF_TILES, fold=(1, 2), chunks=plan.together, chunked=True)
    return {
        "absorbed": Form(chunks=plan.values, **lines),
        "shared": Form(chunks=plan.chunks - plan.values, **lines),
        "tile": tile,
        "values": Form(transforms=NARROW_VALUES, swizzle=128),
        "keys": Form(transforms=NARROW_KEYS, swizzle=64, source=(TILES,)),
    }


def synchronize_warpgroup(plan: Plan) -> None:
    """Ordinary stores to shared memory become visible to the warpgroup."""
    (inline.synchronize if plan.interpret is None else plgpu.commit_smem)()


def lead(plan: Plan, memory: Memory, work: Work) -> None:
    """Meets for the whole block, by its last warpgroup."""
    if plan.meets:
        count, counts = work.row * plan.groups + work.group, memory.lengths.shape[0] * plan.groups
        mosaic_meet.wait(count, work.part, counts, plan.parts)


def each_part(plan: Plan, work: Work, run: Callable[[jax.Array, jax.Array, jax.Array], None]) -> None:
    """Calls `run` with each part of a block, and the first and last of its tiles as the block counts them."""

    def turn(index: jax.Array, _: None) -> None:
        first = index * work.step
        run(work.part + index, first, jnp.minimum(first + work.step, work.count))

    if plan.turns == 1:
        run(work.part, jnp.int32(0), work.count)
    else:
        lax.fori_loop(0, (work.count + work.step - 1) // work.step, turn, None)


def _ask(plan: Plan, memory: Memory, work: Work) -> None:
    """Starts the copy of the queries, which needs no length: it travels while lengths and page numbers do."""
    mine, form = (work.group * plan.most, plan.most), forms(plan)
    latent, beyond = (0, plan.rank), (plan.own, plan.width - plan.rank)
    values, keys = pl.ds(0, plan.values), pl.ds(plan.values, plan.chunks - plan.values)
    memory.asked.copy(0, memory.absorbed, (work.row, mine, latent), memory.queries.at[values], form["absorbed"])
    memory.asked.copy(0, memory.shared, (work.row, mine, beyond), memory.queries.at[keys], form["shared"])


def registers(plan: Plan) -> dict[int, int]:
    """Registers of a thread of each warpgroup."""
    return REGISTERS_NARROW if plan.narrow and plan.most > MOST_QUERIES // 2 else REGISTERS


def _release(plan: Plan, memory: Memory, slot: jax.Array, chunk: Any) -> None:
    """Says that a chunk has been read."""
    memory.free.arrive(slot * plan.pieces + chunk // plan.together)


def _drain(plan: Plan, memory: Memory, work: Work) -> None:
    """Sees the last chunks fall free. Only the interpreter needs that: it takes an arrival unseen for a fault."""
    if plan.interpret is None:
        return
    for back in range(plan.stages):
        tile = work.count - 1 - back
        for piece in range(plan.pieces):
            index = tile % plan.stages * plan.pieces + piece
            pl.when(tile >= 0)(lambda index=index: memory.free.wait(index, 0))


def fetch(plan: Plan, memory: Memory, work: Work) -> None:
    """Fetches tiles chunk by chunk, as places fall free."""
    plgpu.set_max_registers(registers(plan)[FETCH], action="decrease")

    def numbers(tile: jax.Array) -> list[jax.Array]:
        token = (work.first + tile) * TILE
        return [
            memory.table[work.row, jnp.minimum(token // plan.page + copy, plan.pages - 1)]
            for copy in range(plan.copies)
        ]

    form = forms(plan)["tile"]

    def one(tile: jax.Array, pages: list[jax.Array]) -> list[jax.Array]:
        slot, turn = tile % plan.stages, tile // plan.stages
        following = numbers(tile + 1)
        inside = (work.first + tile) * TILE % plan.page if plan.copies == 1 else 0
        for piece in range(plan.pieces):
            index, first = slot * plan.pieces + piece, piece * plan.together
            pl.when(tile >= plan.stages)(lambda index=index: memory.free.wait(index, turn - 1))
            for copy, page in enumerate(pages):
                there = (page, (inside, min(plan.page, TILE)), (first * CHUNK, plan.together * CHUNK))
                here = memory.tiles.at[slot, pl.ds(first, plan.together) if plan.together > 1 else first]
                here = here if plan.copies == 1 else here.at[pl.ds(copy * plan.page, plan.page)]
                memory.full.copy(index, memory.pool, there, here, form)
        return following

    first = numbers(jnp.int32(0))  # on its way while the queries are asked for
    _ask(plan, memory, work)
    lax.fori_loop(0, work.count, one, first)
    _drain(plan, memory, work)
    lead(plan, memory, work)


def _page(plan: Plan, memory: Memory, work: Work, tile: jax.Array) -> jax.Array:
    """Page of a tile; past the table, its last one."""
    return memory.table[work.row, jnp.minimum((work.first + tile) * TILE // plan.page, plan.pages - 1)]


def fetch_narrow(plan: Plan, memory: Memory, work: Work) -> None:
    """Fetches tiles of 8-bit latents whole, as places fall free."""
    plgpu.set_max_registers(registers(plan)[FETCH], action="decrease")
    form = forms(plan)

    def one(tile: jax.Array, page: jax.Array) -> jax.Array:
        slot = tile % plan.stages
        following = _page(plan, memory, work, tile + 1)
        pl.when(tile >= plan.stages)(lambda: memory.free.wait(slot, tile // plan.stages - 1))
        rows = ((work.first + tile) * TILE % plan.page, TILE)
        keys = (page, rows, (plan.rank, plan.width - plan.rank))
        memory.full.copy(slot, memory.pool, keys, memory.keys.at[slot], form["keys"])
        for piece in range(plan.rank // PIECE):
            there = (page, rows, (piece * PIECE, PIECE))
            memory.full.copy(slot, memory.pool, there, memory.tiles.at[slot, piece], form["values"])
        return following

    first = _page(plan, memory, work, jnp.int32(0))
    _ask(plan, memory, work)
    lax.fori_loop(0, work.count, one, first)
    _drain(plan, memory, work)
    lead(plan, memory, work)


def _scores(plan: Plan, memory: Memory, tile: jax.Array) -> jax.Array:
    """Products of a tile's keys with the queries, chunk by chunk as they land."""
    product, slot, turn = product_for(plan.interpret), tile % plan.stages, tile // plan.stages
    if plan.narrow:
        memory.full.wait(slot, turn)
        return mosaic_narrow.scores(plan, memory.tiles.at[slot], memory.keys.at[slot], memory.queries)

    def chunks() -> Any:
        for chunk in range(plan.chunks):
            if chunk % plan.together == 0:
                memory.full.wait(slot * plan.pieces + chunk // plan.together, turn)
            yield memory.tiles.at[slot, chunk], memory.queries.at[chunk]

    return product.chain((TILE, plan.most), chunks())


def _clean(plan: Plan, memory: Memory, slot: jax.Array, stored: jax.Array) -> None:
    """Zeros where a row has ended: what lies there may be NaN, which a weight of zero would not stop."""
    if plan.narrow:
        mosaic_narrow.clean(plan, memory.tiles.at[slot], stored)
        return
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


def _spread(plan: Plan, values: jax.Array) -> jax.Array:
    """One value for each query, for every token of a tile."""
    return lax.broadcast_in_dim(values, (TILE, plan.most), (1,))


def _load(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=PER_QUERY, optimized=False)


def _raise_tops(
    plan: Plan, memory: Memory, slot: jax.Array, scores: jax.Array, before: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(tops, sums): where a query's scores exceed its top, and nowhere else, whatever stands beside it."""
    if plan.interpret is None:
        top = mosaic_columns.raise_tops(
            plan, scores, before, memory.tops, memory.shrinks.at[slot], memory.cells, ROUND, SLACK
        )
        return top, total * _spread(plan, jnp.exp2(before - top))
    most = scores.max(axis=0)
    memory.tops[...] = jnp.where(most > before + (ROUND + SLACK), jnp.round(most - ROUND), before)
    synchronize_warpgroup(plan)
    top = _load(memory.tops)
    shrink = jnp.exp2(before - top)
    memory.shrinks[slot] = shrink
    return top, total * _spread(plan, shrink)


def _hide(plan: Plan, work: Work, position: jax.Array, begin: jax.Array, scores: jax.Array) -> jax.Array:
    """Scores of tokens that a query does not see become the lowest."""
    token, column = (plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=PRODUCT) for axis in (0, 1))
    if plan.narrow:
        token = mosaic_narrow.token_of(plan, token)
    last = jnp.minimum(position + (column + work.group * plan.most) // plan.heads, work.length - 1)
    return jnp.where((token + begin) <= last, scores, LOWEST)


def _factors(plan: Plan, memory: Memory, work: Work, tile: jax.Array, before: tuple | None = None) -> tuple:
    """(page of the next tile, factor of this one).

    Given what it returned for the tile before, no load waits for another.
    """
    if not plan.narrow:
        return ()
    page = _page(plan, memory, work, tile) if before is None else before[0]
    return _page(plan, memory, work, jnp.minimum(tile + 1, work.count - 1)), memory.scales[page]


def score(plan: Plan, memory: Memory, work: Work) -> None:
    """Scores and weights of every tile; at the end, each query's top and the sum of its weights.

    The factor of 8-bit latents multiplies weights, hence its logarithm is added to scores; sums leave it out. Their
    tiles are small enough for values to wait until the next tile is scored, and to be mixed beside its softmax.
    """
    plgpu.set_max_registers(registers(plan)[SCORE], action="increase")
    shape, most = (TILE, plan.most), plan.most
    position, kind = memory.starts[work.row], jnp.float16 if plan.narrow else jnp.bfloat16

    def hand_on(tile: jax.Array) -> None:
        memory.scored.arrive(tile % plan.stages)

    def one(tile: jax.Array, carry: tuple, first: jax.Array, masked: bool) -> tuple:
        before, total, factors = carry
        slot, begin = tile % plan.stages, (work.first + tile) * TILE
        scale, shift, following = plan.scale * LOG2_E, ROUND, ()
        if plan.narrow:
            following = _factors(plan, memory, work, tile + 1, factors)
            scale, shift = scale * factors[1], ROUND + mosaic_narrow.log2(plan, factors[1])
        scores = _scores(plan, memory, tile) * scale + shift
        if plan.narrow:
            # Values run beside the softmax, where nothing else does, and not beside scores: 5 % with few queries.
            pl.when(tile > first)(lambda: hand_on(tile - 1))
        else:
            for chunk in range(plan.values, plan.chunks):
                _release(plan, memory, slot, chunk)
        if masked:
            pl.when(begin + TILE > work.length)(lambda: _clean(plan, memory, slot, work.length - begin))
            scores = _hide(plan, work, position, begin, scores)
        exceeds = _any_positive(plan, scores - _spread(plan, before + (ROUND + SLACK)))
        raise_them = lambda: _raise_tops(plan, memory, slot, scores, before, total)  # noqa: E731
        top, total = lax.cond(exceeds > 0, raise_them, lambda: (before, total))
        memory.raised[slot] = exceeds
        share = jnp.exp2(scores - _spread(plan, top + ROUND))
        narrow = plgpu.layout_cast(share.astype(kind), plgpu.Layout.WGMMA_TRANSPOSED)
        memory.shares.at[slot].transpose((1, 0))[...] = narrow
        plgpu.commit_smem()
        if not plan.narrow:
            hand_on(tile)
        return top, total + (share * (1.0 / factors[1]) if plan.narrow else share), following

    low = plgpu.layout_cast(jnp.full((most,), LOWEST, jnp.float32), PER_QUERY)
    none = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), PRODUCT)
    # Tiles that every query sees whole need no mask.
    seen = jnp.minimum(position + work.group * most // plan.heads, work.length - 1) + 1

    def of_part(part: jax.Array, first: jax.Array, last: jax.Array) -> None:
        if plan.turns > 1 and plan.interpret is None:
            synchronize_warpgroup(plan)  # all have stored the tops of the part before
        memory.tops[...] = low
        synchronize_warpgroup(plan)
        whole = jnp.clip(seen // TILE - work.first, first, last)
        carry = (low, none, ahead or _factors(plan, memory, work, first))
        carry = lax.fori_loop(first, whole, lambda *args: one(*args, first, False), carry)
        top, total, _ = lax.fori_loop(whole, last, lambda *args: one(*args, first, True), carry)
        if plan.narrow:
            hand_on(last - 1)
        if plan.interpret is None:
            mosaic_columns.store_sums(
                plan, memory.stats.at[work.row, work.group], part, memory.tops, total, memory.cells
            )
            return
        memory.stats[work.row, work.group, part, 0] = top
        memory.stats[work.row, work.group, part, 1] = total.sum(axis=0)

    # What needs no queries is asked for before they have come.
    ahead = _factors(plan, memory, work, jnp.int32(0)) if plan.turns == 1 else ()
    _await_queries(plan, memory)
    if plan.narrow:
        memory.ready.wait(0, 0)
    each_part(plan, work, of_part)


def _await_queries(plan: Plan, memory: Memory) -> None:
    """Sees the queries land; products of 8-bit latents want them in an order of their own, in which all help."""
    memory.asked.wait(0, 0)
    if plan.narrow:
        mosaic_narrow.order_queries(plan, memory.queries)
        memory.ready.arrive(0)


def mix(plan: Plan, memory: Memory, work: Work, side: jax.Array) -> None:
    """Weighted values of every tile for one half of the channels."""
    plgpu.set_max_registers(registers(plan)[LEFT], action="increase")
    blocks = plan.values // 2
    base, product = side * blocks, product_for(plan.interpret)

    def one(tile: jax.Array, carry: jax.Array) -> jax.Array:
        slot = tile % plan.stages
        memory.scored.wait(slot, tile // plan.stages)

        def shrink() -> jax.Array:
            factor = plgpu.load(memory.shrinks.at[slot], layout=PER_QUERY, optimized=False)
            return carry * lax.broadcast_in_dim(factor, carry.shape, (1,))

        carry = lax.cond(memory.raised[slot] > 0, shrink, lambda: carry)
        if plan.narrow:
            total = mosaic_narrow.mix(plan, carry, memory.tiles.at[slot], memory.shares.at[slot], side)
            memory.free.arrive(slot)
            return total
        values = [memory.tiles.at[slot, base + block] for block in range(blocks)]
        done = lambda block: _release(plan, memory, slot, base + block)  # noqa: E731
        return product.blocks(carry, values, memory.shares.at[slot], done)

    none = plgpu.layout_cast(jnp.zeros((blocks * CHUNK, plan.most), jnp.float32), PRODUCT)

    def of_part(part: jax.Array, first: jax.Array, last: jax.Array) -> None:
        there, total = memory.mixed.at[work.row, work.group, part], lax.fori_loop(first, last, one, none)
        if plan.interpret is None:
            mosaic_share.store(plan, there, total, side)
        else:
            there[:, pl.ds(base * CHUNK, blocks * CHUNK)] = total.T.astype(jnp.bfloat16)

    if plan.narrow:
        _await_queries(plan, memory)
    each_part(plan, work, of_part)
