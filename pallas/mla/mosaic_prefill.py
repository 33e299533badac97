"""Causal attention over expanded keys and values, as one Mosaic GPU kernel (after FlashAttention-3).

A block takes queries of one head, 64 for each of two or three warpgroups; one more fetches keys and values. The scores
of a tile are on the tensor cores together with the weighted values of the tile before it, so that the softmax of one
runs beside the products of the other. A key is a head's own part and a part that all heads share, two buffers and two
products; nothing is concatenated in memory.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas import dispatch, warp_product
from pallas.layouts import WIDE
from pallas.mla.mosaic_plan import LOG2_E, LOWEST, PRODUCT

PER_ROW = plgpu.Layout.WGMMA.reduce(1)
QUERIES = 64
"""Queries of a warpgroup: the rows of one tensor-core instruction."""
REGISTERS = {2: (240, 24), 3: (160, 32)}
"""Registers of a computing and of the fetching warpgroup; together no more than the block starts with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Warpgroups that compute, keys of a tile, tiles in flight."""

    groups: int = 2
    keys: int = 128
    stages: int = 2


def require_supported(query: Any, own: Any, shared: Any, value: Any) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernel does not serve."""
    if query.dtype != jnp.bfloat16:
        raise NotImplementedError(f"mla mosaic prefill serves bfloat16, got {query.dtype}")
    widths = (own.shape[-1], shared.shape[-1], value.shape[-1])
    if any(width % 64 for width in widths) or sum(widths) > 320:
        raise NotImplementedError(
            f"mla mosaic prefill serves widths of a multiple of 64, 320 in sum, got {widths} (key, shared key, value)"
        )
    if query.shape[1] % 8 or own.shape[1] % 8:
        raise NotImplementedError(
            f"mla mosaic prefill serves a multiple of 8 queries and keys, got {query.shape[1]} and {own.shape[1]}"
        )


class Memory(NamedTuple):
    """References: arguments, the result, then shared memory and barriers."""

    query: Any
    own: Any
    shared: Any
    value: Any
    starts: Any
    output: Any
    asks: Any
    asks_shared: Any
    owns: Any
    shareds: Any
    values: Any
    got: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any


class Work(NamedTuple):
    """What a block does: queries from `first` on, at position `begin`, over `count` tiles of keys."""

    group: jax.Array
    head: jax.Array
    row: jax.Array
    first: jax.Array
    begin: jax.Array
    count: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """Static sizes of one call."""

    tokens: int
    total: int
    """Keys."""
    own_width: int
    shared_width: int
    value_width: int
    factor: float
    """What scores are multiplied by, in base 2."""

    @property
    def tall(self) -> int:
        """Queries of a block."""
        return self.groups * QUERIES

    @property
    def blocks(self) -> int:
        """Blocks of a head."""
        return -(-self.tokens // self.tall)


def attend(
    query: Float[Array, "B T H Q"],
    own: Float[Array, "B S H K"],
    shared: Float[Array, "B S C"],
    value: Float[Array, "B S H V"],
    start: Int32[Array, " B"],
    *,
    scale: float,
    settings: Settings = Settings(),
) -> Float[Array, "B T H V"]:
    """Query t of row b sees keys 0 .. start[b] + t; keys must be finite even where none sees them."""
    require_supported(query, own, shared, value)
    rows, tokens, heads, _ = query.shape
    plan = Plan(
        **dataclasses.asdict(settings),
        tokens=tokens,
        total=own.shape[1],
        own_width=own.shape[-1],
        shared_width=shared.shape[-1],
        value_width=value.shape[-1],
        factor=scale * LOG2_E,
    )
    return plgpu.kernel(
        partial(_block, plan),
        out_type=jax.ShapeDtypeStruct((rows, tokens, heads, plan.value_width), query.dtype),
        # Blocks of one head side by side: they read the same keys and values.
        grid=(plan.blocks, heads, rows),
        grid_names=("blocks", "heads", "rows"),
        num_threads=plan.groups + 1,
        thread_name="group",
        scratch_types=_buffers(plan),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
        ),
        kernel_name="mla_prefill",
    )(query, own, shared, value, start)


def _buffers(plan: Plan) -> tuple[Any, ...]:
    """Shared memory and barriers, in the order of `Memory`."""
    buffer = lambda *shape: plgpu.SMEM(shape, jnp.bfloat16, transforms=WIDE)  # noqa: E731
    return (
        buffer(plan.groups, QUERIES, plan.own_width),
        buffer(plan.groups, QUERIES, plan.shared_width),
        buffer(plan.stages, plan.keys, plan.own_width),
        buffer(plan.stages, plan.keys, plan.shared_width),
        buffer(plan.stages, plan.keys, plan.value_width),
        plgpu.Barrier(num_arrivals=2, num_barriers=plan.groups),
        plgpu.Barrier(num_arrivals=2, num_barriers=plan.stages),
        plgpu.Barrier(num_barriers=plan.stages),
        plgpu.Barrier(num_arrivals=plan.groups, num_barriers=plan.stages),
        plgpu.Barrier(num_arrivals=plan.groups, num_barriers=plan.stages),
    )


def _block(plan: Plan, *refs: Any) -> None:
    """The kernel: finds a block's work and hands it to its warpgroups."""
    memory = Memory(*refs)
    group, head, row = (lax.axis_index(name) for name in ("group", "heads", "rows"))
    # Long rows of work first.
    first = (plan.blocks - 1 - lax.axis_index("blocks")) * plan.tall
    begin = memory.starts[row] + first
    count = (jnp.minimum(begin + plan.tall, plan.total) + plan.keys - 1) // plan.keys
    work = Work(group, head, row, first, begin, count)
    pl.when(group == plan.groups)(lambda: _fetch(plan, memory, work))
    pl.when(group < plan.groups)(lambda: _compute(plan, memory, work))


def _fetch(plan: Plan, memory: Memory, work: Work) -> None:
    """Fetches keys and values tile by tile, as places fall free."""
    plgpu.set_max_registers(REGISTERS[plan.groups][1], action="decrease")
    row, head = work.row, work.head

    def fetch(tile: jax.Array, _: None) -> None:
        slot = tile % plan.stages
        there = pl.ds(tile * plan.keys, plan.keys)
        pl.when(tile >= plan.stages)(lambda: plgpu.barrier_wait(memory.k_free.at[slot]))
        plgpu.copy_gmem_to_smem(memory.own.at[row, there, head], memory.owns.at[slot], memory.k_full.at[slot])
        plgpu.copy_gmem_to_smem(memory.shared.at[row, there], memory.shareds.at[slot], memory.k_full.at[slot])
        pl.when(tile >= plan.stages)(lambda: plgpu.barrier_wait(memory.v_free.at[slot]))
        plgpu.copy_gmem_to_smem(memory.value.at[row, there, head], memory.values.at[slot], memory.v_full.at[slot])

    lax.fori_loop(0, work.count, fetch, None)


def _spread(x: jax.Array, columns: int) -> jax.Array:
    """One value for each query, in every column."""
    return lax.broadcast_in_dim(x, (QUERIES, columns), (0,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """The queries of one warpgroup and what it does with them."""

    plan: Plan
    memory: Memory
    mine: Any
    mine_shared: Any
    key: jax.Array
    """Index of a score's key in its tile."""
    seen: jax.Array
    """Position of a score's query, the last key that it sees."""

    def ask(self, scores: Any, slot: jax.Array) -> None:
        """Starts the products of the queries with a tile of keys."""
        plgpu.wgmma(scores, self.mine, self.memory.owns.at[slot].transpose((1, 0)))
        plgpu.wgmma(scores, self.mine_shared, self.memory.shareds.at[slot].transpose((1, 0)))

    def soften(self, scores: jax.Array, tile: jax.Array, maximum: jax.Array, masked: bool) -> tuple:
        """(maxima, what sums so far are multiplied by, weights relative to the maxima)."""
        factor = self.plan.factor
        if masked:
            scores = jnp.where(self.key + tile * self.plan.keys <= self.seen, scores, LOWEST)
        higher = jnp.maximum(maximum, scores.max(axis=1) * factor)
        share = jnp.exp2(scores * factor - _spread(higher, self.plan.keys))
        return higher, jnp.exp2(maximum - higher), share

    def lead(self) -> tuple:
        """The weights of the first tile."""
        plgpu.barrier_wait(self.memory.k_full.at[0])

        def run(scores: Any) -> jax.Array:
            self.ask(scores, jnp.int32(0))
            return scores[...]

        raw = pl.run_scoped(run, plgpu.ACC((QUERIES, self.plan.keys), jnp.float32))
        plgpu.barrier_arrive(self.memory.k_free.at[0])
        low = plgpu.layout_cast(jnp.full((QUERIES,), LOWEST, jnp.float32), PER_ROW)
        higher, _, share = self.soften(raw, jnp.int32(0), low, True)
        none = plgpu.layout_cast(jnp.zeros((QUERIES, self.plan.value_width), jnp.float32), PRODUCT)
        return none, higher, share.sum(axis=1), share.astype(jnp.bfloat16)

    def step(self, tile: jax.Array, carry: tuple, masked: bool) -> tuple:
        """Scores of a tile, and beside its softmax the weighted values of the tile before."""
        plan, memory = self.plan, self.memory
        mixed, maximum, total, share = carry
        slot, before = tile % plan.stages, (tile - 1) % plan.stages
        plgpu.barrier_wait(memory.k_full.at[slot])
        plgpu.barrier_wait(memory.v_full.at[before])

        def run(scores: Any, acc: Any) -> tuple:
            acc[...] = mixed
            self.ask(scores, slot)
            plgpu.wgmma(acc, share, memory.values.at[before])
            raw = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            plgpu.barrier_arrive(memory.k_free.at[slot])
            higher, shrink, following = self.soften(raw, tile, maximum, masked)
            sums = total * shrink + following.sum(axis=1)
            summed = plgpu.wgmma_accumulator_load(acc, wait_n=0)
            plgpu.barrier_arrive(memory.v_free.at[before])
            return summed * _spread(shrink, plan.value_width), higher, sums, following.astype(jnp.bfloat16)

        widths = (plan.keys, plan.value_width)
        return pl.run_scoped(run, *(plgpu.ACC((QUERIES, width), jnp.float32) for width in widths))

    def finish(self, last: jax.Array, carry: tuple) -> jax.Array:
        """The values of the last tile, and the division by the sums."""
        mixed, _, total, share = carry
        plgpu.barrier_wait(self.memory.v_full.at[last])
        add = lambda acc: plgpu.wgmma(acc, share, self.memory.values.at[last])  # noqa: E731
        mixed = pl.run_state(add)(plgpu.ACC.init(mixed))
        return mixed * _spread(1.0 / total, self.plan.value_width)


class WarpShare(Share):
    """The same by products of single warps, one after another."""

    def _scores(self, slot: jax.Array) -> jax.Array:
        scores = warp_product.zeros((QUERIES, self.plan.keys))
        scores = warp_product.accumulate(scores, [self.mine], self.memory.owns.at[slot])
        scores = warp_product.accumulate(scores, [self.mine_shared], self.memory.shareds.at[slot])
        plgpu.barrier_arrive(self.memory.k_free.at[slot])
        return scores

    def _weigh(self, mixed: jax.Array, share: jax.Array, slot: jax.Array) -> jax.Array:
        return warp_product.accumulate_held(mixed, share, self.memory.values.at[slot], right_turned=True)

    def lead(self) -> tuple:
        """See `Share.lead`."""
        plgpu.barrier_wait(self.memory.k_full.at[0])
        low = plgpu.layout_cast(jnp.full((QUERIES,), LOWEST, jnp.float32), PER_ROW)
        higher, _, share = self.soften(self._scores(jnp.int32(0)), jnp.int32(0), low, True)
        none = warp_product.zeros((QUERIES, self.plan.value_width))
        return none, higher, share.sum(axis=1), share.astype(jnp.bfloat16)

    def step(self, tile: jax.Array, carry: tuple, masked: bool) -> tuple:
        """See `Share.step`."""
        plan, memory = self.plan, self.memory
        mixed, maximum, total, share = carry
        slot, before = tile % plan.stages, (tile - 1) % plan.stages
        plgpu.barrier_wait(memory.k_full.at[slot])
        scores = self._scores(slot)
        plgpu.barrier_wait(memory.v_full.at[before])
        mixed = self._weigh(mixed, share, before)
        plgpu.barrier_arrive(memory.v_free.at[before])
        higher, shrink, following = self.soften(scores, tile, maximum, masked)
        sums = total * shrink + following.sum(axis=1)
        return mixed * _spread(shrink, plan.value_width), higher, sums, following.astype(jnp.bfloat16)

    def finish(self, last: jax.Array, carry: tuple) -> jax.Array:
        """See `Share.finish`."""
        mixed, _, total, share = carry
        plgpu.barrier_wait(self.memory.v_full.at[last])
        return self._weigh(mixed, share, last) * _spread(1.0 / total, self.plan.value_width)


def _compute(plan: Plan, memory: Memory, work: Work) -> None:
    """Attention of one warpgroup's queries."""
    plgpu.set_max_registers(REGISTERS[plan.groups][0], action="increase")
    row, head, group = work.row, work.head, work.group
    mine, mine_shared = memory.asks.at[group], memory.asks_shared.at[group]
    here = pl.ds(work.first + group * QUERIES, QUERIES)
    plgpu.copy_gmem_to_smem(memory.query.at[row, here, head, pl.ds(0, plan.own_width)], mine, memory.got.at[group])
    part = pl.ds(plan.own_width, plan.shared_width)
    plgpu.copy_gmem_to_smem(memory.query.at[row, here, head, part], mine_shared, memory.got.at[group])
    shape, begin = (QUERIES, plan.keys), work.begin + group * QUERIES
    query, key = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=PRODUCT) for axis in (0, 1))
    kind = WarpShare if dispatch.warps_multiply() else Share
    share = kind(plan=plan, memory=memory, mine=mine, mine_shared=mine_shared, key=key, seen=query + begin)
    # Tiles that every query sees whole need no mask.
    whole = jnp.minimum((begin + 1) // plan.keys, work.count)
    plgpu.barrier_wait(memory.got.at[group])
    carry = lax.fori_loop(1, whole, lambda tile, carry: share.step(tile, carry, False), share.lead())
    first = jnp.maximum(whole, 1)
    carry = lax.fori_loop(first, work.count, lambda tile, carry: share.step(tile, carry, True), carry)
    mine[...] = share.finish((work.count - 1) % plan.stages, carry).astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(mine, memory.output.at[row, here, head])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
