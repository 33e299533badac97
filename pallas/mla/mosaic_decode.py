"""Absorbed latent attention of a few queries per row over paged latents, as Mosaic GPU kernels.

Keys and values are one and the same tile of 64 latent rows in shared memory. Tokens stand on the long side of every
tensor-core product and queries on the short one, so that few queries cost little:

    S^T [64, N] = K [64, L] Q^T        O^T [R, N] += V^T [R, 64] P^T [64, N]

A block takes one part of one row's tokens for one group of N queries, or a few parts one after another where there are
many rows. One warpgroup computes scores and softmax, two hold half of the latent channels of O^T each, a fourth fetches
tiles. Parts depend on the row's own length alone, never on its neighbours. Where all blocks of a call are resident at
once, they join the parts in the same launch (`mosaic_meet`, `mosaic_share`), elsewhere a second one does.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float32, Int32

from pallas.layouts import WIDE
from pallas.mla import mosaic_join, mosaic_meet, mosaic_plan, mosaic_share, mosaic_signals
from pallas.mla import mosaic_roles as roles
from pallas.mla.mosaic_plan import (
    CHUNK,
    DEFAULT,
    NARROW_KEYS,
    NARROW_VALUES,
    PIECE,
    TILE,
    WARPS,
    Plan,
    Settings,
    part_tiles,
    parts_of,
)

ARGUMENTS = ("absorbed", "shared", "pool", "table", "starts", "lengths", "scales", "mixed", "stats")


def attend(
    absorbed: Float[Array, "B Q R"],
    shared: Float[Array, "B Q C"],
    pool: Float[Array, "pages page L"],
    page_table: Int32[Array, "B P"],
    start: Int32[Array, " B"],
    length: Int32[Array, " B"],
    page_scale: Float32[Array, " pages"] | None = None,
    *,
    heads: int,
    rank: int,
    scale: float,
    settings: Settings = DEFAULT,
    interpret: Any = None,
) -> BFloat16[Array, "B Q R"]:
    """Attention of every query over its row's latents; zeros for rows without tokens.

    Query r of row b is head r % heads at position start[b] + r // heads: `absorbed` meets the latent, the last channels
    of `shared` the shared key. Latents of 8 bits are multiplied by the scale of their page.
    """
    rows, queries, _ = shared.shape
    options = {"heads": heads, "rank": rank, "scale": scale, "interpret": interpret}
    plan = mosaic_plan.make(shared.shape, pool, page_table.shape[1], settings, **options)
    missing = plan.groups * plan.most - queries
    # On a GPU copies leave out what lies beyond the queries.
    if missing and interpret is not None:
        full = jnp.concatenate([absorbed, shared[..., plan.own :]], axis=-1)
        absorbed = shared = jnp.pad(full, ((0, 0), (0, missing), (0, 0)))
        plan = dataclasses.replace(plan, own=rank)
    scales = jnp.ones(1, jnp.float32) if page_scale is None else page_scale
    if interpret is None:
        parts = [((plan.parts, mosaic_share.words(plan)), jnp.int32), ((plan.most // 2, plan.parts, 4), jnp.float32)]
    else:
        parts = [((plan.parts, plan.most, rank), jnp.bfloat16), ((plan.parts, 2, plan.most), jnp.float32)]
    mixed, stats, *joined = plgpu.kernel(
        lambda *refs, **buffers: _block(plan, refs, buffers),
        out_type=[
            *(jax.ShapeDtypeStruct((rows, plan.groups, *shape), kind) for shape, kind in parts),
            *([jax.ShapeDtypeStruct((rows, queries, rank), jnp.bfloat16)] if plan.meets else []),
        ],
        grid=(-(-plan.parts // plan.turns), plan.groups, rows),
        grid_names=("parts", "groups", "rows"),
        num_threads=4,
        thread_name="role",
        scratch_types=_buffers(plan, pool.dtype),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
        interpret=interpret,
        kernel_name="mla_decode",
    )(absorbed, shared, pool, page_table, start, length, scales)
    if joined:
        return joined[0]
    joining = mosaic_share if interpret is None else mosaic_join
    return joining.join(plan, mixed, stats, length, queries)


def _buffers(plan: Plan, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers by name."""
    smem = plgpu.SMEM
    tile = (plan.rank // PIECE, TILE, PIECE) if plan.narrow else (plan.chunks, TILE, CHUNK)
    buffers = {
        "queries": smem((plan.chunks, plan.most, CHUNK), jnp.bfloat16, transforms=WIDE),
        "tiles": smem((plan.stages, *tile), dtype, transforms=NARROW_VALUES if plan.narrow else WIDE),
        "shares": smem((plan.stages, plan.most, TILE), jnp.float16 if plan.narrow else jnp.bfloat16, transforms=WIDE),
        "raised": smem((plan.stages,), jnp.int32),
        "shrinks": smem((plan.stages, plan.most), jnp.float32),
        "columns": smem((1 + WARPS, plan.most), jnp.float32),
    }
    if plan.narrow:
        keys = smem((plan.stages, TILE, plan.width - plan.rank), dtype, transforms=NARROW_KEYS)
        buffers = {"keys": keys, **buffers}
    return {**buffers, **mosaic_signals.scratch(roles.kinds(plan), emulated=plan.interpret is not None)}


def _block(plan: Plan, refs: tuple[Any, ...], buffers: dict[str, Any]) -> None:
    """The kernel: finds a block's work and hands it to its warpgroups."""
    arguments = dict(zip((*ARGUMENTS, "output"), refs))
    signals = mosaic_signals.prepare(roles.kinds(plan), buffers)
    output = arguments.pop("output", None)
    columns = buffers["columns"]
    arguments |= {"tops": columns.at[0], "cells": columns.at[pl.ds(1, WARPS)]}
    own = {name: ref for name, ref in buffers.items() if name in roles.Memory.__dataclass_fields__}
    memory = roles.Memory(**{**arguments, **own, **signals})
    part, group, row, role = (lax.axis_index(name) for name in ("parts", "groups", "rows", "role"))
    # Starts before the kernel in front has finished, and waits for it before anything is read.
    if plan.interpret is None:
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
    length = memory.lengths[row]
    step = plan.least if plan.short else part_tiles(length, plan.parts, plan.least)
    part *= plan.turns
    first = part * step
    count = jnp.clip((length + TILE - 1) // TILE - first, 0, plan.turns * step)
    work = roles.Work(row=row, group=group, part=part, step=step, length=length, first=first, count=count)

    def join() -> None:
        if plan.meets:
            refs = memory.mixed.at[row, group], memory.stats.at[row, group], output.at[row]
            numbers = part, group, parts_of(length, plan.parts, plan.least)
            mosaic_share.share(plan, refs, numbers, plan.parts, 4 * mosaic_meet.WARPGROUPS, meets=True)

    # Joining stands in both branches, for behind them it would have no more registers than what fetches has.
    @pl.when(role == roles.SCORE)
    def _score() -> None:
        pl.when(count > 0)(lambda: roles.score(plan, memory, work))
        # The queries must have landed before a block ends.
        pl.when(count == 0)(lambda: memory.asked.wait(0, 0))
        join()

    @pl.when((role == roles.LEFT) | (role == roles.RIGHT))
    def _mix() -> None:
        pl.when(count > 0)(lambda: roles.mix(plan, memory, work, role - roles.LEFT))
        join()

    # Without tokens too.
    pl.when(role == roles.FETCH)(lambda: (roles.fetch_narrow if plan.narrow else roles.fetch)(plan, memory, work))
