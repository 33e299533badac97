"""KDA prefill, first kernel: everything of a chunk that does not depend on the state, 64 tokens of a head a block.

Convolution, SiLU, norms and gates of 64 tokens (two chunks of 32, four tiles of 16), then the chunk's operands for the
recurrence. Cumulative log decays are products of a 0/1 matrix with the gates on the tensor cores, the gates split into two
bfloat16 parts; so any prefix, suffix or difference from a tile's middle is summed directly, without cancellation, and no
exponent passes 8 * 5. The triangular inverse is by fp32 forward substitution inside a tile, joined over a chunk's two tiles.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas.kda.mosaic_token import CHANNELS, KEY_EPS, pl_ds
from pallas.kda.types import KdaWeights

BLOCK, CHUNK, TILE = 64, 32, 16
LOG2_E = 1.4426950408889634
WIDE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
NARROW = (plgpu.TilingTransform((8, CHUNK)), plgpu.SwizzleTransform(64))

ROW_LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((4, CHANNELS), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
"""[64, 128] elementwise: a token per warp and step, four channels a lane."""
SOLVE_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((4, TILE), (1,))), warp_dims=(-3,), lane_dims=(plgpu.Replicated(2), -2), vector_dim=-1
)
"""[4, 16]: a row of the inverse of each of the four tiles, a tile per warp."""
PRODUCT = plgpu.Layout.WGMMA


class Operands(NamedTuple):
    """Per-chunk operands of the recurrence, [B, H, T, ...]; `total` is exp of a chunk's whole decay."""

    query: jax.Array
    pull: jax.Array
    push: jax.Array
    key: jax.Array
    inverse: jax.Array
    attention: jax.Array
    total: jax.Array


def silu(x: jax.Array) -> jax.Array:
    """x * sigmoid(x) with one tanh."""
    half = 0.5 * x
    return half + half * jnp.tanh(half)


def over_rows(x: jax.Array, layout: Any, shape: tuple[int, int] = (BLOCK, CHANNELS)) -> jax.Array:
    """A value per row, along the columns."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (0,)), layout)


def over_columns(x: jax.Array, layout: Any, shape: tuple[int, int] = (BLOCK, CHANNELS)) -> jax.Array:
    """A value per column, along the rows."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (1,)), layout)


def iotas(shape: tuple[int, int], layout: Any) -> tuple[jax.Array, jax.Array]:
    """Row and column numbers."""
    return tuple(plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) for axis in (0, 1))


def product(shape: tuple[int, int], *pairs: tuple[Any, Any]) -> jax.Array:
    """Sum of the matrix products of `pairs`, float32; the right operand lies in shared memory."""

    def run(acc: Any) -> jax.Array:
        for left, right in pairs:
            plgpu.wgmma(acc, left, right)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x as a bfloat16 value and a bfloat16 remainder."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def convolve(raw: Any, conv: Any, head: jax.Array, part: int) -> jax.Array:
    """SiLU of the convolution of q, k or v for the block, float32 with bfloat16 values; `raw` has 3 rows before it."""
    mixed = None
    for tap in range(4):
        weight = plgpu.load(conv.at[tap, head, part], layout=ROW_LAYOUT.reduce(0), optimized=False)
        rows = plgpu.load(raw.at[pl_ds(tap, BLOCK)], layout=ROW_LAYOUT, optimized=False)
        term = rows.astype(jnp.float32) * over_columns(weight, ROW_LAYOUT)
        mixed = term if mixed is None else mixed + term
    return silu(mixed).astype(jnp.bfloat16).astype(jnp.float32)


def unit(x: jax.Array, scale: float) -> jax.Array:
    """Rows of x normalised to length `scale`."""
    return x * over_rows(lax.rsqrt((x * x).sum(axis=1) + KEY_EPS) * scale, ROW_LAYOUT)


def pattern(keep: jax.Array) -> jax.Array:
    """A 0/1 matrix as a left operand."""
    return jnp.where(keep, 1.0, 0.0).astype(jnp.bfloat16)


def solve_tiles(lower: Any) -> None:
    """Overwrites the strictly lower 16 x 16 diagonal tiles of L in `lower` [65, 64] by the rows of (I + L)^-1.

    Row i is e_i - sum_{j<i} L_ij row_j, in float32, all four tiles at once.
    """
    tiles = lower.reshape((4, (BLOCK * BLOCK + BLOCK) // 4))
    _, column = iotas((4, TILE), SOLVE_LAYOUT)
    done: list[jax.Array] = []
    for i in range(TILE):
        row = jnp.where(column == i, 1.0, 0.0)
        for j in range(i):
            factor = plgpu.load(tiles.at[:, BLOCK * i + j], layout=SOLVE_LAYOUT.reduce(1), optimized=False)
            row = row - over_rows(factor, SOLVE_LAYOUT, (4, TILE)) * done[j]
        done.append(row)
    for i, row in enumerate(done):
        tiles[:, pl_ds(BLOCK * i, TILE)] = row


def join_tiles(lower: jax.Array, solved: Any, high: Any, low: Any) -> jax.Array:
    """(I + L)^-1 of both chunks, [64, 64]: D - D M D, with D the inverted tiles and M the products between tiles.

    Operands are split in two bfloat16 parts, so the join is good to about 1e-5.
    """
    i, j = iotas((BLOCK, BLOCK), PRODUCT)
    within = (i // TILE == j // TILE) & (j <= i)
    inverse = jnp.where(within, plgpu.load(solved.at[pl_ds(0, BLOCK)], layout=PRODUCT, optimized=False), 0.0)
    between = jnp.where((i // CHUNK == j // CHUNK) & (i // TILE > j // TILE), lower, 0.0)

    def times(left: jax.Array, right: jax.Array) -> jax.Array:
        high[...], low[...] = halves(right)
        plgpu.commit_smem()
        left_high, left_low = halves(left)
        return product((BLOCK, BLOCK), (left_high, high), (left_high, low), (left_low, high))

    return inverse - times(inverse, times(between, inverse))
