"""Causal attention over expanded keys and values, as one Mosaic GPU kernel (after FlashAttention-3).

A block takes queries of one head, 64 for each of two or three warpgroups; one more fetches keys and values. The scores
of a tile are on the tensor cores together with the weighted values of the tile before it, so that the softmax of one
runs beside the products of the other. A key is a head's own part and a part that all heads share, two buffers and two
products; nothing is concatenated in memory.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

WIDE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
PRODUCT = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
LOG2_E = math.log2(math.e)
LOWEST = -1e30
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
    keys, own_width, shared_width, value_width = own.shape[1], own.shape[-1], shared.shape[-1], value.shape[-1]
    tall, wide, stages, groups = QUERIES, settings.keys, settings.stages, settings.groups
    blocks = -(-tokens // (groups * tall))
    compute_registers, fetch_registers = REGISTERS[groups]
    factor = scale * LOG2_E

    def body(query, own, shared, value, starts, output, *buffers: Any):
        asks, asks_shared, owns, shareds, values, got, k_full, v_full, k_free, v_free = buffers
        group, head, row = (lax.axis_index(name) for name in ("group", "heads", "rows"))
        # Long rows of work first.
        first = (blocks - 1 - lax.axis_index("blocks")) * (groups * tall)
        begin = starts[row] + first
        count = (jnp.minimum(begin + groups * tall, keys) + wide - 1) // wide

        @pl.when(group == groups)
        def _fetch() -> None:
            plgpu.set_max_registers(fetch_registers, action="decrease")

            def fetch(tile: jax.Array, _: None) -> None:
                slot = tile % stages
                there = pl.ds(tile * wide, wide)
                pl.when(tile >= stages)(lambda: plgpu.barrier_wait(k_free.at[slot]))
                plgpu.copy_gmem_to_smem(own.at[row, there, head], owns.at[slot], k_full.at[slot])
                plgpu.copy_gmem_to_smem(shared.at[row, there], shareds.at[slot], k_full.at[slot])
                pl.when(tile >= stages)(lambda: plgpu.barrier_wait(v_free.at[slot]))
                plgpu.copy_gmem_to_smem(value.at[row, there, head], values.at[slot], v_full.at[slot])

            lax.fori_loop(0, count, fetch, None)

        @pl.when(group < groups)
        def _compute() -> None:
            plgpu.set_max_registers(compute_registers, action="increase")
            mine, mine_shared = asks.at[group], asks_shared.at[group]
            here = pl.ds(first + group * tall, tall)
            plgpu.copy_gmem_to_smem(query.at[row, here, head, pl.ds(0, own_width)], mine, got.at[group])
            part = pl.ds(own_width, shared_width)
            plgpu.copy_gmem_to_smem(query.at[row, here, head, part], mine_shared, got.at[group])
            q, k = (plgpu.broadcasted_iota(jnp.int32, (tall, wide), axis, layout=PRODUCT) for axis in (0, 1))
            seen = q + (begin + group * tall)
            whole = jnp.minimum((begin + group * tall + 1) // wide, count)
            plgpu.barrier_wait(got.at[group])

            def spread(x: jax.Array, columns: int) -> jax.Array:
                return lax.broadcast_in_dim(x, (tall, columns), (0,))

            def ask(scores: Any, slot: jax.Array) -> None:
                plgpu.wgmma(scores, mine, owns.at[slot].transpose((1, 0)))
                plgpu.wgmma(scores, mine_shared, shareds.at[slot].transpose((1, 0)))

            def soften(scores: jax.Array, tile: jax.Array, maximum: jax.Array, masked: bool) -> tuple:
                if masked:
                    scores = jnp.where(k + tile * wide <= seen, scores, LOWEST)
                higher = jnp.maximum(maximum, scores.max(axis=1) * factor)
                share = jnp.exp2(scores * factor - spread(higher, wide))
                return higher, jnp.exp2(maximum - higher), share

            def loop(tile: jax.Array, carry: tuple, masked: bool) -> tuple:
                mixed, maximum, total, share = carry
                slot, before = tile % stages, (tile - 1) % stages
                plgpu.barrier_wait(k_full.at[slot])
                plgpu.barrier_wait(v_full.at[before])

                def run(scores: Any, acc: Any) -> tuple:
                    acc[...] = mixed
                    ask(scores, slot)
                    plgpu.wgmma(acc, share, values.at[before])
                    raw = plgpu.wgmma_accumulator_load(scores, wait_n=1)
                    plgpu.barrier_arrive(k_free.at[slot])
                    higher, shrink, following = soften(raw, tile, maximum, masked)
                    sums = total * shrink + following.sum(axis=1)
                    summed = plgpu.wgmma_accumulator_load(acc, wait_n=0)
                    plgpu.barrier_arrive(v_free.at[before])
                    return summed * spread(shrink, value_width), higher, sums, following.astype(jnp.bfloat16)

                return pl.run_scoped(
                    run, plgpu.ACC((tall, wide), jnp.float32), plgpu.ACC((tall, value_width), jnp.float32)
                )

            def lead(masked: bool) -> tuple:
                plgpu.barrier_wait(k_full.at[0])

                def run(scores: Any) -> jax.Array:
                    ask(scores, jnp.int32(0))
                    return scores[...]

                raw = pl.run_scoped(run, plgpu.ACC((tall, wide), jnp.float32))
                plgpu.barrier_arrive(k_free.at[0])
                low = plgpu.layout_cast(jnp.full((tall,), LOWEST, jnp.float32), PER_ROW)
                higher, _, share = soften(raw, jnp.int32(0), low, masked)
                none = plgpu.layout_cast(jnp.zeros((tall, value_width), jnp.float32), PRODUCT)
                return none, higher, share.sum(axis=1), share.astype(jnp.bfloat16)

            carry = lead(True)
            carry = lax.fori_loop(1, whole, lambda tile, carry: loop(tile, carry, False), carry)
            carry = lax.fori_loop(jnp.maximum(whole, 1), count, lambda tile, carry: loop(tile, carry, True), carry)
            mixed, _, total, share = carry
            last = (count - 1) % stages
            plgpu.barrier_wait(v_full.at[last])

            def finish(acc: Any) -> None:
                plgpu.wgmma(acc, share, values.at[last])

            mixed = pl.run_state(finish)(plgpu.ACC.init(mixed))
            mixed = mixed * spread(1.0 / total, value_width)
            mine[...] = mixed.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(mine, output.at[row, here, head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    buffer = lambda *shape: plgpu.SMEM(shape, jnp.bfloat16, transforms=WIDE)  # noqa: E731
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, tokens, heads, value_width), query.dtype),
        # Blocks of one head side by side: they read the same keys and values.
        grid=(blocks, heads, rows),
        grid_names=("blocks", "heads", "rows"),
        num_threads=groups + 1,
        thread_name="group",
        scratch_types=(
            buffer(groups, tall, own_width),
            buffer(groups, tall, shared_width),
            buffer(stages, wide, own_width),
            buffer(stages, wide, shared_width),
            buffer(stages, wide, value_width),
            plgpu.Barrier(num_arrivals=2, num_barriers=groups),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
            plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
        ),
        kernel_name="mla_prefill",
    )(query, own, shared, value, start)
