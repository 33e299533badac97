"""Segments of a sequence as affine maps of the state, on Mosaic GPU: S_out = S_in transition + local, S [value, key].

The recurrence of `mosaic_state` without readings, run twice per segment side by side: from zero with the segment's
values (the local state), and from the identity with no values (the transition). Few heads then still fill the chip:
the segments' start states follow by composition, and the ordinary kernel runs all segments at the same time.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Int32

from pallas.kda.mosaic_intra import (
    CHUNK,
    NARROW,
    PRODUCT,
    WIDE,
    Operands,
    emulated_product,
    halves,
    tensor_core_product,
)
from pallas.kda.mosaic_state import SIDE, STAGES, advance, emulated_advance, half_chunk_decay, segment_chunks
from pallas.kda.mosaic_token import pl_ds

COPIES = 6
LOCAL, TRANSITION = 0, 1


def segment_maps(
    operands: Operands, length: Int32[Array, "B"], segments: int, wanted: int, interpret: Any = None
) -> Float32[Array, "B P 2 H D D"]:
    """Local state and transition of the first `wanted` of `segments` segments, both [value, key]."""
    rows, heads, tokens, channels = operands.pull.shape
    most = segment_chunks(tokens, segments)
    step = advance if interpret is None else emulated_advance

    def body(
        pull,
        push,
        key,
        inverse,
        total,
        no_push,
        starts,
        lengths,
        maps,
        pulls,
        pushes,
        keys,
        inverses,
        totals,
        full,
        free,
    ):
        head, group = lax.axis_index("heads"), lax.axis_index("group")
        piece, kind = lax.axis_index("pieces") // 2, lax.axis_index("pieces") % 2
        row, segment = piece // wanted, piece % wanted
        first = segment * most
        chunks = jnp.clip((lengths[row] + CHUNK - 1) // CHUNK - first, 0, most)

        @pl.when(group < 2)
        def _compute() -> None:
            values = pl.ds(group * SIDE, SIDE)

            def loop(chunk: jax.Array, state: jax.Array) -> jax.Array:
                slot = chunk % STAGES
                plgpu.barrier_wait(full.at[slot])
                stage = (None, pulls.at[slot], pushes.at[slot, group], keys.at[slot], inverses.at[slot], None)
                state, _ = step(state, stage, half_chunk_decay(totals, slot), lambda: None)
                plgpu.barrier_arrive(free.at[slot])
                return state

            initial = plgpu.load(starts.at[kind, values], layout=PRODUCT, optimized=False)
            maps[row, segment, kind, head, values] = lax.fori_loop(0, chunks, loop, initial)

        @pl.when(group == 2)
        def _fetch() -> None:
            def fetch(chunk: jax.Array, _: None) -> None:
                slot = chunk % STAGES

                @pl.when(chunk >= STAGES)
                def _reuse() -> None:
                    plgpu.barrier_wait(free.at[slot])

                ready, tokens = full.at[slot], pl.ds((first + chunk) * CHUNK, CHUNK)
                for source, target in ((pull, pulls), (key, keys), (inverse, inverses)):
                    plgpu.copy_gmem_to_smem(source.at[row, head, tokens], target.at[slot], ready)
                plgpu.copy_gmem_to_smem(total.at[row, head, pl.ds(2 * (first + chunk), 2)], totals.at[slot], ready)
                for side in range(2):
                    columns = pl_ds(SIDE * side, SIDE)

                    @pl.when(kind == LOCAL)
                    def _values() -> None:
                        plgpu.copy_gmem_to_smem(push.at[row, head, tokens, columns], pushes.at[slot, side], ready)

                    @pl.when(kind == TRANSITION)
                    def _none() -> None:
                        plgpu.copy_gmem_to_smem(no_push, pushes.at[slot, side], ready)

            lax.fori_loop(0, chunks, fetch, None)

            def drain(chunk: jax.Array, _: None) -> None:
                plgpu.barrier_wait(free.at[chunk % STAGES])

            lax.fori_loop(jnp.maximum(chunks - STAGES, 0), chunks, drain, None)

    starts = jnp.stack([jnp.zeros((channels, channels)), jnp.eye(channels)]).astype(jnp.float32)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, wanted, 2, heads, channels, channels), jnp.float32),
        grid=(heads, rows * wanted * 2),
        grid_names=("heads", "pieces"),
        num_threads=3,
        thread_name="group",
        scratch_types=(
            plgpu.SMEM((STAGES, CHUNK, channels), jnp.bfloat16, transforms=WIDE),
            plgpu.SMEM((STAGES, 2, CHUNK, SIDE), jnp.bfloat16, transforms=NARROW),
            plgpu.SMEM((STAGES, CHUNK, channels), jnp.bfloat16, transforms=NARROW),
            plgpu.SMEM((STAGES, CHUNK, CHUNK), jnp.bfloat16, transforms=NARROW),
            plgpu.SMEM((STAGES, 2, channels), jnp.float32),
            plgpu.Barrier(num_arrivals=COPIES, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="kda_segments",
    )(
        operands.pull,
        operands.push,
        operands.key,
        operands.inverse,
        operands.total,
        jnp.zeros((CHUNK, SIDE), jnp.bfloat16),
        starts,
        length,
    )


def start_states(
    state: Float32[Array, "B H D D"], maps: Float32[Array, "B P 2 H D D"], interpret: Any = None
) -> Float32[Array, "B Q H D D"]:
    """The state before each of P + 1 segments, from the one before the first; all [value, key].

    S_p+1 = S_p transition + local, one block per half of the values, the state in registers. Both factors go to the
    tensor cores in two bfloat16 parts, which keeps 16 bits of each.
    """
    rows, steps, _, heads, channels, _ = maps.shape
    product = tensor_core_product if interpret is None else emulated_product

    def body(state, maps, starts, transition, high, low, ready):
        head, row = lax.axis_index("heads"), lax.axis_index("pieces") // 2
        values = pl.ds(lax.axis_index("pieces") % 2 * SIDE, SIDE)

        def fetch(segment: jax.Array) -> None:
            plgpu.copy_gmem_to_smem(maps.at[row, segment, TRANSITION, head], transition, ready)

        def step(segment: jax.Array, current: jax.Array) -> jax.Array:
            local = plgpu.load(maps.at[row, segment, LOCAL, head, values], layout=PRODUCT, optimized=False)
            plgpu.barrier_wait(ready)
            for half in range(2):
                keys = pl_ds(SIDE * half, SIDE)
                high[keys, :], low[keys, :] = halves(plgpu.load(transition.at[keys], layout=PRODUCT, optimized=False))
            plgpu.commit_smem()
            pl.when(segment + 1 < steps)(lambda: fetch(segment + 1))
            ours = halves(current)
            pairs = (ours[0], high), (ours[0], low), (ours[1], high)
            following = product((SIDE, channels), *pairs) + local
            plgpu.commit_smem()
            starts[row, segment + 1, head, values] = following
            return following

        fetch(jnp.int32(0))
        first = plgpu.load(state.at[row, head, values], layout=PRODUCT, optimized=False)
        starts[row, 0, head, values] = first
        lax.fori_loop(0, steps, step, first)

    part = plgpu.SMEM((channels, channels), jnp.bfloat16, transforms=WIDE)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, steps + 1, heads, channels, channels), jnp.float32),
        grid=(heads, 2 * rows),
        grid_names=("heads", "pieces"),
        scratch_types=(plgpu.SMEM((channels, channels), jnp.float32), part, part, plgpu.Barrier()),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="kda_starts",
    )(state, maps)
