"""KDA prefill, first kernel: everything of a chunk that does not depend on the state (`mosaic_chunk` has the steps).

A block of threads holds two pieces of 64 tokens side by side, two warpgroups each: sixteen warps to a multiprocessor,
no thread above 128 registers. Each side walks over pieces on its own, so that one computes while the other waits for
memory, and copies of a side's next piece start as soon as their buffers fall free. The two warpgroups ("parts") of a
side share the tokens of the convolution and the gates, then the channels of the scaling; at the end one inverts while
the other makes the values. They `meet` where both exchange data.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas.kda.mosaic_chunk import (
    BLOCK,
    CHUNK,
    COLUMN_LAYOUT,
    EMULATED,
    FEW,
    HALF,
    MANY,
    NARROW,
    ON_GPU,
    PADDED,
    PRODUCT,
    RUN_LAYOUT,
    SIDES,
    TILE,
    Backend,
    difference_matrix,
    gate_rows,
    iotas,
    load_taps,
    over_tiles,
    own_columns,
    scale_channels,
    unit_rows,
    value_rows,
)
from pallas.kda.mosaic_token import CHANNELS, MULTIPROCESSORS, pl_ds
from pallas.kda.types import KdaWeights
from pallas.layouts import WIDE

HALF_TILES = BLOCK // TILE // 2
"""Tiles of 16 tokens in a part's half of a piece."""


class Operands(NamedTuple):
    """Per-chunk operands of the recurrence, [B, H, T, ...], with M the cumulative decay at the middle of the chunk.

    query q exp(G - M), push beta v, key k exp(M - G), inverse (I + L)^-1 and attention A with the columns of the
    token's own chunk, pull -(I + L)^-1 beta k exp(G - M), total exp of the decay over each half chunk.
    """

    query: jax.Array
    pull: jax.Array
    push: jax.Array
    key: jax.Array
    inverse: jax.Array
    attention: jax.Array
    total: jax.Array


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

    @property
    def there(self) -> tuple:
        """Its place in the operands."""
        return self.line, self.head, pl.ds(self.start, BLOCK)


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


def meet(barrier: Any) -> None:
    """Both warpgroups of a side have written what the other then reads."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


@dataclasses.dataclass(frozen=True)
class Walk:
    """A warpgroup's way over pieces: arrays in device memory, its block's buffers, barriers that both parts meet at."""

    on: Backend
    lower_bound: float
    blocks: int
    workers: int
    packed: tuple[Any, Any] | None
    qkvz: Any
    decay: Any
    beta: Any
    conv: Any
    a_log: Any
    dt_bias: Any
    window: Any
    lengths: Any
    signs: Any
    sides: Any
    out: Operands
    queries: Any
    keys: Any
    columns: Any
    raws: tuple[Any, Any, Any]
    high: Any
    low: Any
    solved: Any
    differences: Any
    squares: Any
    betas: Any
    readies: tuple[Any, ...]
    met: tuple[Any, ...]
    group: jax.Array
    part: jax.Array

    @property
    def pieces(self) -> int:
        """Pieces of all lines."""
        lines, _, heads = self.qkvz.shape[:3]
        return lines * heads * self.blocks

    def place(self, turn: jax.Array) -> Place:
        """Where the turn's piece lies."""
        lines, _, heads = self.qkvz.shape[:3]
        # Read in every turn, so that no address that depends on it stays in a register from turn to turn.
        side = self.sides[self.group // 2]
        index = SIDES * (lax.axis_index("workers") + turn * self.workers) + side
        # Heads side by side: they share the pages of memory that a block's tokens lie in.
        head, rest = index % heads, index // heads
        if self.packed is None:
            row, start = jnp.minimum(rest // self.blocks, lines - 1), rest % self.blocks * BLOCK
            line, within = row, start
        else:
            starts, row_of = self.packed
            block = jnp.minimum(rest, self.blocks - 1)
            row, line, start = row_of[block], 0, block * BLOCK
            within = start - starts[row]
        is_first = within == 0
        length = jnp.where(index < self.pieces, self.lengths[row] - within, 0)
        return Place(side, row, head, line, start, is_first, length)

    def fetch(self, plane: int, at: Place) -> None:
        """Starts the copies of q or k, or with v those of the logits and the signs as well."""

        @pl.when((at.length > 0) & (self.part == plane % 2))
        def _fetch() -> None:
            ready = self.readies[plane].at[at.side]
            fetch_raw(self.qkvz, self.window, plane, self.raws[plane].at[at.side], ready, at)
            if plane == 2:
                logits = self.decay.at[at.line, pl.ds(at.start, BLOCK), at.head]
                plgpu.copy_gmem_to_smem(logits, self.columns.at[at.side], ready)
                plgpu.copy_gmem_to_smem(self.signs, self.differences.at[at.side], ready)

    def parameters(self, at: Place) -> tuple:
        """What a piece reads straight into registers: taps of q and k, beta, speed and bias of the decays."""
        taps = [load_taps(self.conv, at.head, plane) for plane in range(2)]
        tokens = self.beta.at[at.line, pl.ds(at.start, BLOCK), at.head]
        logits = plgpu.load(tokens, layout=PRODUCT.reduce(1), optimized=False).astype(jnp.float32)
        speed = 0.5 * jnp.exp(self.a_log[at.head])
        bias = plgpu.load(self.dt_bias.at[at.head], layout=COLUMN_LAYOUT.reduce(0), optimized=False) * speed
        token = plgpu.broadcasted_iota(jnp.int32, (BLOCK,), 0, layout=PRODUCT.reduce(1))
        beta_rows = jnp.where(token < at.length, 0.5 + 0.5 * jnp.tanh(0.5 * logits), 0.0)
        return taps, beta_rows, speed, bias

    def run(self) -> None:
        """All pieces of this warpgroup's side."""
        for plane in range(3):
            self.fetch(plane, self.place(jnp.int32(0)))
        lax.fori_loop(0, -(-self.pieces // (SIDES * self.workers)), self.block, None)

    def block(self, turn: jax.Array, _: None) -> None:
        """A turn, in which there may be no piece."""
        here = self.place(turn)
        pl.when(here.length > 0)(lambda: self.work(turn, here))

        @pl.when(here.length <= 0)
        def _idle() -> None:
            for plane in range(3):
                self.fetch(plane, self.place(turn + 1))

    def work(self, turn: jax.Array, here: Place) -> None:
        """All operands of a piece."""
        query, key, column = (x.at[here.side] for x in (self.queries, self.keys, self.columns))
        meeting = [x.at[here.side] for x in self.met]
        taps, beta_rows, speed, bias = self.parameters(here)
        own = self.part * (BLOCK // 2)
        self.normalise(here, own, taps, (query, key))
        self.receive_values(here)
        meet(meeting[0])
        gates = self.gate(here, own, column, speed, bias)
        meet(meeting[1])
        self.scale(here, (query, key, column), gates, beta_rows)
        meet(meeting[2])
        i, j = iotas((BLOCK, CHUNK), PRODUCT)
        places = i % CHUNK, j
        pl.when(self.part == 0)(lambda: self.values(turn, here, (query, column), places, beta_rows))
        pl.when(self.part == 1)(lambda: self.inverse(turn, here, (key, column), places))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        meet(meeting[3])
        self.fetch(2, self.place(turn + 1))

    def normalise(self, here: Place, own: jax.Array, taps: list[list[jax.Array]], targets: tuple[Any, Any]) -> None:
        """Convolved unit rows of q and k for this part's half of the tokens."""
        raws = tuple(self.raws[plane].at[here.side] for plane in range(2))
        for plane in range(2):
            plgpu.barrier_wait(self.readies[plane].at[here.side])
            clear_beyond(raws[plane], here.length)
        over_tiles(HALF_TILES, own, lambda first: unit_rows(raws, taps, targets, first, self.on))

    def receive_values(self, here: Place) -> None:
        """Waits for v, the logits and the signs."""
        plgpu.barrier_wait(self.readies[2].at[here.side])
        pl.when(self.part == 0)(lambda: clear_beyond(self.raws[2].at[here.side], here.length))

    def gate(self, here: Place, own: jax.Array, logits: Any, speed: jax.Array, bias: jax.Array) -> tuple[Any, Any]:
        """Log decays of this part's tokens, where both parts' then lie."""
        totals = self.out.total.at[here.line, here.head, pl.ds(here.start // TILE, BLOCK // TILE)]
        gates = self.high.at[here.side, pl_ds(0, BLOCK)], self.low.at[here.side, pl_ds(0, BLOCK)]
        scales = (speed, bias, self.lower_bound)
        over_tiles(HALF_TILES, own, gate_rows(logits, *scales, here.length, gates, totals, self.on.widen))
        return gates

    def scale(self, here: Place, tiles: tuple[Any, Any, Any], gates: tuple[Any, Any], beta_rows: jax.Array) -> None:
        """Scales this part's half of the channels of (query, key, column) by the decays."""
        half = (slice(None), pl.ds(self.part * HALF, HALF))
        query, key, column = (x.at[half] for x in tiles)
        gates = tuple(gate.at[half] for gate in gates)
        signs, on = self.differences.at[here.side], self.on
        scale_channels((query, key), gates, signs, beta_rows, column, on.product, on.widen)

    def values(
        self,
        turn: jax.Array,
        here: Place,
        tiles: tuple[Any, Any],
        places: tuple[jax.Array, jax.Array],
        beta_rows: jax.Array,
    ) -> None:
        """Stores query, key and attention, then makes push."""
        side, there = here.side, here.there
        (query, column), (i, j) = tiles, places
        raw, betas = self.raws[2].at[side], self.betas.at[side]
        self.fetch(0, self.place(turn + 1))
        for source, target in ((query, self.out.query), (column, self.out.key)):
            plgpu.copy_smem_to_gmem(source, target.at[there])
        taps = load_taps(self.conv, here.head, 2)
        attention = own_columns(self.on.product((BLOCK, BLOCK), (query, column.transpose((1, 0)))))
        square = self.squares.at[side, pl_ds(0, BLOCK)]
        square[...] = jnp.where(j <= i, attention, 0.0).astype(square.dtype)
        betas[...] = beta_rows
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(square, self.out.attention.at[there])
        last = BLOCK - TILE
        over_tiles(2 * HALF_TILES, 0, lambda at: value_rows(raw, taps, betas, last - at, self.on.widen))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(raw.at[pl_ds(3, BLOCK)], self.out.push.at[there])

    def inverse(
        self, turn: jax.Array, here: Place, tiles: tuple[Any, Any], places: tuple[jax.Array, jax.Array]
    ) -> None:
        """Inverts, and stores the inverse and pull."""
        side, there = here.side, here.there
        (key, column), (i, j) = tiles, places
        solved = self.solved.at[side, pl_ds(0, BLOCK), pl_ds(0, CHUNK)]
        lower = own_columns(self.on.product((BLOCK, BLOCK), (key, column.transpose((1, 0)))))
        solved[...] = jnp.where(j < i, lower, 0.0)
        plgpu.commit_smem()
        self.on.invert(self.solved, side)
        plgpu.commit_smem()
        square = self.squares.at[side, pl_ds(BLOCK, BLOCK)]
        inverse = plgpu.load(solved, layout=PRODUCT, optimized=False)
        square[...] = inverse.astype(square.dtype)
        pull = self.on.pull(inverse, key)
        plgpu.commit_smem()
        self.fetch(1, self.place(turn + 1))
        plgpu.copy_smem_to_gmem(square, self.out.inverse.at[there])
        key[...] = pull.astype(key.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(key, self.out.pull.at[there])


def buffers() -> tuple[Any, ...]:
    """Shared memory and barriers of a block, in the order in which `intra` names them."""

    def raw(padded: int) -> Any:
        return plgpu.SMEM((SIDES, padded, CHANNELS), jnp.bfloat16)

    def gate(padded: int) -> Any:
        return plgpu.SMEM((SIDES, padded, CHANNELS), jnp.bfloat16, transforms=WIDE)

    tile = gate(BLOCK)
    return (
        tile,
        tile,
        tile,
        plgpu.RefUnion(raw(FEW), gate(FEW)),
        plgpu.RefUnion(raw(MANY), gate(MANY), plgpu.SMEM((SIDES, 4 * CHUNK, PADDED), jnp.float32)),
        raw(BLOCK + 3),
        plgpu.RefUnion(
            plgpu.SMEM((SIDES, BLOCK, BLOCK), jnp.bfloat16, transforms=WIDE),
            plgpu.SMEM((SIDES, 2 * BLOCK, CHUNK), jnp.bfloat16, transforms=NARROW),
        ),
        plgpu.SMEM((SIDES, BLOCK), jnp.float32),
        *(plgpu.Barrier(num_arrivals=count, num_barriers=SIDES) for count in (2, 2, 4)),
        *(plgpu.Barrier(num_arrivals=2, num_barriers=SIDES) for _ in range(4)),
    )


def operand_shapes(lines: int, heads: int, tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What the kernel writes."""
    wide = jax.ShapeDtypeStruct((lines, heads, tokens, CHANNELS), jnp.bfloat16)
    square = jax.ShapeDtypeStruct((lines, heads, tokens, CHUNK), jnp.bfloat16)
    total = jax.ShapeDtypeStruct((lines, heads, tokens // TILE, CHANNELS), jnp.float32)
    return (wide, wide, wide, wide, square, square, total)


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
    lines, tokens, heads = qkvz.shape[:3]
    blocks = tokens // BLOCK
    workers = min(MULTIPROCESSORS, -(-lines * heads * blocks // SIDES))
    sizes = (ON_GPU if interpret is None else EMULATED, lower_bound, blocks, workers)

    def body(qkvz, decay, beta, conv, a_log, dt_bias, _norm, window, lengths, signs, sides, *refs: Any):
        rows, refs = (refs[:2], refs[2:]) if packed is not None else (None, refs)
        out, (queries, keys, columns, first, second, raw_values, third, betas) = Operands(*refs[:7]), refs[7:15]
        (raw_queries, high), (raw_keys, low, solved), (differences, squares) = first, second, third
        arrays = (qkvz, decay, beta, conv, a_log, dt_bias, window, lengths, signs, sides)
        tiles = (queries, keys, columns, (raw_queries, raw_keys, raw_values), high, low, solved, differences, squares)
        group = lax.axis_index("group")
        Walk(*sizes, rows, *arrays, out, *tiles, betas, refs[15:18], refs[18:], group, group % 2).run()

    outputs = plgpu.kernel(
        body,
        out_type=operand_shapes(lines, heads, tokens),
        grid=(workers,),
        grid_names=("workers",),
        num_threads=2 * SIDES,
        thread_name="group",
        scratch_types=buffers(),
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
