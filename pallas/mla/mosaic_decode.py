"""Absorbed latent attention of a few queries per row over paged latents, as Mosaic GPU kernels.

Keys and values are one and the same tile of 64 latent rows in shared memory. Tokens stand on the long side of every
tensor-core product and queries on the short one, so that few queries cost little:

    S^T [64, N] = K [64, L] Q^T        O^T [R, N] += V^T [R, 64] P^T [64, N]

A block takes one part of one row's tokens for one group of N queries. One warpgroup computes scores and softmax, two
hold half of the latent channels of O^T each, a fourth fetches tiles. Parts depend on the row's own length alone, never
on its neighbours. A second kernel joins the parts.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas.mla.mosaic_product import product_for

TILE = 64
"""Tokens of a tile: the rows of one tensor-core instruction."""
STAGES = 2
MOST_QUERIES, MOST_QUERIES_NARROW = 48, 24
"""Queries of a block: what accumulators and shared memory hold; less beside a tile of 8-bit latents."""
WIDE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
PRODUCT = plgpu.Layout.WGMMA
PER_QUERY = plgpu.Layout.WGMMA.reduce(0)
NARROW = plgpu.Layout.TILED(plgpu.Tiling(((16, 64), (4, 64), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
"""[16, 64]: eight neighbouring values a thread, which are 8 bytes of 8-bit latents and 16 of bfloat16."""
SCORE, LEFT, RIGHT, FETCH = range(4)
REGISTERS = {SCORE: 136, LEFT: 168, RIGHT: 168, FETCH: 40}
REGISTERS_NARROW = {SCORE: 136, LEFT: 136, RIGHT: 136, FETCH: 104}
LOG2_E = math.log2(math.e)
LOWEST = -1e30
"""Stands for minus infinity where a difference of two of them may be taken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a row's tokens are cut: at most `blocks` blocks over all query groups, at least `least` tiles a part."""

    blocks: int = 132
    least: int = 4


DEFAULT = Settings()


def group_queries(queries: int, most: int = MOST_QUERIES) -> tuple[int, int]:
    """(groups, queries of a group): as few groups of at most `most` as possible, a multiple of 8 queries each."""
    groups = -(-queries // most)
    return groups, -(-queries // groups // 8) * 8


def most_queries(queries: int, tokens: int, settings: Settings) -> int:
    """Queries of a group at most, for page tables of `tokens` tokens.

    Groups of half the size finish a tile sooner and read latents twice as often. They serve short contexts, if there
    are so few parts that every row is cut as with large groups: results do not depend on the table's width.
    """
    half = MOST_QUERIES // 2
    groups, _ = group_queries(queries, half)
    few = -(-tokens // (TILE * settings.least)) <= settings.blocks // groups
    return half if few and queries > MOST_QUERIES else MOST_QUERIES


def part_tiles(length: jax.Array, parts: int, least: int) -> jax.Array:
    """Tiles of each part of a row of `length` tokens."""
    tiles = (length + TILE - 1) // TILE
    return jnp.maximum((tiles + parts - 1) // parts, least)


def require_supported(query: Any, pool: Any, rank: int) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernel does not serve."""
    page, width = pool.shape[1:]
    if query.dtype != jnp.bfloat16 or pool.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn):
        raise NotImplementedError(
            f"mla mosaic decode serves bfloat16, and latents of float8_e4m3fn, got {query.dtype} and {pool.dtype}"
        )
    if pool.dtype == jnp.float8_e4m3fn and page % TILE:
        raise NotImplementedError(f"mla mosaic decode serves 8-bit pages of a multiple of {TILE} rows, got {page}")
    if rank % 128 or width % 64:
        raise NotImplementedError(
            f"mla mosaic decode serves multiples of 128 latent values in rows of multiples of 64, got {rank} in {width}"
        )
    if page % TILE and (TILE % page or page % 8):
        raise NotImplementedError(f"mla mosaic decode serves pages of 8, 16, 32 or a multiple of 64 rows, got {page}")


def attend(
    query: Float[Array, "B R L"],
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
) -> tuple[Float32[Array, "B G S C N"], Float32[Array, "B G S 2 N"]]:
    """Unnormalised O^T, and per query (maximum in base 2, sum), of every part; parts without tokens stay unwritten.

    Query r of row b is head r % heads at position start[b] + r // heads. Latents of 8 bits are multiplied by the scale
    of their page.
    """
    rows, queries, width = query.shape
    page, pages = pool.shape[1], page_table.shape[1]
    narrow = pool.dtype == jnp.float8_e4m3fn
    limit = most_queries(queries, pages * page, settings)
    groups, most = group_queries(queries, min(limit, MOST_QUERIES_NARROW if narrow else MOST_QUERIES))
    query = jnp.pad(query, ((0, 0), (0, groups * most - queries), (0, 0)))
    # No more than the page table can fill: that changes no row's parts.
    parts = max(1, min(settings.blocks // groups, -(-pages * page // (TILE * settings.least))))
    copies = max(1, TILE // page)
    scales = jnp.ones(1, jnp.float32) if page_scale is None else page_scale
    half = rank // 2
    registers = REGISTERS_NARROW if narrow else REGISTERS
    # A bulk copy takes rows of at most 256 values.
    piece_width = max(size for size in (64, 128, 192, 256) if width % size == 0)
    staging_types: tuple = ()
    if narrow:
        staged = plgpu.SMEM((width // piece_width, TILE, piece_width), pool.dtype)
        staging_types = (staged, plgpu.Barrier(num_arrivals=width // piece_width))
    product = product_for(interpret)

    def body(query, pool, table, starts, lengths, scales, mixed, stats, *buffers: Any):
        queries, tiles, shares, shrinks, asked, full, scored, free, *staging = buffers
        part, group, row = (lax.axis_index(name) for name in ("parts", "groups", "rows"))
        role = lax.axis_index("role")
        # Starts before the kernel in front has finished, and waits for it before anything is read.
        if interpret is None:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()
        length = lengths[row]
        step = part_tiles(length, parts, settings.least)
        first = part * step
        count = jnp.clip((length + TILE - 1) // TILE - first, 0, step)

        @pl.when((role == FETCH) & (count > 0))
        def _fetch() -> None:
            plgpu.set_max_registers(registers[FETCH], action="decrease")
            plgpu.copy_gmem_to_smem(query.at[row, pl.ds(group * most, most)], queries, asked)

            def fetch(tile: jax.Array, _: None) -> None:
                slot = tile % STAGES
                token = (first + tile) * TILE
                ids = [table[row, jnp.minimum(token // page + copy, pages - 1)] for copy in range(copies)]

                @pl.when(tile >= STAGES)
                def _wait() -> None:
                    plgpu.barrier_wait(free.at[slot])

                for copy, number in enumerate(ids):
                    there = pool.at[number, pl.ds(token % page if copies == 1 else 0, min(page, TILE))]
                    here = tiles.at[slot, pl.ds(copy * page, page)] if copies > 1 else tiles.at[slot]
                    plgpu.copy_gmem_to_smem(there, here, full.at[slot])

            def fetch_narrow(tile: jax.Array, _: None) -> None:
                """Latents of 8 bits go through a buffer of their own, and widened into the tile."""
                staged, landed = staging
                slot = tile % STAGES

                def number(tile: jax.Array) -> jax.Array:
                    return table[row, (first + tile) * TILE // page]

                def start_copy(tile: jax.Array) -> None:
                    there = pl.ds((first + tile) * TILE % page, TILE)
                    for piece in range(width // piece_width):
                        columns = pl.ds(piece * piece_width, piece_width)
                        plgpu.copy_gmem_to_smem(pool.at[number(tile), there, columns], staged.at[piece], landed)

                pl.when(tile == 0)(lambda: start_copy(tile))
                factor = scales[number(tile)]
                plgpu.barrier_wait(landed)
                pieces = {}
                for token in range(0, TILE, 16):
                    for column in range(0, width, 64):
                        columns = pl.ds(column % piece_width, 64)
                        here = staged.at[column // piece_width, pl.ds(token, 16), columns]
                        pieces[token, column] = plgpu.load(here, layout=NARROW, optimized=False)
                plgpu.commit_smem()
                pl.when(tile + 1 < count)(lambda: start_copy(tile + 1))
                pl.when(tile >= STAGES)(lambda: plgpu.barrier_wait(free.at[slot]))
                for (token, column), piece in pieces.items():
                    wide = (piece.astype(jnp.float32) * factor).astype(jnp.bfloat16)
                    tiles[slot, pl.ds(token, 16), pl.ds(column, 64)] = wide
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[slot])

            lax.fori_loop(0, count, fetch_narrow if narrow else fetch, None)

        @pl.when((role == SCORE) & (count > 0))
        def _score() -> None:
            plgpu.set_max_registers(registers[SCORE], action="increase")
            token, column = (plgpu.broadcasted_iota(jnp.int32, (TILE, most), axis, layout=PRODUCT) for axis in (0, 1))
            last = jnp.minimum(starts[row] + (column + group * most) // heads, length - 1)
            plgpu.barrier_wait(asked)

            def score(tile: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                maximum, total = carry
                slot = tile % STAGES
                begin = (first + tile) * TILE
                plgpu.barrier_wait(full.at[slot])

                @pl.when(begin + TILE > length)
                def _clean() -> None:
                    stored = plgpu.broadcasted_iota(jnp.int32, (TILE, 64), 0, layout=PRODUCT) < length - begin
                    for column in range(0, rank, 64):
                        values = tiles.at[slot, :, pl.ds(column, 64)]
                        values[...] = jnp.where(stored, plgpu.load(values, layout=PRODUCT), jnp.bfloat16(0))
                    plgpu.commit_smem()

                scores = product((TILE, most), tiles.at[slot], queries.transpose((1, 0))) * (scale * LOG2_E)
                scores = jnp.where((token + begin) <= last, scores, LOWEST)
                higher = jnp.maximum(maximum, scores.max(axis=0))
                shrink = jnp.exp2(maximum - higher)
                share = jnp.exp2(scores - lax.broadcast_in_dim(higher, scores.shape, (1,)))
                shrinks[slot] = shrink
                narrow = plgpu.layout_cast(share.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
                shares.at[slot].transpose((1, 0))[...] = narrow
                plgpu.commit_smem()
                plgpu.barrier_arrive(scored.at[slot])
                return higher, total * lax.broadcast_in_dim(shrink, scores.shape, (1,)) + share

            low = plgpu.layout_cast(jnp.full((most,), LOWEST, jnp.float32), PER_QUERY)
            none = plgpu.layout_cast(jnp.zeros((TILE, most), jnp.float32), PRODUCT)
            maximum, total = lax.fori_loop(0, count, score, (low, none))
            stats[row, group, part, 0] = maximum
            stats[row, group, part, 1] = total.sum(axis=0)

        @pl.when(((role == LEFT) | (role == RIGHT)) & (count > 0))
        def _mix() -> None:
            plgpu.set_max_registers(registers[LEFT], action="increase")
            channels = pl.ds((role - LEFT) * half, half)

            def mix(tile: jax.Array, carry: jax.Array) -> jax.Array:
                slot = tile % STAGES
                plgpu.barrier_wait(scored.at[slot])
                shrink = plgpu.load(shrinks.at[slot], layout=PER_QUERY, optimized=False)
                carry = carry * lax.broadcast_in_dim(shrink, carry.shape, (1,))
                values = tiles.at[slot, :, channels].transpose((1, 0))
                carry = product(carry, values, shares.at[slot].transpose((1, 0)))
                plgpu.barrier_arrive(free.at[slot])
                return carry

            none = plgpu.layout_cast(jnp.zeros((half, most), jnp.float32), PRODUCT)
            mixed[row, group, part, channels] = lax.fori_loop(0, count, mix, none)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, groups, parts, rank, most), jnp.float32),
            jax.ShapeDtypeStruct((rows, groups, parts, 2, most), jnp.float32),
        ),
        grid=(parts, groups, rows),
        grid_names=("parts", "groups", "rows"),
        num_threads=4,
        thread_name="role",
        scratch_types=(
            plgpu.SMEM((most, width), jnp.bfloat16, transforms=WIDE),
            plgpu.SMEM((STAGES, TILE, width), jnp.bfloat16, transforms=WIDE),
            plgpu.SMEM((STAGES, most, TILE), jnp.bfloat16, transforms=WIDE),
            plgpu.SMEM((STAGES, most), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            *staging_types,
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=True,
            unsafe_no_auto_barriers=True,
            # Enough to take the maxima of all queries of a tile across warps in one exchange.
            reduction_scratch_bytes=6144,
        ),
        interpret=interpret,
        kernel_name="mla_decode",
    )(query, pool, page_table, start, length, scales)
