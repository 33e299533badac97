"""Joins the parts of a split attention where `mosaic_decode` is interpreted; on a GPU `mosaic_share` does.

A block takes some channels of one query, whose maxima and sums are plain numbers. For a few rows its warpgroups load
all the parts there can be at once, before they know how many there are: the row's length, the statistics and the mixed
values are on their way at the same time.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float32, Int32

from pallas.mla.mosaic_plan import LOWEST, TILE, Settings, part_tiles

CHANNELS = 128
"""Channels of a block are a multiple: one a thread."""
TEAMS = 4
"""Warpgroups that share the parts."""
BATCH = 17
"""Parts of a warpgroup at most whose loads are in flight at once."""
BLOCKS = 192
"""With fewer queries than this, blocks take fewer channels each."""
EARLY = 16e6
"""Bytes of mixed values at most that are loaded before it is known whether they are there."""


def merge(pieces: list[tuple]) -> tuple:
    """Adds (maximum, total, mixed) pieces by their common maximum."""
    top = pieces[0][0]
    for maximum, _, _ in pieces[1:]:
        top = jnp.maximum(top, maximum)
    total, mixed = jnp.zeros_like(top), jnp.zeros_like(pieces[0][2])
    for maximum, part_total, part_mixed in pieces:
        weight = jnp.exp2(maximum - top)
        total += weight * part_total
        mixed += weight * part_mixed
    return top, total, mixed


def channels_of_block(rank: int, queries: int) -> int:
    """Channels of a block, a multiple of `CHANNELS` that divides the rank, for so many queries of all rows."""
    fitting = [count for count in range(CHANNELS, rank + 1, CHANNELS) if rank % count == 0]
    return next((count for count in fitting if rank // count * queries <= BLOCKS), rank)


def join(
    mixed: Float[Array, "B G S N R"],
    stats: Float32[Array, "B G S 2 N"],
    length: Int32[Array, " B"],
    queries: int,
    settings: Settings,
    interpret: Any = None,
) -> BFloat16[Array, "B Q R"]:
    """The attention of every query: parts weighted by exp2(their maximum) and divided by the sum of all."""
    rows, _, parts, most, rank = mixed.shape
    turns = -(-parts // (BATCH * TEAMS))
    batch = -(-parts // (turns * TEAMS))
    early = mixed.size * mixed.dtype.itemsize <= EARLY
    count = channels_of_block(rank, rows * queries)
    layout = plgpu.Layout.WG_STRIDED((count,), vec_size=count // CHANNELS)

    def body(mixed, stats, lengths, output, tops, totals, sums, ready):
        if interpret is None:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()
        team, piece, query, row = (lax.axis_index(name) for name in ("team", "pieces", "queries", "rows"))
        group, column, here = query // most, query % most, pl.ds(piece * count, count)

        def load(part: jax.Array, last: jax.Array | int) -> tuple:
            there = jnp.minimum(part, last)
            value = plgpu.load(mixed.at[row, group, there, column, here], layout=layout, optimized=False)
            value = value.astype(jnp.float32)
            maximum, total = (stats[row, group, there, kind, column] for kind in range(2))
            return maximum, total, value

        def present(part: jax.Array, used: jax.Array, loaded: tuple) -> tuple:
            """Unwritten parts, whose memory may hold anything, weigh nothing."""
            return tuple(jnp.where(part < used, x, low) for x, low in zip(loaded, (LOWEST, 0.0, 0.0)))

        def of_turn(index: jax.Array | int) -> list[jax.Array]:
            return [index * (batch * TEAMS) + team + TEAMS * piece for piece in range(batch)]

        loaded = [load(part, parts - 1) for part in of_turn(0)] if early else []
        length = lengths[row]
        step = part_tiles(length, parts, settings.least)
        used = ((length + TILE - 1) // TILE + step - 1) // step
        last = jnp.maximum(used - 1, 0)
        loaded = loaded or [load(part, last) for part in of_turn(0)]

        def turn(index: jax.Array, state: tuple) -> tuple:
            return merge([state, *(present(part, used, load(part, last)) for part in of_turn(index))])

        state = merge([present(part, used, piece) for part, piece in zip(of_turn(0), loaded)])
        if turns > 1:
            state = lax.fori_loop(1, (used + batch * TEAMS - 1) // (batch * TEAMS), turn, state)
        tops[team], totals[team], sums[team] = state
        plgpu.commit_smem()
        plgpu.barrier_arrive(ready)

        @pl.when(team == 0)
        def _finish() -> None:
            plgpu.barrier_wait(ready)
            of_team = lambda t: (tops[t], totals[t], plgpu.load(sums.at[t], layout=layout, optimized=False))  # noqa: E731
            _, total, value = merge([of_team(index) for index in range(TEAMS)])
            value = jnp.where(used > 0, value * (1.0 / jnp.maximum(total, 1e-30)), 0.0)
            output[row, query, here] = value.astype(jnp.bfloat16)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, queries, rank), jnp.bfloat16),
        grid=(rank // count, queries, rows),
        grid_names=("pieces", "queries", "rows"),
        num_threads=TEAMS,
        thread_name="team",
        scratch_types=(
            plgpu.SMEM((TEAMS,), jnp.float32),
            plgpu.SMEM((TEAMS,), jnp.float32),
            plgpu.SMEM((TEAMS, count), jnp.float32),
            plgpu.Barrier(num_arrivals=TEAMS),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="mla_join",
    )(mixed, stats, length)
