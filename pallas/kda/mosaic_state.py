"""KDA prefill, second kernel: the recurrence over chunks, one block per (row, head).

Two warpgroups hold half of the values each of the transposed state [value, key] in float32 registers for the whole
sequence; it is the left operand of every product, rounded to bfloat16, so it never touches memory. Two more
warpgroups take turns at starting the bulk copies of later chunks and turning the readings of earlier ones into
outputs. No barriers are inserted around shared memory here: what passes between warpgroups passes under the explicit
ones. Per chunk, with M the decay at its middle, E its end, and operands as `mosaic_intra.Operands` describes them:

    S' = S exp(M)                        u = push inverse^T + S' pull^T
    o = S' query^T + u attention^T       S = (S' + u key) exp(E - M)
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas.dispatch import warps_multiply
from pallas.kda import mosaic_warp
from pallas.kda.mosaic_chunk import (
    BLOCK,
    CHUNK,
    NARROW,
    PRODUCT,
    Widen,
    over_columns,
    over_rows,
)
from pallas.kda.mosaic_intra import Operands, Packing
from pallas.kda.mosaic_token import CHANNELS, pl_ds
from pallas.kda.mosaic_widen import emulated_widen, widen
from pallas.layouts import WIDE

SIDE = CHANNELS // 2
STAGES = 4
COPIES = 8
COMPUTE_REGISTERS, SERVICE_REGISTERS = 176, 80
OUTPUT_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((8, CHANNELS), (2, CHANNELS), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
"""[32, 128]: two tokens per warp and step, eight channels, which are 16 bytes, a lane."""


def advance(
    state: jax.Array, stage: tuple, decay: Callable[[int], jax.Array], meanwhile: Callable[[], None]
) -> tuple[jax.Array, jax.Array]:
    """One chunk of half of the values: (state after it, readings [64, 32]).

    `decay(part)` spreads the decay of a half chunk over the state; `meanwhile` runs while the first products are
    under way. What the next chunk waits for is issued before what only the readings need. Without a query the
    readings are arbitrary.
    """
    if warps_multiply():
        return mosaic_warp.advance(state, stage, decay, meanwhile)
    query, pull, push, key, inverse, attention = stage

    def run(write: Any, reading: Any, after: Any) -> tuple[jax.Array, jax.Array]:
        plgpu.wgmma(write, push.transpose((1, 0)), inverse.transpose((1, 0)))
        middle = state * decay(0)
        operand = middle.astype(jnp.bfloat16)
        after[...] = middle
        plgpu.wgmma(write, operand, pull.transpose((1, 0)))
        meanwhile()
        written = plgpu.wgmma_accumulator_load(write, wait_n=0).astype(jnp.bfloat16)
        plgpu.wgmma(after, written, key)
        if query is not None:
            plgpu.wgmma(reading, operand, query.transpose((1, 0)))
            plgpu.wgmma(reading, written, attention.transpose((1, 0)))
        following = plgpu.wgmma_accumulator_load(after, wait_n=0 if query is None else 2) * decay(1)
        return following, plgpu.wgmma_accumulator_load(reading, wait_n=0)

    narrow = plgpu.ACC((SIDE, CHUNK), jnp.float32)
    return pl.run_scoped(run, narrow, narrow, plgpu.ACC((SIDE, CHANNELS), jnp.float32))


def emulated_advance(
    state: jax.Array, stage: tuple, decay: Callable[[int], jax.Array], meanwhile: Callable[[], None]
) -> tuple[jax.Array, jax.Array]:
    """`advance` for interpretation on a CPU, where a product cannot take its left operand from registers."""
    query, pull, push, key, inverse, attention = (None if x is None else x[...] for x in stage)
    dot = lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32)  # noqa: E731
    meanwhile()
    state = state * decay(0)
    operand = state.astype(jnp.bfloat16)
    written = (dot(push.T, inverse.T) + dot(operand, pull.T)).astype(jnp.bfloat16)
    after = (state + dot(written, key)) * decay(1)
    if query is None:
        return after, jnp.zeros_like(written, jnp.float32)
    return after, dot(operand, query.T) + dot(written, attention.T)


def fetch_chunk(
    operands: tuple, stage: tuple, ready: Any, row: jax.Array | int, head: jax.Array, chunk: jax.Array
) -> None:
    """Starts the copies of a chunk's operands (`COPIES` arrivals)."""
    query, pull, push, key, inverse, attention, total = operands
    tokens = pl.ds(chunk * CHUNK, CHUNK)
    for source, target in zip(
        (query, pull, key, inverse, attention), (stage[0], stage[1], stage[3], stage[4], stage[5])
    ):
        plgpu.copy_gmem_to_smem(source.at[row, head, tokens], target, ready)
    for side in range(2):
        plgpu.copy_gmem_to_smem(push.at[row, head, tokens, pl_ds(SIDE * side, SIDE)], stage[2].at[side], ready)
    plgpu.copy_gmem_to_smem(total.at[row, head, pl.ds(2 * chunk, 2)], stage[6], ready)


def half_chunk_decay(totals: Any, slot: jax.Array) -> Callable[[int], jax.Array]:
    """`advance`'s decay from the totals of the chunk in a buffer of [stages, 2, 128]."""

    def decay(part: int) -> jax.Array:
        total = plgpu.load(totals.at[slot, part], layout=PRODUCT.reduce(0), optimized=False)
        return over_columns(total, PRODUCT, (SIDE, CHANNELS))

    return decay


def segment_chunks(tokens: int, segments: int) -> int:
    """Chunks of a segment: whole blocks, the last segment may be shorter or empty."""
    blocks = tokens // BLOCK
    return -(-blocks // segments) * (BLOCK // CHUNK)


def gated_output(reading: jax.Array, gate: jax.Array, norm: jax.Array, eps: float, widened: Widen) -> jax.Array:
    """RMSNorm over the values [32, 128] times sigmoid of the gate, float32."""
    shape = (CHUNK, CHANNELS)
    wide = widened(reading, OUTPUT_LAYOUT)
    scale = over_rows(lax.rsqrt((wide * wide).sum(axis=1) / CHANNELS + eps) * 0.5, OUTPUT_LAYOUT, shape)
    # sigmoid(z) = (1 + tanh(z / 2)) / 2, the last half being in `scale`.
    opened = jnp.tanh(0.5 * widened(gate, OUTPUT_LAYOUT))
    normed = wide * scale * over_columns(norm, OUTPUT_LAYOUT, shape)
    return normed + normed * opened


class Stage(NamedTuple):
    """A chunk's operands in shared memory, as `mosaic_intra.Operands`, or the ring of several."""

    query: Any
    pull: Any
    push: Any
    key: Any
    inverse: Any
    attention: Any
    total: Any


@dataclasses.dataclass(frozen=True)
class Segment:
    """A segment of a sequence in its block of threads: where it lies, arrays in device memory, buffers, barriers."""

    step: Callable
    widen: Widen
    norm_eps: float
    most: int
    sources: Operands
    qkvz: Any
    norm: Any
    state_in: Any
    output: Any
    state_out: Any
    captured: Any
    ring: Stage
    readings: Any
    full: Any
    read: Any
    drained: Any
    head: jax.Array
    row: jax.Array
    segment: jax.Array
    line: jax.Array | int
    origin: jax.Array
    """Chunk of the line with which the segment starts."""
    until: jax.Array
    """Chunks from there to the end of the row's place in the line."""
    length: jax.Array
    first: jax.Array
    """Chunk of the row with which the segment starts."""
    total_chunks: jax.Array
    chunks: jax.Array
    is_last: jax.Array
    homes: list[jax.Array]

    def compute(self, group: jax.Array, blank: jax.Array) -> None:
        """A computing warpgroup's work: half of the values."""
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        values = pl.ds(group * SIDE, SIDE)

        def loop(chunk: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            state, last = carry
            slot = chunk % STAGES
            self.capture(values, state, lambda at: at == self.first + chunk)
            plgpu.barrier_wait(self.full.at[slot])
            stage = (x.at[slot, group] if x is self.ring.push else x.at[slot] for x in self.ring[:-1])
            publish = lambda: self.publish(values, chunk - 1, last)  # noqa: E731
            state, reading = self.step(state, tuple(stage), half_chunk_decay(self.ring.total, slot), publish)
            return state, plgpu.layout_cast(reading.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)

        place = self.row, self.segment, self.head, values
        initial = plgpu.load(self.state_in.at[place], layout=PRODUCT, optimized=False)
        final, reading = lax.fori_loop(0, self.chunks, loop, (initial, blank))
        self.publish(values, self.chunks - 1, reading)
        for last in (2, 1):
            pl.when(self.chunks >= last)(lambda: plgpu.barrier_wait(self.drained.at[(self.chunks - last) % 2]))
        self.capture(values, final, lambda at: self.is_last & (at >= self.total_chunks))

        @pl.when(self.is_last)
        def _finish() -> None:
            self.state_out[self.row, self.head, values] = final

    def capture(self, values: Any, state: jax.Array, wanted: Callable[[jax.Array], jax.Array]) -> None:
        """Stores the state for the boundaries that want it."""
        for index, home in enumerate(self.homes):

            @pl.when(wanted(home))
            def _store() -> None:
                self.captured[self.row, index, self.head, values] = state

    def publish(self, values: Any, chunk: jax.Array, reading: jax.Array) -> None:
        """Hands a chunk's readings over, once those of the chunk before the last are drained."""
        buffer = chunk % 2

        @pl.when(chunk >= 2)
        def _reuse() -> None:
            plgpu.barrier_wait(self.drained.at[buffer])

        @pl.when(chunk >= 0)
        def _hand_over() -> None:
            self.readings.at[buffer, :, values].transpose((1, 0))[...] = reading
            plgpu.barrier_arrive(self.read.at[buffer])

    def fetch(self, chunk: jax.Array) -> None:
        """Starts the copies of a chunk."""
        slot = chunk % STAGES
        stage = Stage(*(x.at[slot] for x in self.ring))
        fetch_chunk(self.sources, stage, self.full.at[slot], self.line, self.head, self.origin + chunk)

    def serve(self, group: jax.Array) -> None:
        """A serving warpgroup's work: the copies for, and the outputs of, even or odd chunks."""
        plgpu.set_max_registers(SERVICE_REGISTERS, action="decrease")
        parity = group - 2
        for chunk in range(STAGES):
            pl.when((parity == 0) & (chunk < self.chunks))(lambda: self.fetch(jnp.int32(chunk)))
        weight = plgpu.load(self.norm, layout=OUTPUT_LAYOUT.reduce(0), optimized=False)
        token = plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHANNELS), 0, layout=OUTPUT_LAYOUT)

        def clear(turn: jax.Array, _: None) -> None:
            there = pl.ds((self.origin + 2 * turn + parity) * CHUNK, CHUNK)
            zeros = jnp.zeros((CHUNK, CHANNELS), jnp.bfloat16)
            self.output[self.line, there, self.head] = plgpu.layout_cast(zeros, OUTPUT_LAYOUT)

        turns = (self.chunks + 1 - parity) // 2
        lax.fori_loop(0, turns, lambda turn, _: self.put_out(turn, parity, weight, token), None)
        lax.fori_loop(turns, jnp.minimum(self.most, self.until) // 2, clear, None)

    def put_out(self, turn: jax.Array, parity: jax.Array, weight: jax.Array, token: jax.Array) -> None:
        """A chunk's outputs from its readings, and the copies of the one that takes its place."""
        chunk = 2 * turn + parity
        there = pl.ds((self.origin + chunk) * CHUNK, CHUNK)
        gate = plgpu.load(self.qkvz.at[self.line, there, self.head, 3], layout=OUTPUT_LAYOUT, optimized=False)
        plgpu.barrier_wait(self.read.at[parity])
        pl.when(chunk + STAGES < self.chunks)(lambda: self.fetch(chunk + STAGES))
        reading = plgpu.load(self.readings.at[parity], layout=OUTPUT_LAYOUT, optimized=False)
        plgpu.barrier_arrive(self.drained.at[parity])
        result = gated_output(reading, gate, weight, self.norm_eps, self.widen)
        valid = self.length - (self.first + chunk) * CHUNK
        masked = lambda x: jnp.where(token < valid, x, 0.0)  # noqa: E731
        result = lax.cond(valid < CHUNK, masked, lambda x: x, result)
        self.output[self.line, there, self.head] = result.astype(jnp.bfloat16)


def buffers() -> tuple[Any, ...]:
    """Shared memory and barriers of a block: the ring's, then readings, full, read, drained."""
    tile = plgpu.SMEM((STAGES, CHUNK, CHANNELS), jnp.bfloat16, transforms=WIDE)
    square = plgpu.SMEM((STAGES, CHUNK, CHUNK), jnp.bfloat16, transforms=NARROW)
    return (
        tile,
        tile,
        plgpu.SMEM((STAGES, 2, CHUNK, SIDE), jnp.bfloat16, transforms=NARROW),
        plgpu.SMEM((STAGES, CHUNK, CHANNELS), jnp.bfloat16, transforms=NARROW),
        square,
        square,
        plgpu.SMEM((STAGES, 2, CHANNELS), jnp.float32),
        plgpu.SMEM((2, CHUNK, CHANNELS), jnp.bfloat16, transforms=WIDE),
        plgpu.Barrier(num_arrivals=COPIES, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=2, num_barriers=2),
        plgpu.Barrier(num_barriers=2),
    )


def recur(
    operands: Operands,
    qkvz: Float[Array, "B T H 4 D"],
    norm: Float32[Array, "D"],
    state: Float32[Array, "R P H D D"],
    length: Int32[Array, "R"],
    home: Int32[Array, "R N"],
    norm_eps: float,
    interpret: Any = None,
    packed: Packing | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(output [B, T, H, D], final state, states at the start of chunk `home`), states transposed to [value, key].

    `state` holds the state before each of P segments of `segment_chunks` chunks, which run at the same time. `home`
    past the last chunk captures the final state. T is a multiple of the block of 64. B and R are both the number
    of rows; with `packed`, B and P are 1.
    """
    lines, tokens, heads, _, channels = qkvz.shape
    rows, segments, captures = *state.shape[:2], home.shape[1]
    most = segment_chunks(tokens, segments)
    on = (advance, widen) if interpret is None else (emulated_advance, emulated_widen)

    def body(*refs: Any) -> None:
        sources, (qkvz, norm, state_in, lengths, home), refs = Operands(*refs[:7]), refs[7:12], refs[12:]
        (starts,), refs = (refs[:1], refs[1:]) if packed is not None else ((None,), refs)
        head, group = lax.axis_index("heads"), lax.axis_index("group")
        row, segment = lax.axis_index("pieces") // segments, lax.axis_index("pieces") % segments
        length, first = lengths[row], segment * most
        total_chunks = (length + CHUNK - 1) // CHUNK
        chunks = jnp.clip(total_chunks - first, 0, most)
        # Where the segment lies among the tokens: a line a row, or all rows in one.
        if packed is None:
            line, origin, until = row, first, tokens // CHUNK - first
        else:
            line, origin, until = 0, starts[row] // CHUNK, (starts[row + 1] - starts[row]) // CHUNK
        is_last = (jnp.maximum(total_chunks, 1) > first) & (total_chunks <= first + most)
        homes = [home[row, index] for index in range(captures)]
        blank = plgpu.layout_cast(jnp.zeros((SIDE, CHUNK), jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
        where = (head, row, segment, line, origin, until, length, first, total_chunks, chunks, is_last, homes)
        arrays = (sources, qkvz, norm, state_in, *refs[:3])
        here = Segment(*on, norm_eps, most, *arrays, Stage(*refs[3:10]), *refs[10:], *where)
        pl.when(group < 2)(lambda: here.compute(group, blank))
        pl.when(group >= 2)(lambda: here.serve(group))

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((lines, tokens, heads, channels), qkvz.dtype),
            jax.ShapeDtypeStruct((rows, heads, channels, channels), jnp.float32),
            jax.ShapeDtypeStruct((rows, captures, heads, channels, channels), jnp.float32),
        ),
        grid=(heads, rows * segments),
        grid_names=("heads", "pieces"),
        num_threads=4,
        thread_name="group",
        scratch_types=buffers(),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="kda_state",
    )(*operands, qkvz, norm, state, length, home, *(() if packed is None else packed[:1]))
