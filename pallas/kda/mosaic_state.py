"""KDA prefill, second kernel: the recurrence over chunks, one block per (row, head).

Two warpgroups hold half of the values each of the transposed state [value, key] in float32 registers for the whole
sequence; it is the left operand of every product, rounded to bfloat16, so it never touches memory. Two more
warpgroups take turns at starting the bulk copies of later chunks and turning the readings of earlier ones into
outputs. No barriers are inserted around shared memory here: what passes between warpgroups passes under the explicit
ones. Per chunk, with M the decay at its middle, E its end, and operands as `mosaic_intra.Operands` describes them:

    S' = S exp(M)                        u = (push - S' pull^T) inverse^T
    o = S' query^T + u attention^T       S = (S' + u key) exp(E - M)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas.kda.mosaic_intra import BLOCK, CHUNK, NARROW, PRODUCT, WIDE, Operands, Packing, over_columns, over_rows
from pallas.kda.mosaic_token import CHANNELS, pl_ds

SIDE = CHANNELS // 2
STAGES = 4
COPIES = 8
COMPUTE_REGISTERS, SERVICE_REGISTERS = 176, 80
OUTPUT_LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((4, SIDE), (2,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
"""[32, 64]: a token per warp and step, two of its values a lane."""


def advance(
    state: jax.Array, stage: tuple, decay: Callable[[int], jax.Array], meanwhile: Callable[[], None]
) -> tuple[jax.Array, jax.Array]:
    """One chunk of half of the values: (state after it, readings [64, 32]).

    `decay(part)` spreads the decay of a half chunk over the state; `meanwhile` runs while the first products are
    under way. What the next chunk waits for is issued before what only the readings need. Without a query the
    readings are arbitrary.
    """
    query, pull, push, key, inverse, attention = stage
    state = state * decay(0)
    operand = state.astype(jnp.bfloat16)

    def run(predicted: Any, write: Any, reading: Any, after: Any) -> tuple[jax.Array, jax.Array]:
        after[...] = state
        plgpu.wgmma(predicted, operand, pull.transpose((1, 0)))
        plgpu.wgmma(write, push.transpose((1, 0)), inverse.transpose((1, 0)))
        meanwhile()
        negative = (-plgpu.wgmma_accumulator_load(predicted, wait_n=1)).astype(jnp.bfloat16)
        plgpu.wgmma(write, negative, inverse.transpose((1, 0)))
        written = plgpu.wgmma_accumulator_load(write, wait_n=0).astype(jnp.bfloat16)
        plgpu.wgmma(after, written, key)
        if query is not None:
            plgpu.wgmma(reading, operand, query.transpose((1, 0)))
            plgpu.wgmma(reading, written, attention.transpose((1, 0)))
        following = plgpu.wgmma_accumulator_load(after, wait_n=0 if query is None else 2) * decay(1)
        return following, plgpu.wgmma_accumulator_load(reading, wait_n=0)

    narrow = plgpu.ACC((SIDE, CHUNK), jnp.float32)
    return pl.run_scoped(run, narrow, narrow, narrow, plgpu.ACC((SIDE, CHANNELS), jnp.float32))


def emulated_advance(
    state: jax.Array, stage: tuple, decay: Callable[[int], jax.Array], meanwhile: Callable[[], None]
) -> tuple[jax.Array, jax.Array]:
    """`advance` for interpretation on a CPU, where a product cannot take its left operand from registers."""
    query, pull, push, key, inverse, attention = (None if x is None else x[...] for x in stage)
    dot = lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32)  # noqa: E731
    meanwhile()
    state = state * decay(0)
    operand = state.astype(jnp.bfloat16)
    negative = (-dot(operand, pull.T)).astype(jnp.bfloat16)
    written = (dot(push.T, inverse.T) + dot(negative, inverse.T)).astype(jnp.bfloat16)
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


def gated_output(
    readings: list[jax.Array], gates: list[jax.Array], norms: list[jax.Array], eps: float, valid: jax.Array
) -> list[jax.Array]:
    """RMSNorm over both halves of the values times sigmoid of the gate, zero where not valid, in bfloat16."""
    wide = [x.astype(jnp.float32) for x in readings]
    squares = (wide[0] * wide[0] + wide[1] * wide[1]).sum(axis=1)
    scale = over_rows(lax.rsqrt(squares / CHANNELS + eps) * 0.5, OUTPUT_LAYOUT, (CHUNK, SIDE))
    outputs = []
    for x, gate, norm in zip(wide, gates, norms):
        # sigmoid(z) = (1 + tanh(z / 2)) / 2, the last half being in `scale`.
        opened = jnp.tanh(0.5 * gate.astype(jnp.float32))
        normed = x * scale * over_columns(norm, OUTPUT_LAYOUT, (CHUNK, SIDE))
        outputs.append(jnp.where(valid, normed + normed * opened, 0.0).astype(jnp.bfloat16))
    return outputs


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
    step: Callable = advance if interpret is None else emulated_advance

    def body(
        query,
        pull,
        push,
        key,
        inverse,
        attention,
        total,
        qkvz,
        norm,
        state_in,
        lengths,
        home,
        *refs: Any,
    ):
        (starts,), refs = (refs[:1], refs[1:]) if packed is not None else ((None,), refs)
        output, state_out, captured, queries, pulls, pushes, keys, inverses, attentions, totals = refs[:10]
        readings, full, read, drained = refs[10:]
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
        ring = (queries, pulls, pushes, keys, inverses, attentions, totals)
        sources = (query, pull, push, key, inverse, attention, total)

        homes = [home[row, index] for index in range(captures)]
        blank = plgpu.layout_cast(jnp.zeros((SIDE, CHUNK), jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)

        @pl.when(group < 2)
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            values = pl.ds(group * SIDE, SIDE)

            def capture(state: jax.Array, wanted: Callable[[jax.Array], jax.Array]) -> None:
                for index in range(captures):

                    @pl.when(wanted(homes[index]))
                    def _store() -> None:
                        captured[row, index, head, values] = state

            def publish(chunk: jax.Array, reading: jax.Array) -> None:
                buffer = chunk % 2

                @pl.when(chunk >= 2)
                def _reuse() -> None:
                    plgpu.barrier_wait(drained.at[buffer])

                @pl.when(chunk >= 0)
                def _hand_over() -> None:
                    readings.at[buffer, group].transpose((1, 0))[...] = reading
                    plgpu.barrier_arrive(read.at[buffer])

            def loop(chunk: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                state, last = carry
                slot = chunk % STAGES
                capture(state, lambda at: at == first + chunk)
                plgpu.barrier_wait(full.at[slot])
                stage = (
                    queries.at[slot],
                    pulls.at[slot],
                    pushes.at[slot, group],
                    keys.at[slot],
                    inverses.at[slot],
                    attentions.at[slot],
                )
                state, reading = step(state, stage, half_chunk_decay(totals, slot), lambda: publish(chunk - 1, last))
                return state, plgpu.layout_cast(reading.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)

            initial = plgpu.load(state_in.at[row, segment, head, values], layout=PRODUCT, optimized=False)
            final, reading = lax.fori_loop(0, chunks, loop, (initial, blank))
            publish(chunks - 1, reading)
            for last in (2, 1):
                pl.when(chunks >= last)(lambda: plgpu.barrier_wait(drained.at[(chunks - last) % 2]))
            capture(final, lambda at: is_last & (at >= total_chunks))

            @pl.when(is_last)
            def _finish() -> None:
                state_out[row, head, values] = final

        @pl.when(group >= 2)
        def _serve() -> None:
            plgpu.set_max_registers(SERVICE_REGISTERS, action="decrease")
            parity = group - 2

            def fetch(chunk: jax.Array) -> None:
                slot = chunk % STAGES
                fetch_chunk(sources, tuple(x.at[slot] for x in ring), full.at[slot], line, head, origin + chunk)

            for chunk in range(STAGES):
                pl.when((parity == 0) & (chunk < chunks))(lambda: fetch(jnp.int32(chunk)))
            sides = [pl_ds(SIDE * side, SIDE) for side in range(2)]
            norms = [plgpu.load(norm.at[side], layout=OUTPUT_LAYOUT.reduce(0), optimized=False) for side in sides]
            token = plgpu.broadcasted_iota(jnp.int32, (CHUNK, SIDE), 0, layout=OUTPUT_LAYOUT)

            def serve(turn: jax.Array, _: None) -> None:
                chunk = 2 * turn + parity
                there = pl.ds((origin + chunk) * CHUNK, CHUNK)
                gates = [
                    plgpu.load(qkvz.at[line, there, head, 3, side], layout=OUTPUT_LAYOUT, optimized=False)
                    for side in sides
                ]
                plgpu.barrier_wait(read.at[parity])
                pl.when(chunk + STAGES < chunks)(lambda: fetch(chunk + STAGES))
                halves = [
                    plgpu.load(readings.at[parity, side], layout=OUTPUT_LAYOUT, optimized=False) for side in range(2)
                ]
                plgpu.barrier_arrive(drained.at[parity])
                results = gated_output(halves, gates, norms, norm_eps, token < length - (first + chunk) * CHUNK)
                for side, result in zip(sides, results):
                    output[line, there, head, side] = result

            def clear(turn: jax.Array, _: None) -> None:
                there = pl.ds((origin + 2 * turn + parity) * CHUNK, CHUNK)
                for side in sides:
                    zeros = plgpu.layout_cast(jnp.zeros((CHUNK, SIDE), jnp.bfloat16), OUTPUT_LAYOUT)
                    output[line, there, head, side] = zeros

            turns = (chunks + 1 - parity) // 2
            lax.fori_loop(0, turns, serve, None)
            lax.fori_loop(turns, jnp.minimum(most, until) // 2, clear, None)

    tile = plgpu.SMEM((STAGES, CHUNK, channels), jnp.bfloat16, transforms=WIDE)
    square = plgpu.SMEM((STAGES, CHUNK, CHUNK), jnp.bfloat16, transforms=NARROW)
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
        scratch_types=(
            tile,
            tile,
            plgpu.SMEM((STAGES, 2, CHUNK, SIDE), jnp.bfloat16, transforms=NARROW),
            plgpu.SMEM((STAGES, CHUNK, channels), jnp.bfloat16, transforms=NARROW),
            square,
            square,
            plgpu.SMEM((STAGES, 2, channels), jnp.float32),
            plgpu.SMEM((2, 2, CHUNK, SIDE), jnp.bfloat16, transforms=WIDE),
            plgpu.Barrier(num_arrivals=COPIES, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="kda_state",
    )(*operands, qkvz, norm, state, length, home, *(() if packed is None else packed[:1]))
