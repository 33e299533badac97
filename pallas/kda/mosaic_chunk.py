"""A piece of 64 tokens of a head, two chunks of 32, in prefill's first kernel: the steps on data in shared memory.

Decays refer to the middle of the chunk: with g > -5 no exponent passes 16 * 5 = 80, which float32 and bfloat16 can
hold, so one scaling of the rows and one of the columns serve all products, and the recurrence takes the very same
operands. The decays come as a product of a matrix of -1, 0, 1 with the gates on the tensor cores, gates split in two
bfloat16 parts: every difference is summed directly, without cancellation. The triangular inverse is by fp32 forward
substitution over the whole chunk.

No barriers are inserted around shared memory: `plgpu.commit_smem` stands before a buffer is overwritten that other
warps of the warpgroup may still read, and before one is read that they have written.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas.dispatch import warps_multiply
from pallas.kda import mosaic_warp
from pallas.kda.mosaic_token import CHANNELS, pl_ds
from pallas.kda.mosaic_unit import emulated_unit_factors, unit_factors
from pallas.kda.mosaic_widen import emulated_widen, widen

BLOCK, CHUNK, TILE, SIDES = 64, 32, 16, 2
HALF = CHANNELS // 2
LOG2_E = 1.4426950408889634
NARROW = (plgpu.TilingTransform((8, CHUNK)), plgpu.SwizzleTransform(64))
PADDED = CHUNK + 8
"""Floats from row to row of the inverse, so that a product's eight rows at a time lie in banks of their own."""
FEW, MANY = 72, 80
"""Rows of 256 bytes that every view of a shared buffer takes per side, so that sides never overlap."""

RUN_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((TILE, CHANNELS), (4, CHANNELS), (4,))), warp_dims=(-5,), lane_dims=(-2,), vector_dim=-1
)
"""[16, 128]: whole tokens per warp, for sums over channels; four in a row, so that the convolution's loads meet."""
COLUMN_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((TILE, CHANNELS), (TILE, 32), (8, 32), (4, 32), (2,))),
    warp_dims=(-8,),
    lane_dims=(-5, -2),
    vector_dim=-1,
)
"""[16, 128]: whole channels per warp, for sums over tokens; a store takes rows four apart, as the swizzle wants."""
SOLVE_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((2, CHUNK), (1,))), warp_dims=(plgpu.Replicated(2), -3), lane_dims=(-2,), vector_dim=-1
)
"""[2, 32]: a row of the inverse of both chunks, a column per lane."""
PRODUCT = plgpu.Layout.WGMMA
Product = Callable[..., jax.Array]
Widen = Callable[[jax.Array, Any], jax.Array]


def over_rows(x: jax.Array, layout: Any, shape: tuple[int, int] = (BLOCK, CHANNELS)) -> jax.Array:
    """A value per row, along the columns."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (0,)), layout)


def over_columns(x: jax.Array, layout: Any, shape: tuple[int, int] = (BLOCK, CHANNELS)) -> jax.Array:
    """A value per column, along the rows."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (1,)), layout)


def iotas(shape: tuple[int, int], layout: Any) -> tuple[jax.Array, jax.Array]:
    """Row and column numbers."""
    return tuple(plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) for axis in (0, 1))


def tensor_core_product(shape: tuple[int, int], *pairs: tuple[Any, Any]) -> jax.Array:
    """Sum of the matrix products of `pairs`, float32; the right operand lies in shared memory."""
    if warps_multiply():
        return mosaic_warp.product(shape, *pairs)

    def run(acc: Any) -> jax.Array:
        for left, right in pairs:
            plgpu.wgmma(acc, left, right)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def own_chunk_product(inverse: jax.Array, rows: Any) -> jax.Array:
    """Each token's row of [64, 32] times the rows of its own chunk in [64, 128], negative, float32."""
    row, _ = iotas((BLOCK, CHUNK), PRODUCT)
    halves = jnp.where(row < CHUNK, -inverse, 0.0), jnp.where(row < CHUNK, 0.0, -inverse)
    blocks = jnp.concatenate([half.astype(jnp.bfloat16) for half in halves], axis=1)
    return tensor_core_product((BLOCK, CHANNELS), (blocks, rows))


def emulated_own_chunk_product(inverse: jax.Array, rows: Any) -> jax.Array:
    """`own_chunk_product` for interpretation."""
    chunks = -inverse.astype(jnp.bfloat16).reshape(2, CHUNK, CHUNK)
    dot = lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32)  # noqa: E731
    return jnp.concatenate([dot(x, y) for x, y in zip(chunks, rows[...].reshape(2, CHUNK, CHANNELS))])


def emulated_product(shape: tuple[int, int], *pairs: tuple[Any, Any]) -> jax.Array:
    """A product for interpretation on a CPU."""
    total = jnp.zeros(shape, jnp.float32)
    for left, right in pairs:
        total += jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)
    return total


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """X as a bfloat16 value, cut off rather than rounded because that is one integer operation, and a remainder."""
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536), jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def load_taps(conv: Any, head: jax.Array, part: int) -> list[jax.Array]:
    """Half of the convolution's weights for q, k or v: the half that SiLU wants."""
    layout = RUN_LAYOUT.reduce(0)
    taps = [plgpu.load(conv.at[tap, head, part], layout=layout, optimized=False) for tap in range(4)]
    # The barrier keeps the compiler from halving the sums instead, element by element.
    return [lax.optimization_barrier(0.5 * tap) for tap in taps]


def convolve(raw: Any, taps: list[jax.Array], first: jax.Array, widened: Widen) -> jax.Array:
    """SiLU of 16 convolved tokens, float32; `raw` starts 3 rows early. With x / 2 at hand that is one tanh."""
    half = None
    for tap, weight in enumerate(taps):
        rows = plgpu.load(raw.at[pl.ds(first + tap, TILE)], layout=RUN_LAYOUT, optimized=False)
        term = widened(rows, RUN_LAYOUT) * over_columns(weight, RUN_LAYOUT, (TILE, CHANNELS))
        half = term if half is None else half + term
    return half + half * jnp.tanh(half)


def over_tiles(tiles: int, start: jax.Array | int, body: Callable[[jax.Array], None]) -> None:
    """Runs `body(first token)` for some tiles from token `start` on.

    A loop, because straight-line code of this length starves the instruction cache.
    """

    def step(tile: jax.Array, _: None) -> None:
        body(start + tile * TILE)

    lax.fori_loop(0, tiles, step, None)


def unit_rows(
    raws: tuple[Any, Any], taps: list[list[jax.Array]], targets: tuple[Any, Any], first: jax.Array, on: "Backend"
) -> None:
    """16 convolved rows of q and of k, normalised.

    Rows past the last token are arbitrary but finite: without beta they write nothing, and their readings are masked.
    """
    planes = [convolve(raw, weights, first, on.widen) for raw, weights in zip(raws, taps)]
    factors = on.unit_factors(RUN_LAYOUT, TILE)(*planes)
    for plane, factor, target in zip(planes, factors, targets):
        rows = plane * over_rows(factor, RUN_LAYOUT, (TILE, CHANNELS))
        target[pl.ds(first, TILE), :] = rows.astype(target.dtype)


def value_rows(raw: Any, taps: list[jax.Array], betas: Any, first: jax.Array, widened: Widen) -> None:
    """16 convolved rows of v times beta, in place: three rows on, so that the tiles go from the last to the first."""
    beta = plgpu.load(betas.at[pl.ds(first, TILE)], layout=RUN_LAYOUT.reduce(1), optimized=False)
    result = convolve(raw, taps, first, widened) * over_rows(beta, RUN_LAYOUT, (TILE, CHANNELS))
    plgpu.commit_smem()
    raw[pl.ds(first + 3, TILE), :] = result.astype(raw.dtype)


def gate_rows(
    logits: Any,
    speed: jax.Array,
    bias: jax.Array,
    lower_bound: float,
    length: jax.Array,
    gates: tuple,
    totals: Any,
    widened: Widen,
) -> Callable[[jax.Array], None]:
    """For 16 tokens, log decays in base 2 in two parts and exp of their sum; zero decay from `length` on.

    `speed` is half of exp(a_log), `bias` is multiplied by it.
    """
    scale = 0.5 * lower_bound * LOG2_E

    def tile(first: jax.Array) -> None:
        narrow = plgpu.load(logits.at[pl.ds(first, TILE)], layout=COLUMN_LAYOUT, optimized=False)
        rows = widened(narrow, COLUMN_LAYOUT)
        decay = scale + scale * jnp.tanh(rows * speed + over_columns(bias, COLUMN_LAYOUT, (TILE, CHANNELS)))

        def masked(decay: jax.Array) -> jax.Array:
            return jnp.where(iotas((TILE, CHANNELS), COLUMN_LAYOUT)[0] < length - first, decay, 0.0)

        decay = lax.cond(length - first < TILE, masked, lambda decay: decay, decay)
        totals[first // TILE] = jnp.exp2(decay.sum(axis=0))
        for gate, half in zip(gates, halves(decay)):
            gate[pl.ds(first, TILE), :] = half

    return tile


def own_columns(blocks: jax.Array, shape: tuple[int, int] = (BLOCK, CHUNK)) -> jax.Array:
    """[64, 64], of which the two chunks' diagonal blocks count, as [64, 32]: a row keeps its own chunk's columns."""
    row, _ = iotas(shape, PRODUCT)
    return jnp.where(row < CHUNK, blocks[:, :CHUNK], blocks[:, CHUNK:])


def solve(solved: Any, side: jax.Array) -> None:
    """Overwrites the strictly lower L of a side's chunks, in a [2, 128, 40] buffer, by the rows of (I + L)^-1.

    Row i is e_i - sum_{j<i} L_ij row_j, in float32.
    """
    chunks = solved.reshape((SIDES, 4, CHUNK * PADDED)).at[side, pl_ds(0, 2)]
    _, column = iotas((2, CHUNK), SOLVE_LAYOUT)
    done: list[jax.Array] = []
    for i in range(CHUNK):
        row = jnp.where(column == i, 1.0, 0.0)
        for j in range(i):
            entry = plgpu.load(chunks.at[:, PADDED * i + j], layout=SOLVE_LAYOUT.reduce(1), optimized=False)
            row = row - over_rows(entry, SOLVE_LAYOUT, (2, CHUNK)) * done[j]
        done.append(row)
    plgpu.commit_smem()
    for i, row in enumerate(done):
        chunks[:, pl_ds(PADDED * i, CHUNK)] = row


def emulated_solve(solved: Any, side: jax.Array) -> None:
    """`solve` for interpretation, which has no reshaped view of shared memory."""
    lower = solved[side, pl_ds(0, BLOCK), pl_ds(0, CHUNK)].reshape(2, CHUNK, CHUNK)

    def substitute(i: jax.Array, inverse: jax.Array) -> jax.Array:
        own = inverse[:, i] - jnp.einsum("cj,cjk->ck", lower[:, i], inverse, precision="highest")
        return inverse.at[:, i].set(own)

    start = jnp.broadcast_to(jnp.eye(CHUNK, dtype=jnp.float32)[None], lower.shape)
    solved[side, pl_ds(0, BLOCK), pl_ds(0, CHUNK)] = lax.fori_loop(1, CHUNK, substitute, start).reshape(BLOCK, CHUNK)


class Backend(NamedTuple):
    """What a GPU and an interpreter do in different ways."""

    product: Product
    invert: Callable[[Any, jax.Array], None]
    pull: Callable[[jax.Array, Any], jax.Array]
    widen: Widen
    unit_factors: Callable[..., Callable]


ON_GPU = Backend(tensor_core_product, solve, own_chunk_product, widen, unit_factors)
EMULATED = Backend(emulated_product, emulated_solve, emulated_own_chunk_product, emulated_widen, emulated_unit_factors)


def difference_matrix() -> np.ndarray:
    """[64, 64] of -1, 0, 1: times the log decays it gives each token's decay relative to the middle of its chunk."""
    i, j = np.arange(BLOCK)[:, None], np.arange(BLOCK)[None]
    middle, same = i // CHUNK * CHUNK + CHUNK // 2 - 1, i // CHUNK == j // CHUNK
    return (same & (j <= i) & (j > middle)).astype(np.float32) - (same & (j > i) & (j <= middle)).astype(np.float32)


def scale_channels(
    tiles: tuple,
    gates: tuple,
    differences: Any,
    beta_rows: jax.Array,
    columns: Any,
    product: Product,
    widened: Widen,
) -> None:
    """Scales half of the channels of q and k by the decays, in place, and writes k by the inverse decays."""
    query, key = tiles
    shape = (BLOCK, HALF)
    relative = product(shape, *((differences, gate) for gate in gates))
    rising, wide = jnp.exp2(relative), widened(plgpu.load(key, layout=PRODUCT), PRODUCT)
    columns[...] = (wide * jnp.exp2(-relative)).astype(columns.dtype)
    key[...] = (wide * (rising * over_rows(beta_rows, PRODUCT, shape))).astype(key.dtype)
    query[...] = (widened(plgpu.load(query, layout=PRODUCT), PRODUCT) * rising).astype(query.dtype)
