"""KDA prefill, first kernel: everything of a chunk that does not depend on the state, 64 tokens of a head a block.

Convolution, SiLU, norms and gates of 64 tokens, which are two chunks of 32, then the chunk's operands for the
recurrence. Decays refer to the middle of the chunk: with g > -5 no exponent passes 16 * 5 = 80, which float32 and
bfloat16 can hold, so one scaling of the rows and one of the columns serve all products, and the recurrence takes the
very same operands. The decays come as a product of a matrix of -1, 0, 1 with the gates on the tensor cores, gates
split in two bfloat16 parts: every difference is summed directly, without cancellation. The triangular inverse is by
fp32 forward substitution inside a tile of 16, joined over the two tiles of a chunk.

No barriers are inserted around shared memory: `plgpu.commit_smem` stands before a buffer is overwritten that other
warps may still read, and before one is read that other warps have written.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas.kda.mosaic_token import CHANNELS, KEY_EPS, pl_ds
from pallas.kda.types import KdaWeights

BLOCK, CHUNK, TILE = 64, 32, 16
LOG2_E = 1.4426950408889634
WIDE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
NARROW = (plgpu.TilingTransform((8, CHUNK)), plgpu.SwizzleTransform(64))

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
    plgpu.Tiling(((4, TILE), (1,))), warp_dims=(-3,), lane_dims=(plgpu.Replicated(2), -2), vector_dim=-1
)
"""[4, 16]: a row of the inverse of each of the four tiles, a tile per warp."""
PRODUCT = plgpu.Layout.WGMMA
Product = Callable[..., jax.Array]


class Operands(NamedTuple):
    """Per-chunk operands of the recurrence, [B, H, T, ...], with M the cumulative decay at the middle of the chunk.

    query q exp(G - M), pull beta k exp(G - M), push beta v, key k exp(M - G), inverse (I + L)^-1 and attention A with
    the columns of the token's own chunk, total exp of the decay over each half chunk.
    """

    query: jax.Array
    pull: jax.Array
    push: jax.Array
    key: jax.Array
    inverse: jax.Array
    attention: jax.Array
    total: jax.Array


def silu(x: jax.Array) -> jax.Array:
    """X * sigmoid(x) with one tanh."""
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


def tensor_core_product(shape: tuple[int, int], *pairs: tuple[Any, Any]) -> jax.Array:
    """Sum of the matrix products of `pairs`, float32; the right operand lies in shared memory."""

    def run(acc: Any) -> jax.Array:
        for left, right in pairs:
            plgpu.wgmma(acc, left, right)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def emulated_product(shape: tuple[int, int], *pairs: tuple[Any, Any]) -> jax.Array:
    """A product for interpretation on a CPU, where the left operand cannot come from registers."""
    total = jnp.zeros(shape, jnp.float32)
    for left, right in pairs:
        total += jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)
    return total


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """X as a bfloat16 value and a bfloat16 remainder."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def convolve(raw: Any, taps: Any, part: int, first: jax.Array) -> jax.Array:
    """SiLU of 16 convolved tokens of q, k or v, float32; `raw` starts 3 rows early, `taps` is [4, 3, 128]."""
    mixed = None
    for tap in range(4):
        weight = plgpu.load(taps.at[tap, part], layout=RUN_LAYOUT.reduce(0), optimized=False)
        rows = plgpu.load(raw.at[pl.ds(first + tap, TILE)], layout=RUN_LAYOUT, optimized=False)
        term = rows.astype(jnp.float32) * over_columns(weight, RUN_LAYOUT, (TILE, CHANNELS))
        mixed = term if mixed is None else mixed + term
    return silu(mixed)


def over_tiles(body: Callable[[jax.Array], None]) -> None:
    """Runs `body(first token)` for each tile of the block.

    A loop, because straight-line code of this length starves the instruction cache.
    """

    def step(tile: jax.Array, _: None) -> None:
        body(tile * TILE)

    lax.fori_loop(0, BLOCK // TILE, step, None)


def valid_rows(first: jax.Array, length: jax.Array, layout: Any) -> jax.Array:
    """Which of 16 tokens from `first` on lie below `length`."""
    return iotas((TILE, CHANNELS), layout)[0] < length - first


def unit_rows(raw: Any, taps: Any, part: int, scale: float, length: jax.Array, target: Any) -> None:
    """Convolved rows of q or k, normalised to length `scale`; zero from `length` on."""

    def tile(first: jax.Array) -> None:
        mixed = convolve(raw, taps, part, first)
        factor = lax.rsqrt((mixed * mixed).sum(axis=1) + KEY_EPS) * scale
        result = mixed * over_rows(factor, RUN_LAYOUT, (TILE, CHANNELS))
        target[pl.ds(first, TILE), :] = jnp.where(valid_rows(first, length, RUN_LAYOUT), result, 0.0).astype(
            target.dtype
        )

    over_tiles(tile)


def value_rows(raw: Any, taps: Any, betas: Any, length: jax.Array, target: Any) -> None:
    """Convolved rows of v times beta; zero from `length` on."""

    def tile(first: jax.Array) -> None:
        beta = plgpu.load(betas.at[pl.ds(first, TILE)], layout=RUN_LAYOUT.reduce(1), optimized=False)
        result = convolve(raw, taps, 2, first) * over_rows(beta, RUN_LAYOUT, (TILE, CHANNELS))
        target[pl.ds(first, TILE), :] = jnp.where(valid_rows(first, length, RUN_LAYOUT), result, 0.0).astype(
            target.dtype
        )

    over_tiles(tile)


def gate_rows(
    logits: Any, speed: jax.Array, bias: jax.Array, lower_bound: float, length: jax.Array, gates: tuple, totals: Any
) -> None:
    """Log decays in base 2 in two parts, and exp of their sum over each tile; zero decay from `length` on."""

    def tile(first: jax.Array) -> None:
        rows = plgpu.load(logits.at[pl.ds(first, TILE)], layout=COLUMN_LAYOUT, optimized=False).astype(jnp.float32)
        shifted = (rows + over_columns(bias, COLUMN_LAYOUT, (TILE, CHANNELS))) * (0.5 * speed)
        decay = (0.5 * lower_bound * LOG2_E) * (1.0 + jnp.tanh(shifted))
        decay = jnp.where(valid_rows(first, length, COLUMN_LAYOUT), decay, 0.0)
        totals[first // TILE] = jnp.exp2(decay.sum(axis=0))
        for gate, half in zip(gates, halves(decay)):
            gate[pl.ds(first, TILE), :] = half

    over_tiles(tile)


def own_columns(blocks: jax.Array) -> jax.Array:
    """[64, 64], zero outside the two chunks' diagonal blocks, as [64, 32]: each row keeps its own chunk's columns."""
    row, _ = iotas((BLOCK, CHUNK), PRODUCT)
    return jnp.where(row < CHUNK, blocks[:, :CHUNK], blocks[:, CHUNK:])


class TileView:
    """The four 16 x 16 diagonal tiles of a [65, 64] buffer, seen as [4, 1040] so that one index reaches all of them."""

    def __init__(self, buffer: Any) -> None:
        self.tiles = buffer.reshape((4, (BLOCK * BLOCK + BLOCK) // 4))

    def entry(self, i: int, j: int) -> jax.Array:
        """Element (i, j) of each tile."""
        return plgpu.load(self.tiles.at[:, BLOCK * i + j], layout=SOLVE_LAYOUT.reduce(1), optimized=False)

    def write(self, i: int, row: jax.Array) -> None:
        """Sets row i of each tile."""
        self.tiles[:, pl_ds(BLOCK * i, TILE)] = row


class EmulatedTileView:
    """`TileView` for interpretation, which has no reshaped view of shared memory."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def entry(self, i: int, j: int) -> jax.Array:
        """Element (i, j) of each tile."""
        return jnp.stack([self.buffer[start + i, start + j] for start in range(0, BLOCK, TILE)])

    def write(self, i: int, row: jax.Array) -> None:
        """Sets row i of each tile."""
        for tile in range(BLOCK // TILE):
            self.buffer[TILE * tile + i, pl_ds(TILE * tile, TILE)] = row[tile]


def solve_tiles(tiles: TileView | EmulatedTileView) -> None:
    """Overwrites the strictly lower diagonal tiles of L by the rows of (I + L)^-1.

    Row i is e_i - sum_{j<i} L_ij row_j, in float32, all four tiles at once.
    """
    _, column = iotas((4, TILE), SOLVE_LAYOUT)
    done: list[jax.Array] = []
    for i in range(TILE):
        row = jnp.where(column == i, 1.0, 0.0)
        for j in range(i):
            row = row - over_rows(tiles.entry(i, j), SOLVE_LAYOUT, (4, TILE)) * done[j]
        done.append(row)
    plgpu.commit_smem()
    for i, row in enumerate(done):
        tiles.write(i, row)


def join_tiles(lower: jax.Array, solved: Any, high: Any, low: Any, product: Product) -> jax.Array:
    """(I + L)^-1 of both chunks, [64, 64]: D - D M D, with D the inverted tiles and M the products between tiles.

    Operands are split in two bfloat16 parts, so the join is good to about 1e-5.
    """
    i, j = iotas((BLOCK, BLOCK), PRODUCT)
    within = (i // TILE == j // TILE) & (j <= i)
    inverse = jnp.where(within, plgpu.load(solved.at[pl_ds(0, BLOCK)], layout=PRODUCT, optimized=False), 0.0)
    between = jnp.where((i // CHUNK == j // CHUNK) & (i // TILE > j // TILE), lower, 0.0)

    def times(left: jax.Array, right: jax.Array) -> jax.Array:
        plgpu.commit_smem()
        high[...], low[...] = halves(right)
        plgpu.commit_smem()
        left_high, left_low = halves(left)
        return product((BLOCK, BLOCK), (left_high, high), (left_high, low), (left_low, high))

    return inverse - times(inverse, times(between, inverse))


def fetch_raw(
    qkvz: Any, window: Any, raws: tuple, ready: Any, row: jax.Array, head: jax.Array, start: jax.Array
) -> None:
    """Starts the copies of q, k, v of the block and of the three tokens before it (6 arrivals)."""
    for part, raw in enumerate(raws):
        plgpu.copy_gmem_to_smem(qkvz.at[row, pl.ds(start, BLOCK), head, part], raw.at[pl_ds(3, BLOCK)], ready)

        @pl.when(start == 0)
        def _first() -> None:
            plgpu.copy_gmem_to_smem(window.at[row, :, head, part], raw.at[pl_ds(0, 3)], ready)

        @pl.when(start > 0)
        def _later() -> None:
            plgpu.copy_gmem_to_smem(qkvz.at[row, pl.ds(start - 3, 3), head, part], raw.at[pl_ds(0, 3)], ready)


def relative_decay(gates: tuple, product: Product) -> jax.Array:
    """G_i - G_middle in base 2, [64, 128]: log decay of each token relative to the middle of its chunk."""
    i, j = iotas((BLOCK, BLOCK), PRODUCT)
    middle = i // CHUNK * CHUNK + CHUNK // 2 - 1
    same = i // CHUNK == j // CHUNK
    after, before = same & (j <= i) & (j > middle), same & (j > i) & (j <= middle)
    weights = jnp.where(after, 1.0, jnp.where(before, -1.0, 0.0)).astype(jnp.bfloat16)
    return product((BLOCK, CHANNELS), (weights, gates[0]), (weights, gates[1]))


def intra(
    qkvz: Float[Array, "B T H 4 D"],
    decay_logits: Float[Array, "B T H D"],
    beta_logits: Float[Array, "B T H"],
    weights: KdaWeights,
    window: Float[Array, "B 3 H 3 D"],
    length: Int32[Array, "B"],
    lower_bound: float,
    interpret: Any = None,
) -> Operands:
    """Operands of every chunk; T must be a multiple of 64. Chunks past a row's length are left unwritten."""
    rows, tokens, heads, _, channels = qkvz.shape

    product, view = (tensor_core_product, TileView) if interpret is None else (emulated_product, EmulatedTileView)

    def body(qkvz, decay, beta, conv, a_log, dt_bias, _norm, window, lengths, *refs: Any):
        query_out, pull_out, push_out, key_out, inverse_out, attention_out, total_out = refs[:7]
        query, key, columns, betas, first, second, third, fourth, ready = refs[7:]
        raw_query, gate_high = first
        raw_key, gate_low, (high, low) = second
        raw_value, solved, inverse = third
        taps, narrow = fourth
        row, head = lax.axis_index("rows"), lax.axis_index("heads")
        start = lax.axis_index("blocks") * BLOCK
        length = lengths[row] - start

        @pl.when(length > 0)
        def _block() -> None:
            fetch_raw(qkvz, window, (raw_query, raw_key, raw_value), ready, row, head, start)
            there = (row, head, pl.ds(start, BLOCK))
            plgpu.copy_gmem_to_smem(conv.at[:, head], taps, ready)
            plgpu.copy_gmem_to_smem(decay.at[row, pl.ds(start, BLOCK), head], columns, ready)
            beta_logits = plgpu.load(
                beta.at[row, pl.ds(start, BLOCK), head], layout=PRODUCT.reduce(1), optimized=False
            ).astype(jnp.float32)
            bias = plgpu.load(dt_bias.at[head], layout=COLUMN_LAYOUT.reduce(0), optimized=False)
            speed = jnp.exp(a_log[head])
            token = plgpu.broadcasted_iota(jnp.int32, (BLOCK,), 0, layout=PRODUCT.reduce(1))
            beta_rows = jnp.where(token < length, 0.5 + 0.5 * jnp.tanh(0.5 * beta_logits), 0.0)
            betas[...] = beta_rows
            plgpu.barrier_wait(ready)
            unit_rows(raw_query, taps, 0, channels**-0.5, length, query)
            unit_rows(raw_key, taps, 1, 1.0, length, key)
            plgpu.commit_smem()
            totals = total_out.at[row, head, pl.ds(start // TILE, BLOCK // TILE)]
            gate_rows(columns, speed, bias, lower_bound, length, (gate_high, gate_low), totals)
            plgpu.commit_smem()

            relative = relative_decay((gate_high, gate_low), product)
            rising, wide = jnp.exp2(relative), plgpu.load(key, layout=PRODUCT).astype(jnp.float32)
            columns[...] = (wide * jnp.exp2(-relative)).astype(columns.dtype)
            key[...] = (wide * (rising * over_rows(beta_rows, PRODUCT))).astype(key.dtype)
            query[...] = (plgpu.load(query, layout=PRODUCT).astype(jnp.float32) * rising).astype(query.dtype)
            plgpu.commit_smem()
            value_rows(raw_value, taps, betas, length, gate_high)
            plgpu.commit_smem()
            outputs = (query_out, pull_out, push_out, key_out)
            for source, target in zip((query, key, gate_high, columns), outputs):
                plgpu.copy_smem_to_gmem(source, target.at[there])

            i, j = iotas((BLOCK, BLOCK), PRODUCT)
            same = i // CHUNK == j // CHUNK
            attention = jnp.where(same & (j <= i), product((BLOCK, BLOCK), (query, columns.transpose((1, 0)))), 0.0)
            narrow[...] = own_columns(attention.astype(narrow.dtype))
            lower = jnp.where(same & (j < i), product((BLOCK, BLOCK), (key, columns.transpose((1, 0)))), 0.0)
            solved[pl_ds(0, BLOCK), :] = lower
            plgpu.commit_smem()
            solve_tiles(view(solved))
            plgpu.commit_smem()
            result = join_tiles(lower, solved, high, low, product)
            inverse[...] = own_columns(result.astype(inverse.dtype))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(narrow, attention_out.at[there])
            plgpu.copy_smem_to_gmem(inverse, inverse_out.at[there])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    wide = jax.ShapeDtypeStruct((rows, heads, tokens, channels), jnp.bfloat16)
    square = jax.ShapeDtypeStruct((rows, heads, tokens, CHUNK), jnp.bfloat16)
    total = jax.ShapeDtypeStruct((rows, heads, tokens // TILE, channels), jnp.float32)
    tile = plgpu.SMEM((BLOCK, channels), jnp.bfloat16, transforms=WIDE)
    raw = plgpu.SMEM((BLOCK + 3, channels), jnp.bfloat16)
    half = plgpu.SMEM((BLOCK, BLOCK), jnp.bfloat16, transforms=WIDE)
    blocks = plgpu.SMEM((BLOCK, CHUNK), jnp.bfloat16, transforms=NARROW)
    solved = plgpu.SMEM((BLOCK + 1, BLOCK), jnp.float32)
    outputs = plgpu.kernel(
        body,
        out_type=(wide, wide, wide, wide, square, square, total),
        # Heads side by side: they share the pages of memory that a block's tokens lie in.
        grid=(heads, tokens // BLOCK, rows),
        grid_names=("heads", "blocks", "rows"),
        scratch_types=(
            tile,
            tile,
            tile,
            plgpu.SMEM((BLOCK,), jnp.float32),
            plgpu.RefUnion(raw, tile),
            plgpu.RefUnion(raw, tile, (half, half)),
            plgpu.RefUnion(raw, solved, blocks),
            plgpu.RefUnion(plgpu.SMEM((4, 3, channels), jnp.float32), blocks),
            plgpu.Barrier(num_arrivals=8),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="kda_intra",
    )(qkvz, decay_logits, beta_logits, *weights, window, length)
    return Operands(*outputs)
