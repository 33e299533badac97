"""Absorbed latent attention of a few queries per row over paged latents, as Mosaic GPU kernels.

Keys and values are one and the same tile of 64 latent rows in shared memory. Tokens stand on the long side of every
tensor-core product and queries on the short one, so that few queries cost little:

    S^T [64, N] = K [64, L] Q^T        O^T [R, N] += V^T [R, 64] P^T [64, N]

A block takes one part of one row's tokens for one group of N queries, or a few parts one after another where there are
many rows. One warpgroup computes scores and softmax, two hold half of the latent channels of O^T each, a fourth fetches
tiles. Parts depend on the row's own length alone, never on its neighbours. A second kernel joins the parts.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas.mla import mosaic_plan
from pallas.mla import mosaic_roles as roles
from pallas.mla.mosaic_plan import (
    CHUNK,
    DEFAULT,
    NARROW_KEYS,
    NARROW_VALUES,
    PIECE,
    TILE,
    WIDE,
    Plan,
    Settings,
    part_tiles,
)

ARGUMENTS = ("absorbed", "shared", "pool", "table", "starts", "lengths", "scales", "mixed", "stats")
BUFFERS = ("queries", "tiles", "shares", "raised", "shrinks", "tops", "asked", "full", "scored", "free")


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
) -> tuple[Float32[Array, "B G S N R"], Float32[Array, "B G S 2 N"]]:
    """Unnormalised O, and per query (maximum in base 2, sum), of every part; parts without tokens stay unwritten.

    Query r of row b is head r % heads at position start[b] + r // heads: `absorbed` meets the latent, the last channels
    of `shared` the shared key. Latents of 8 bits are multiplied by the scale of their page.
    """
    rows, queries, _ = shared.shape
    options = {"heads": heads, "rank": rank, "scale": scale, "interpret": interpret}
    plan = mosaic_plan.make(shared.shape, pool, page_table.shape[1], settings, **options)
    missing = plan.groups * plan.most - queries
    # Copies leave out what lies beyond the queries, if those are a multiple of 8. XLA fills up and joins in one kernel.
    if missing and (queries % 8 or interpret is not None):
        full = jnp.concatenate([absorbed, shared[..., plan.own :]], axis=-1)
        absorbed = shared = jnp.pad(full, ((0, 0), (0, missing), (0, 0)))
        plan = dataclasses.replace(plan, own=rank)
    scales = jnp.ones(1, jnp.float32) if page_scale is None else page_scale
    results = (rows, plan.groups, plan.parts)
    return plgpu.kernel(
        lambda *refs: _block(plan, *refs),
        out_type=(
            jax.ShapeDtypeStruct((*results, plan.most, rank), jnp.float32),
            jax.ShapeDtypeStruct((*results, 2, plan.most), jnp.float32),
        ),
        grid=(-(-plan.parts // plan.turns), plan.groups, rows),
        grid_names=("parts", "groups", "rows"),
        num_threads=4,
        thread_name="role",
        scratch_types=_buffers(plan, pool.dtype),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=True,
            unsafe_no_auto_barriers=True,
            # Enough to take the maxima of all queries of a tile across warps in one exchange.
            reduction_scratch_bytes=1024 if plan.narrow else 6144,
        ),
        interpret=interpret,
        kernel_name="mla_decode",
    )(absorbed, shared, pool, page_table, start, length, scales)


def _buffers(plan: Plan, dtype: Any) -> tuple[Any, ...]:
    """Shared memory and barriers, in the order of BUFFERS."""
    slots = plan.stages * roles.barriers(plan)
    tile = (plan.rank // PIECE, TILE, PIECE) if plan.narrow else (plan.chunks, TILE, CHUNK)
    buffers = (
        plgpu.SMEM((plan.chunks, plan.most, CHUNK), jnp.bfloat16, transforms=WIDE),
        plgpu.SMEM((plan.stages, *tile), dtype, transforms=NARROW_VALUES if plan.narrow else WIDE),
        plgpu.SMEM((plan.stages, plan.most, TILE), jnp.float16 if plan.narrow else jnp.bfloat16, transforms=WIDE),
        plgpu.SMEM((plan.stages,), jnp.int32),
        plgpu.SMEM((plan.stages, plan.most), jnp.float32),
        plgpu.SMEM((plan.most,), jnp.float32),
        plgpu.Barrier(num_arrivals=plan.chunks),
        plgpu.Barrier(num_arrivals=1 + plan.rank // PIECE if plan.narrow else plan.copies, num_barriers=slots),
        plgpu.Barrier(num_barriers=plan.stages),
        # Both halves of the channels free a tile of 8-bit latents.
        plgpu.Barrier(num_arrivals=2 if plan.narrow else 1, num_barriers=slots),
    )
    keys = plgpu.SMEM((plan.stages, TILE, plan.width - plan.rank), dtype, transforms=NARROW_KEYS)
    return (*buffers, plgpu.Barrier(num_arrivals=3), keys) if plan.narrow else buffers


def _block(plan: Plan, *refs: Any) -> None:
    """The kernel: finds a block's work and hands it to its warpgroups."""
    arguments, buffers = refs[: len(ARGUMENTS)], refs[len(ARGUMENTS) :]
    named = dict(zip((*ARGUMENTS, *BUFFERS), (*arguments, *buffers)))
    memory = roles.Memory(
        **named, ready=(*buffers[len(BUFFERS) :], None)[0], keys=(*buffers[len(BUFFERS) + 1 :], None)[0]
    )
    part, group, row, role = (lax.axis_index(name) for name in ("parts", "groups", "rows", "role"))
    # Starts before the kernel in front has finished, and waits for it before anything is read.
    if plan.interpret is None:
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
    pl.when(role == roles.FETCH)(lambda: roles.ask(plan, memory, row, group))
    length = memory.lengths[row]
    step = plan.least if plan.short else part_tiles(length, plan.parts, plan.least)
    part *= plan.turns
    first = part * step
    count = jnp.clip((length + TILE - 1) // TILE - first, 0, plan.turns * step)
    work = roles.Work(row=row, group=group, part=part, step=step, length=length, first=first, count=count)
    # Without tokens too.
    pl.when(role == roles.FETCH)(lambda: (roles.fetch_narrow if plan.narrow else roles.fetch)(plan, memory, work))
    pl.when((role == roles.SCORE) & (count > 0))(lambda: roles.score(plan, memory, work))
    # The queries must have landed before a block ends.
    pl.when((role == roles.SCORE) & (count == 0))(lambda: plgpu.barrier_wait(memory.asked))
    mixes = (role == roles.LEFT) | (role == roles.RIGHT)
    pl.when(mixes & (count > 0))(lambda: roles.mix(plan, memory, work, role - roles.LEFT))
