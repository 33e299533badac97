"""How a decode call is cut: tiles, parts, groups of queries; all of it known before the kernel runs."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas.dispatch import multiprocessors

TILE = 64
"""Tokens of a tile: the rows of one tensor-core instruction."""
CHUNK = 64
"""Channels of a chunk, the piece of a tile that is fetched and freed by itself."""
UNIT = 256
"""Latent values are a multiple: four chunks, whose sums a thread of either half stores as whole quads."""
STAGES, STAGES_NARROW = 2, 4
"""Tiles in shared memory."""
WARPS = 4
"""Of a warpgroup."""
MOST_QUERIES = 48
"""Queries of a block: what accumulators and shared memory hold."""
PIECE = 128
"""Channels of a piece of 8-bit values: a line of 128 bytes, the most that a swizzled copy fetches at once."""
NARROW_VALUES = (plgpu.SwizzleTransform(PIECE),)
NARROW_KEYS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(64))
PRODUCT = plgpu.Layout.WGMMA
PER_QUERY = plgpu.Layout.WGMMA.reduce(0)
LOG2_E = math.log2(math.e)
LOWEST = -1e30
"""Stands for minus infinity where a difference of two of them may be taken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a row's tokens are cut: parts, blocks over all query groups, and tiles of a part."""

    blocks: int = 132
    """At most; the multiprocessors of an H200."""
    parts: int = 88
    """At most: so many blocks draw almost all the bandwidth there is, and more only write sums more often."""
    parts_narrow: int = 132
    """The same for 8-bit latents, with which a block takes longer for a byte."""
    least: int = 4
    """Tiles of a part at least."""
    least_few: int = 2
    """The same where one group has all queries: there are fewer sums then, and fewer blocks that share the tiles."""
    turns: int = 4
    """Parts that a block takes one after another at most, where there are many rows: they share its start."""
    queries: int | None = None
    """Of a group at most; None: as the table's width says."""


DEFAULT = Settings()


def group_queries(queries: int, most: int = MOST_QUERIES) -> tuple[int, int]:
    """(groups, queries of a group): as few groups of at most `most` as possible, a multiple of 8 queries each."""
    groups = -(-queries // most)
    return groups, -(-queries // groups // 8) * 8


def most_queries(queries: int, tokens: int, settings: Settings) -> int:
    """Queries of a group at most, for page tables of `tokens` tokens.

    Groups of half the size finish a tile sooner. They serve short contexts, if there are so few parts that every row is
    cut as with large groups: results do not depend on the table's width.
    """
    if settings.queries is not None:
        return settings.queries
    half = MOST_QUERIES // 2
    groups, _ = group_queries(queries, half)
    few = -(-tokens // (TILE * settings.least)) <= settings.blocks // groups
    return half if few and queries > MOST_QUERIES else MOST_QUERIES


def part_tiles(length: jax.Array, parts: int, least: int) -> jax.Array:
    """Tiles of each part of a row of `length` tokens."""
    tiles = (length + TILE - 1) // TILE
    return jnp.maximum((tiles + parts - 1) // parts, least)


def parts_of(length: jax.Array, parts: int, least: int) -> jax.Array:
    """How many parts a row of `length` tokens has."""
    step = part_tiles(length, parts, least)
    return ((length + TILE - 1) // TILE + step - 1) // step


SHORT = 8
"""Parts of fewer tiles than this are short: what a block costs besides its tiles decides how they are dealt out."""
START = 2
"""That cost, in tiles."""


def parts_of_block(rows: int, groups: int, parts: int, step: int, settings: Settings) -> int:
    """Parts of up to `step` tiles that a block takes one after another: of short ones as many as end soonest."""
    if step >= SHORT:
        return max(1, min(settings.turns, rows * groups * parts // (4 * settings.blocks)))

    def end(turns: int) -> int:
        waves = -(-rows * groups * -(-parts // turns) // settings.blocks)
        return waves * (turns * step + START)

    return min(range(1, settings.turns + 1), key=end)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Static sizes of one call."""

    heads: int
    rank: int
    width: int
    own: int
    """Channel of `shared` where the queries of the shared key begin."""
    scale: float
    page: int
    pages: int
    """Pages of a row's table."""
    groups: int
    most: int
    """Queries of a group."""
    parts: int
    turns: int
    """Parts that a block takes one after another."""
    least: int
    narrow: bool
    meets: bool
    """Whether all blocks are resident at once, so that they join the parts themselves."""
    interpret: Any

    @property
    def stages(self) -> int:
        """Tiles in shared memory."""
        return STAGES_NARROW if self.narrow else STAGES

    @property
    def chunks(self) -> int:
        """Chunks of a tile, those that are values first."""
        return self.width // CHUNK

    @property
    def values(self) -> int:
        """Chunks that are values as well as keys."""
        return self.rank // CHUNK

    @property
    def copies(self) -> int:
        """Copies that fill a chunk: more than one where a page is smaller than a tile."""
        return max(1, TILE // self.page)

    @property
    def together(self) -> int:
        """Chunks that are fetched by one copy."""
        return 3 if self.chunks % 3 == 0 and self.copies == 1 and not self.narrow else 1

    @property
    def pieces(self) -> int:
        """Pieces of a tile that are fetched and freed by themselves; 8-bit latents are read whole."""
        return 1 if self.narrow else self.chunks // self.together

    @property
    def short(self) -> bool:
        """Whether no part is longer than the least, so that parts begin at places known without the length."""
        return self.pages * self.page <= self.parts * self.least * TILE


def make(
    shared: tuple[int, ...],
    pool: Any,
    pages: int,
    settings: Settings,
    *,
    heads: int,
    rank: int,
    scale: float,
    interpret: Any,
) -> Plan:
    """The plan for queries of shape [B, Q, C], a pool [pages, page, L] and page tables of `pages` pages."""
    page, narrow = pool.shape[1], pool.dtype == jnp.float8_e4m3fn
    if rank % UNIT and interpret is None:
        raise NotImplementedError(f"mla mosaic decode joins sums of multiples of {UNIT} latent values, got {rank}")
    groups, most = group_queries(shared[1], most_queries(shared[1], pages * page, settings))
    least, tiles = settings.least, -(-pages * page // TILE)
    if shared[1] <= MOST_QUERIES:
        least = min(least, settings.least_few)
    limit = settings.parts_narrow if narrow else settings.parts
    # No more than the page table can fill: that changes no row's parts.
    parts = max(1, min(settings.blocks // groups, limit, -(-tiles // least)))
    turns = parts_of_block(shared[0], groups, parts, max(least, -(-tiles // parts)), settings)
    return Plan(
        heads=heads,
        rank=rank,
        width=pool.shape[2],
        own=shared[2] - (pool.shape[2] - rank),
        scale=scale,
        page=page,
        pages=pages,
        groups=groups,
        most=most,
        parts=parts,
        turns=turns,
        least=least,
        narrow=narrow,
        meets=turns == 1 and shared[0] * groups * parts <= multiprocessors() and interpret is None,
        interpret=interpret,
    )


def require_supported(query: Any, pool: Any, rank: int) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernel does not serve."""
    page, width = pool.shape[1:]
    if query.dtype != jnp.bfloat16 or pool.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn):
        raise NotImplementedError(
            f"mla mosaic decode serves bfloat16, and latents of float8_e4m3fn, got {query.dtype} and {pool.dtype}"
        )
    if pool.dtype == jnp.float8_e4m3fn and page % TILE:
        raise NotImplementedError(f"mla mosaic decode serves 8-bit pages of a multiple of {TILE} rows, got {page}")
    if pool.dtype == jnp.float8_e4m3fn and (rank, width) != (8 * CHUNK, 9 * CHUNK):
        raise NotImplementedError(
            f"mla mosaic decode serves 8-bit latents of {8 * CHUNK} values in rows of {9 * CHUNK}, "
            f"got {rank} in {width}"
        )
    if rank % UNIT or width % 64:
        raise NotImplementedError(
            f"mla mosaic decode serves multiples of {UNIT} latent values in rows of multiples of 64, "
            f"got {rank} in {width}"
        )
    if page % TILE and (TILE % page or page % 8):
        raise NotImplementedError(f"mla mosaic decode serves pages of 8, 16, 32 or a multiple of 64 rows, got {page}")
