"""KDA prefill, first kernel: everything of a chunk that does not depend on the state.

Convolution, SiLU, norms and gates of 64 tokens of a head, which are two chunks of 32, then the chunks' operands for the
recurrence. Decays refer to the middle of the chunk: with g > -5 no exponent passes 16 * 5 = 80, which float32 and
bfloat16 can hold, so one scaling of the rows and one of the columns serve all products, and the recurrence takes the
very same operands. The decays come as a product of a matrix of -1, 0, 1 with the gates on the tensor cores, gates
split in two bfloat16 parts: every difference is summed directly, without cancellation. The triangular inverse is by
fp32 forward substitution over the whole chunk.

A block of threads holds two such pieces of 64 tokens side by side, two warpgroups each: sixteen warps to a
multiprocessor, no thread above 128 registers. Each side walks over pieces on its own, so that one computes while the
other waits for memory, and copies of a side's next piece start as soon as their buffers fall free. The two warpgroups
("parts") of a side share the tokens of the convolution and the gates, then the channels of the scaling; at the end one
inverts while the other makes the values.

No barriers are inserted around shared memory: `plgpu.commit_smem` stands before a buffer is overwritten that other
warps of the warpgroup may still read, and before one is read that they have written; `meet` where both parts exchange.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas.kda.mosaic_token import CHANNELS, KEY_EPS, MULTIPROCESSORS, pl_ds
from pallas.kda.types import KdaWeights

BLOCK, CHUNK, TILE, SIDES = 64, 32, 16, 2
HALF = CHANNELS // 2
LOG2_E = 1.4426950408889634
WIDE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
NARROW = (plgpu.TilingTransform((8, CHUNK)), plgpu.SwizzleTransform(64))
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


def convolve(raw: Any, taps: list[jax.Array], first: jax.Array) -> jax.Array:
    """SiLU of 16 convolved tokens, float32; `raw` starts 3 rows early. With x / 2 at hand that is one tanh."""
    half = None
    for tap, weight in enumerate(taps):
        rows = plgpu.load(raw.at[pl.ds(first + tap, TILE)], layout=RUN_LAYOUT, optimized=False)
        term = rows.astype(jnp.float32) * over_columns(weight, RUN_LAYOUT, (TILE, CHANNELS))
        half = term if half is None else half + term
    return half + half * jnp.tanh(half)


def over_tiles(tiles: int, start: jax.Array | int, body: Callable[[jax.Array], None]) -> None:
    """Runs `body(first token)` for some tiles from token `start` on.

    A loop, because straight-line code of this length starves the instruction cache.
    """

    def step(tile: jax.Array, _: None) -> None:
        body(start + tile * TILE)

    lax.fori_loop(0, tiles, step, None)


def unit_rows(raw: Any, taps: list[jax.Array], scale: float, length: jax.Array, target: Any, first: jax.Array) -> None:
    """16 convolved rows of q or k, normalised to length `scale`; zero from `length` on."""
    mixed = convolve(raw, taps, first)
    token = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=RUN_LAYOUT.reduce(1))
    factor = lax.rsqrt((mixed * mixed).sum(axis=1) + KEY_EPS) * scale
    factor = jnp.where(token < length - first, factor, 0.0)
    target[pl.ds(first, TILE), :] = (mixed * over_rows(factor, RUN_LAYOUT, (TILE, CHANNELS))).astype(target.dtype)


def value_rows(raw: Any, taps: list[jax.Array], betas: Any, first: jax.Array) -> None:
    """16 convolved rows of v times beta, in place: three rows on, so that the tiles go from the last to the first."""
    beta = plgpu.load(betas.at[pl.ds(first, TILE)], layout=RUN_LAYOUT.reduce(1), optimized=False)
    result = convolve(raw, taps, first) * over_rows(beta, RUN_LAYOUT, (TILE, CHANNELS))
    plgpu.commit_smem()
    raw[pl.ds(first + 3, TILE), :] = result.astype(raw.dtype)


def gate_rows(
    logits: Any, speed: jax.Array, bias: jax.Array, lower_bound: float, length: jax.Array, gates: tuple, totals: Any
) -> Callable[[jax.Array], None]:
    """For 16 tokens, log decays in base 2 in two parts and exp of their sum; zero decay from `length` on.

    `speed` is half of exp(a_log), `bias` is multiplied by it.
    """
    scale = 0.5 * lower_bound * LOG2_E

    def tile(first: jax.Array) -> None:
        rows = plgpu.load(logits.at[pl.ds(first, TILE)], layout=COLUMN_LAYOUT, optimized=False).astype(jnp.float32)
        decay = scale + scale * jnp.tanh(rows * speed + over_columns(bias, COLUMN_LAYOUT, (TILE, CHANNELS)))
        valid = iotas((TILE, CHANNELS), COLUMN_LAYOUT)[0] < length - first
        decay = jnp.where(valid, decay, 0.0)
        totals[first // TILE] = jnp.exp2(decay.sum(axis=0))
        for gate, half in zip(gates, halves(decay)):
            gate[pl.ds(first, TILE), :] = half

    return tile


def own_columns(blocks: jax.Array, shape: tuple[int, int] = (BLOCK, CHUNK)) -> jax.Array:
    """[64, 64], of which the two chunks' diagonal blocks count, as [64, 32]: a row keeps its own chunk's columns."""
    row, _ = iotas(shape, PRODUCT)
    return jnp.where(row < CHUNK, blocks[:, :CHUNK], blocks[:, CHUNK:])


def solve(solved: Any, side: jax.Array) -> None:
    """Overwrites the strictly lower L of a side's chunks, in a [2, 160, 32] buffer, by the rows of (I + L)^-1.

    Row i is e_i - sum_{j<i} L_ij row_j, in float32.
    """
    chunks = solved.reshape((SIDES, 5, CHUNK * CHUNK)).at[side, pl_ds(0, 2)]
    _, column = iotas((2, CHUNK), SOLVE_LAYOUT)
    done: list[jax.Array] = []
    for i in range(CHUNK):
        row = jnp.where(column == i, 1.0, 0.0)
        for j in range(i):
            entry = plgpu.load(chunks.at[:, CHUNK * i + j], layout=SOLVE_LAYOUT.reduce(1), optimized=False)
            row = row - over_rows(entry, SOLVE_LAYOUT, (2, CHUNK)) * done[j]
        done.append(row)
    plgpu.commit_smem()
    for i, row in enumerate(done):
        chunks[:, pl_ds(CHUNK * i, CHUNK)] = row


def emulated_solve(solved: Any, side: jax.Array) -> None:
    """`solve` for interpretation, which has no reshaped view of shared memory."""
    lower = solved[side, pl_ds(0, BLOCK), :].reshape(2, CHUNK, CHUNK)

    def substitute(i: jax.Array, inverse: jax.Array) -> jax.Array:
        own = inverse[:, i] - jnp.einsum("cj,cjk->ck", lower[:, i], inverse, precision="highest")
        return inverse.at[:, i].set(own)

    start = jnp.broadcast_to(jnp.eye(CHUNK, dtype=jnp.float32)[None], lower.shape)
    solved[side, pl_ds(0, BLOCK), :] = lax.fori_loop(1, CHUNK, substitute, start).reshape(BLOCK, CHUNK)


class Place(NamedTuple):
    """Where a piece of 64 tokens lies: from `start` on in line `line` of the arrays of tokens."""

    side: jax.Array
    row: jax.Array
    head: jax.Array
    line: jax.Array | int
    start: jax.Array
    is_first: jax.Array
    length: jax.Array
    """Valid tokens from there on; none beyond the last piece."""


class Packing(NamedTuple):
    """Rows one after another in one line of tokens, each from a multiple of 64 on."""

    start: Int32[Array, "R+1"]
    """Where each row starts, and the line's end."""
    row: Int32[Array, "T//64"]
    """The row of each block."""


def packing(start: Int32[Array, "R"], tokens: int) -> Packing:
    """The packing of rows that start at ascending multiples of 64, the first at 0."""
    blocks = jnp.arange(0, tokens, BLOCK, dtype=jnp.int32)
    row = jnp.sum(blocks[:, None] >= start[None], axis=1, dtype=jnp.int32) - 1
    return Packing(jnp.append(start, jnp.int32(tokens)), row)


def fetch_raw(qkvz: Any, window: Any, plane: int, raw: Any, ready: Any, at: Place) -> None:
    """Starts the copies of q, k or v of the block and of the three tokens before it (2 arrivals)."""
    plgpu.copy_gmem_to_smem(qkvz.at[at.line, pl.ds(at.start, BLOCK), at.head, plane], raw.at[pl_ds(3, BLOCK)], ready)

    @pl.when(at.is_first)
    def _first() -> None:
        plgpu.copy_gmem_to_smem(window.at[at.row, :, at.head, plane], raw.at[pl_ds(0, 3)], ready)

    @pl.when(jnp.logical_not(at.is_first))
    def _later() -> None:
        before = qkvz.at[at.line, pl.ds(at.start - 3, 3), at.head, plane]
        plgpu.copy_gmem_to_smem(before, raw.at[pl_ds(0, 3)], ready)


def clear_beyond(raw: Any, length: jax.Array) -> None:
    """Zeros for the rows of a last block that hold no tokens: whatever is there must not reach a product."""

    def clear(row: jax.Array, _: None) -> None:
        raw[row] = plgpu.layout_cast(jnp.zeros((CHANNELS,), raw.dtype), RUN_LAYOUT.reduce(0))

    @pl.when(length < BLOCK)
    def _last() -> None:
        lax.fori_loop(length + 3, BLOCK + 3, clear, None)
        plgpu.commit_smem()


def difference_matrix() -> np.ndarray:
    """[64, 64] of -1, 0, 1: times the log decays it gives each token's decay relative to the middle of its chunk."""
    i, j = np.arange(BLOCK)[:, None], np.arange(BLOCK)[None]
    middle, same = i // CHUNK * CHUNK + CHUNK // 2 - 1, i // CHUNK == j // CHUNK
    return (same & (j <= i) & (j > middle)).astype(np.float32) - (same & (j > i) & (j <= middle)).astype(np.float32)


def meet(barrier: Any) -> None:
    """Both warpgroups of a side have written what the other then reads."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def scale_channels(
    tiles: tuple, gates: tuple, differences: Any, beta_rows: jax.Array, columns: Any, product: Product
) -> None:
    """Scales half of the channels of q and k by the decays, in place, and writes k by the inverse decays."""
    query, key = tiles
    shape = (BLOCK, HALF)
    relative = product(shape, *((differences, gate) for gate in gates))
    rising, wide = jnp.exp2(relative), plgpu.load(key, layout=PRODUCT).astype(jnp.float32)
    columns[...] = (wide * jnp.exp2(-relative)).astype(columns.dtype)
    key[...] = (wide * (rising * over_rows(beta_rows, PRODUCT, shape))).astype(key.dtype)
    query[...] = (plgpu.load(query, layout=PRODUCT).astype(jnp.float32) * rising).astype(query.dtype)


def intra(
    qkvz: Float[Array, "B T H 4 D"],
    decay_logits: Float[Array, "B T H D"],
    beta_logits: Float[Array, "B T H"],
    weights: KdaWeights,
    window: Float[Array, "R 3 H 3 D"],
    length: Int32[Array, "R"],
    lower_bound: float,
    interpret: Any = None,
    packed: Packing | None = None,
) -> Operands:
    """Operands of every chunk; T must be a multiple of 64. Chunks past a row's length are left unwritten.

    B and R are both the number of rows; with `packed`, B is 1.
    """
    lines, tokens, heads, _, channels = qkvz.shape

    product, invert = (tensor_core_product, solve) if interpret is None else (emulated_product, emulated_solve)

    def body(qkvz, decay, beta, conv, a_log, dt_bias, _norm, window, lengths, signs, sides, *refs: Any):
        (starts, row_of), refs = (refs[:2], refs[2:]) if packed is not None else ((None, None), refs)
        query_out, pull_out, push_out, key_out, inverse_out, attention_out, total_out = refs[:7]
        queries, keys, columns, first, second, raw_values, third, betas = refs[7:15]
        (raw_queries, high), (raw_keys, low, solved), (differences, squares) = first, second, third
        raws, readies, met = (raw_queries, raw_keys, raw_values), refs[15:18], refs[18:]
        group = lax.axis_index("group")
        part = group % 2

        def place(turn: jax.Array) -> Place:
            # Read in every turn, so that no address that depends on it stays in a register from turn to turn.
            side = sides[group // 2]
            index = SIDES * (lax.axis_index("workers") + turn * workers) + side
            # Heads side by side: they share the pages of memory that a block's tokens lie in.
            head, rest = index % heads, index // heads
            if packed is None:
                row, start = jnp.minimum(rest // blocks, lines - 1), rest % blocks * BLOCK
                line, within = row, start
            else:
                block = jnp.minimum(rest, blocks - 1)
                row, line, start = row_of[block], 0, block * BLOCK
                within = start - starts[row]
            return Place(side, row, head, line, start, within == 0, jnp.where(index < pieces, lengths[row] - within, 0))

        def fetch(plane: int, at: Place) -> None:
            """Starts the copies of q or k, or with v those of the logits and the signs as well."""

            @pl.when((at.length > 0) & (part == plane % 2))
            def _fetch() -> None:
                ready = readies[plane].at[at.side]
                fetch_raw(qkvz, window, plane, raws[plane].at[at.side], ready, at)
                if plane == 2:
                    logits = decay.at[at.line, pl.ds(at.start, BLOCK), at.head]
                    plgpu.copy_gmem_to_smem(logits, columns.at[at.side], ready)
                    plgpu.copy_gmem_to_smem(signs, differences.at[at.side], ready)

        def block(turn: jax.Array, _: None) -> None:
            here = place(turn)
            pl.when(here.length > 0)(lambda: work(turn, here))

            @pl.when(here.length <= 0)
            def _idle() -> None:
                for plane in range(3):
                    fetch(plane, place(turn + 1))

        def work(turn: jax.Array, here: Place) -> None:
            side, _, head, line, start, _, length = here
            query, key, column, beta_buffer = (x.at[side] for x in (queries, keys, columns, betas))
            raw = [x.at[side] for x in raws]
            meeting = [x.at[side] for x in met]
            there = (line, head, pl.ds(start, BLOCK))
            taps = [load_taps(conv, head, plane) for plane in range(2)]
            beta_logits = plgpu.load(
                beta.at[line, pl.ds(start, BLOCK), head], layout=PRODUCT.reduce(1), optimized=False
            ).astype(jnp.float32)
            speed = 0.5 * jnp.exp(a_log[head])
            bias = plgpu.load(dt_bias.at[head], layout=COLUMN_LAYOUT.reduce(0), optimized=False) * speed
            token = plgpu.broadcasted_iota(jnp.int32, (BLOCK,), 0, layout=PRODUCT.reduce(1))
            beta_rows = jnp.where(token < length, 0.5 + 0.5 * jnp.tanh(0.5 * beta_logits), 0.0)
            own, few = part * (BLOCK // 2), BLOCK // TILE // 2
            for plane, (scale, target) in enumerate(((channels**-0.5, query), (1.0, key))):
                plgpu.barrier_wait(readies[plane].at[side])
                clear_beyond(raw[plane], length)
                convolved = functools.partial(unit_rows, raw[plane], taps[plane], scale, length, target)
                over_tiles(few, own, convolved)
            plgpu.barrier_wait(readies[2].at[side])
            pl.when(part == 0)(lambda: clear_beyond(raw[2], length))
            meet(meeting[0])
            totals = total_out.at[line, head, pl.ds(start // TILE, BLOCK // TILE)]
            gates = high.at[side, pl_ds(0, BLOCK)], low.at[side, pl_ds(0, BLOCK)]
            over_tiles(few, own, gate_rows(column, speed, bias, lower_bound, length, gates, totals))
            meet(meeting[1])
            half = (slice(None), pl.ds(part * HALF, HALF))
            scale_channels(
                (query.at[half], key.at[half]),
                tuple(gate.at[half] for gate in gates),
                differences.at[side],
                beta_rows,
                column.at[half],
                product,
            )
            meet(meeting[2])
            i, j = iotas((BLOCK, CHUNK), PRODUCT)
            i = i % CHUNK

            @pl.when(part == 0)
            def _values() -> None:
                fetch(0, place(turn + 1))
                for source, target in zip((query, key, column), (query_out, pull_out, key_out)):
                    plgpu.copy_smem_to_gmem(source, target.at[there])
                attention = own_columns(product((BLOCK, BLOCK), (query, column.transpose((1, 0)))))
                square = squares.at[side, pl_ds(0, BLOCK)]
                square[...] = jnp.where(j <= i, attention, 0.0).astype(square.dtype)
                beta_buffer[...] = beta_rows
                value_taps = load_taps(conv, head, 2)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(square, attention_out.at[there])
                last = BLOCK - TILE
                over_tiles(2 * few, 0, lambda at: value_rows(raw[2], value_taps, beta_buffer, last - at))
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(raw[2].at[pl_ds(3, BLOCK)], push_out.at[there])

            @pl.when(part == 1)
            def _inverse() -> None:
                lower = own_columns(product((BLOCK, BLOCK), (key, column.transpose((1, 0)))))
                solved[side, pl_ds(0, BLOCK), :] = jnp.where(j < i, lower, 0.0)
                plgpu.commit_smem()
                invert(solved, side)
                plgpu.commit_smem()
                square = squares.at[side, pl_ds(BLOCK, BLOCK)]
                inverse = plgpu.load(solved.at[side, pl_ds(0, BLOCK)], layout=PRODUCT, optimized=False)
                square[...] = inverse.astype(square.dtype)
                plgpu.commit_smem()
                fetch(1, place(turn + 1))
                plgpu.copy_smem_to_gmem(square, inverse_out.at[there])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            meet(meeting[3])
            fetch(2, place(turn + 1))

        for plane in range(3):
            fetch(plane, place(jnp.int32(0)))
        lax.fori_loop(0, -(-pieces // (SIDES * workers)), block, None)

    blocks = tokens // BLOCK
    pieces = lines * heads * blocks
    workers = min(MULTIPROCESSORS, -(-pieces // SIDES))
    wide = jax.ShapeDtypeStruct((lines, heads, tokens, channels), jnp.bfloat16)
    square = jax.ShapeDtypeStruct((lines, heads, tokens, CHUNK), jnp.bfloat16)
    total = jax.ShapeDtypeStruct((lines, heads, tokens // TILE, channels), jnp.float32)
    tile = plgpu.SMEM((SIDES, BLOCK, channels), jnp.bfloat16, transforms=WIDE)

    def raw(padded: int) -> Any:
        return plgpu.SMEM((SIDES, padded, channels), jnp.bfloat16)

    def gate(padded: int) -> Any:
        return plgpu.SMEM((SIDES, padded, channels), jnp.bfloat16, transforms=WIDE)

    outputs = plgpu.kernel(
        body,
        out_type=(wide, wide, wide, wide, square, square, total),
        grid=(workers,),
        grid_names=("workers",),
        num_threads=2 * SIDES,
        thread_name="group",
        scratch_types=(
            tile,
            tile,
            tile,
            plgpu.RefUnion(raw(FEW), gate(FEW)),
            plgpu.RefUnion(raw(MANY), gate(MANY), plgpu.SMEM((SIDES, 2 * MANY, CHUNK), jnp.float32)),
            raw(BLOCK + 3),
            plgpu.RefUnion(
                plgpu.SMEM((SIDES, BLOCK, BLOCK), jnp.bfloat16, transforms=WIDE),
                plgpu.SMEM((SIDES, 2 * BLOCK, CHUNK), jnp.bfloat16, transforms=NARROW),
            ),
            plgpu.SMEM((SIDES, BLOCK), jnp.float32),
            *(plgpu.Barrier(num_arrivals=count, num_barriers=SIDES) for count in (2, 2, 4)),
            *(plgpu.Barrier(num_arrivals=2, num_barriers=SIDES) for _ in range(4)),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="kda_intra",
    )(
        qkvz,
        decay_logits,
        beta_logits,
        *weights,
        window,
        length,
        jnp.asarray(difference_matrix(), jnp.bfloat16),
        jnp.arange(2, dtype=jnp.int32),
        *(() if packed is None else packed),
    )
    return Operands(*outputs)
