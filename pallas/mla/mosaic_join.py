"""Joins the parts of a split attention: the second kernel of `mosaic_decode`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas.mla.mosaic_plan import LOWEST, PER_QUERY, PRODUCT, TILE, Settings, part_tiles

CHANNELS, COLUMNS = 64, 8
"""Channels and queries of a block."""
TEAMS = 4
"""Warpgroups that share the parts."""
BATCH = 8
"""Parts whose loads are in flight at once."""


def merge(state: tuple, pieces: list[tuple]) -> tuple:
    """Adds (maximum, total, mixed) pieces to a running one by their common maximum."""
    top = state[0]
    for maximum, _, _ in pieces:
        top = jnp.maximum(top, maximum)
    total, mixed = jnp.zeros_like(state[1]), jnp.zeros_like(state[2])
    for maximum, part_total, part_mixed in (state, *pieces):
        weight = jnp.exp2(maximum - top)
        total += weight * part_total
        mixed += lax.broadcast_in_dim(weight, mixed.shape, (1,)) * part_mixed
    return top, total, mixed


def join(
    mixed: Float32[Array, "B G S R N"],
    stats: Float32[Array, "B G S 2 N"],
    length: Int32[Array, " B"],
    settings: Settings,
    interpret: Any = None,
) -> BFloat16[Array, "B G*N R"]:
    """The attention of every query: parts weighted by exp2(their maximum) and divided by the sum of all."""
    rows, groups, parts, rank, most = mixed.shape

    def body(mixed, stats, lengths, output, tops, totals, sums, ready):
        if interpret is None:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()
        team, group, row = (lax.axis_index(name) for name in ("team", "groups", "rows"))
        columns = pl.ds(lax.axis_index("columns") * COLUMNS, COLUMNS)
        channels = pl.ds(lax.axis_index("channels") * CHANNELS, CHANNELS)
        length = lengths[row]
        used = (length + TILE - 1) // TILE
        step = part_tiles(length, parts, settings.least)
        used = (used + step - 1) // step

        def load(part: jax.Array) -> tuple:
            there = jnp.minimum(part, jnp.maximum(used - 1, 0))
            maximum, total = (
                plgpu.load(stats.at[row, group, there, kind, columns], layout=PER_QUERY, optimized=False)
                for kind in range(2)
            )
            value = plgpu.load(mixed.at[row, group, there, channels, columns], layout=PRODUCT, optimized=False)
            return jnp.where(part < used, maximum, LOWEST), jnp.where(part < used, total, 0.0), value

        def turn(index: jax.Array, state: tuple) -> tuple:
            first = index * (BATCH * TEAMS) + team
            return merge(state, [load(first + TEAMS * piece) for piece in range(BATCH)])

        low = plgpu.layout_cast(jnp.full((COLUMNS,), 2 * LOWEST, jnp.float32), PER_QUERY)
        none = plgpu.layout_cast(jnp.zeros((COLUMNS,), jnp.float32), PER_QUERY)
        empty = plgpu.layout_cast(jnp.zeros((CHANNELS, COLUMNS), jnp.float32), PRODUCT)
        state = lax.fori_loop(0, (used + BATCH * TEAMS - 1) // (BATCH * TEAMS), turn, (low, none, empty))
        tops[team], totals[team], sums[team] = state
        plgpu.commit_smem()
        plgpu.barrier_arrive(ready)

        @pl.when(team == 0)
        def _finish() -> None:
            plgpu.barrier_wait(ready)

            def load(team: int) -> tuple:
                top, total = (plgpu.load(x.at[team], layout=PER_QUERY, optimized=False) for x in (tops, totals))
                return top, total, plgpu.load(sums.at[team], layout=PRODUCT, optimized=False)

            _, total, value = merge(load(0), [load(index) for index in range(1, TEAMS)])
            value = value * lax.broadcast_in_dim(1.0 / jnp.maximum(total, 1e-30), value.shape, (1,))
            value = jnp.where(used > 0, value, 0.0)
            there = output.at[row, pl.ds(group * most + lax.axis_index("columns") * COLUMNS, COLUMNS), channels]
            there.transpose((1, 0))[...] = plgpu.layout_cast(value.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, groups * most, rank), jnp.bfloat16),
        grid=(rank // CHANNELS, most // COLUMNS, groups, rows),
        grid_names=("channels", "columns", "groups", "rows"),
        num_threads=TEAMS,
        thread_name="team",
        scratch_types=(
            plgpu.SMEM((TEAMS, COLUMNS), jnp.float32),
            plgpu.SMEM((TEAMS, COLUMNS), jnp.float32),
            plgpu.SMEM((TEAMS, CHANNELS, COLUMNS), jnp.float32),
            plgpu.Barrier(num_arrivals=TEAMS),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="mla_join",
    )(mixed, stats, length)
