"""Segments of a sequence as affine maps of the state, on Mosaic GPU: S_out = S_in transition + local, S [value, key].

The recurrence of `mosaic_state` without readings, run twice per segment side by side: from zero with the segment's
values (the local state), and from the identity with no values (the transition). Few heads then still fill the chip:
the segments' start states follow by composition, and the ordinary kernel runs all segments at the same time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas.kda.mosaic_chunk import (
    CHUNK,
    NARROW,
    PRODUCT,
    emulated_product,
    halves,
    tensor_core_product,
)
from pallas.kda.mosaic_intra import Operands
from pallas.kda.mosaic_state import SIDE, STAGES, advance, emulated_advance, half_chunk_decay, segment_chunks
from pallas.kda.mosaic_token import CHANNELS, pl_ds
from pallas.layouts import WIDE

COPIES = 6
LOCAL, TRANSITION = 0, 1
AHEAD = 3
"""Maps on their way to the kernel that composes them."""


class Maps(NamedTuple):
    """Affine maps of segments, [value, key]; the transition in two bfloat16 parts that keep 16 bits of it."""

    local: Float32[Array, "B P H D D"]
    transition: BFloat16[Array, "B P 2 H D D"]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A segment and one of its maps in a block of threads: arrays in device memory, buffers, barriers."""

    step: Callable
    pull: Any
    push: Any
    key: Any
    inverse: Any
    total: Any
    no_push: Any
    starts: Any
    maps: Maps
    pulls: Any
    pushes: Any
    keys: Any
    inverses: Any
    totals: Any
    full: Any
    free: Any
    head: jax.Array
    row: jax.Array
    segment: jax.Array
    kind: jax.Array
    first: jax.Array
    chunks: jax.Array

    def compute(self, group: jax.Array) -> None:
        """A computing warpgroup's work: half of the values."""
        values = pl.ds(group * SIDE, SIDE)
        initial = plgpu.load(self.starts.at[self.kind, values], layout=PRODUCT, optimized=False)
        final = lax.fori_loop(0, self.chunks, lambda chunk, state: self.advance(chunk, state, group), initial)

        @pl.when(self.kind == LOCAL)
        def _local() -> None:
            self.maps.local[self.row, self.segment, self.head, values] = final

        @pl.when(self.kind == TRANSITION)
        def _transition() -> None:
            for part, half in enumerate(halves(final)):
                self.maps.transition[self.row, self.segment, part, self.head, values] = half

    def advance(self, chunk: jax.Array, state: jax.Array, group: jax.Array) -> jax.Array:
        """One chunk of half of the values."""
        slot = chunk % STAGES
        plgpu.barrier_wait(self.full.at[slot])
        pull, push = self.pulls.at[slot], self.pushes.at[slot, group]
        stage = (None, pull, push, self.keys.at[slot], self.inverses.at[slot], None)
        state, _ = self.step(state, stage, half_chunk_decay(self.totals, slot), lambda: None)
        plgpu.barrier_arrive(self.free.at[slot])
        return state

    def feed(self) -> None:
        """The copying warpgroup's work."""
        lax.fori_loop(0, self.chunks, lambda chunk, _: self.fetch(chunk), None)

        def drain(chunk: jax.Array, _: None) -> None:
            plgpu.barrier_wait(self.free.at[chunk % STAGES])

        lax.fori_loop(jnp.maximum(self.chunks - STAGES, 0), self.chunks, drain, None)

    def fetch(self, chunk: jax.Array) -> None:
        """Starts the copies of a chunk."""
        slot = chunk % STAGES

        @pl.when(chunk >= STAGES)
        def _reuse() -> None:
            plgpu.barrier_wait(self.free.at[slot])

        place, ready = (self.row, self.head), self.full.at[slot]
        tokens = pl.ds((self.first + chunk) * CHUNK, CHUNK)
        for source, target in ((self.pull, self.pulls), (self.key, self.keys), (self.inverse, self.inverses)):
            plgpu.copy_gmem_to_smem(source.at[(*place, tokens)], target.at[slot], ready)
        half_chunks = pl.ds(2 * (self.first + chunk), 2)
        plgpu.copy_gmem_to_smem(self.total.at[(*place, half_chunks)], self.totals.at[slot], ready)
        for side in range(2):
            columns = pl_ds(SIDE * side, SIDE)

            @pl.when(self.kind == LOCAL)
            def _values() -> None:
                source = self.push.at[(*place, tokens, columns)]
                plgpu.copy_gmem_to_smem(source, self.pushes.at[slot, side], ready)

            @pl.when(self.kind == TRANSITION)
            def _none() -> None:
                plgpu.copy_gmem_to_smem(self.no_push, self.pushes.at[slot, side], ready)


def buffers() -> tuple[Any, ...]:
    """Shared memory and barriers of a block: pulls, pushes, keys, inverses, totals, full, free."""
    return (
        plgpu.SMEM((STAGES, CHUNK, CHANNELS), jnp.bfloat16, transforms=WIDE),
        plgpu.SMEM((STAGES, 2, CHUNK, SIDE), jnp.bfloat16, transforms=NARROW),
        plgpu.SMEM((STAGES, CHUNK, CHANNELS), jnp.bfloat16, transforms=NARROW),
        plgpu.SMEM((STAGES, CHUNK, CHUNK), jnp.bfloat16, transforms=NARROW),
        plgpu.SMEM((STAGES, 2, CHANNELS), jnp.float32),
        plgpu.Barrier(num_arrivals=COPIES, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
    )


def segment_maps(
    operands: Operands, length: Int32[Array, "B"], segments: int, wanted: int, interpret: Any = None
) -> Maps:
    """Local state and transition of the first `wanted` of `segments` segments."""
    rows, heads, tokens, channels = operands.pull.shape
    most = segment_chunks(tokens, segments)
    step = advance if interpret is None else emulated_advance

    def body(*refs: Any) -> None:
        arrays, lengths, maps = refs[:7], refs[7], Maps(*refs[8:10])
        head, group = lax.axis_index("heads"), lax.axis_index("group")
        piece, kind = lax.axis_index("pieces") // 2, lax.axis_index("pieces") % 2
        row, segment = piece // wanted, piece % wanted
        first = segment * most
        chunks = jnp.clip((lengths[row] + CHUNK - 1) // CHUNK - first, 0, most)
        here = Piece(step, *arrays, maps, *refs[10:], head, row, segment, kind, first, chunks)
        pl.when(group < 2)(lambda: here.compute(group))
        pl.when(group == 2)(here.feed)

    starts = jnp.stack([jnp.zeros((channels, channels)), jnp.eye(channels)]).astype(jnp.float32)
    maps = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, wanted, heads, channels, channels), jnp.float32),
            jax.ShapeDtypeStruct((rows, wanted, 2, heads, channels, channels), jnp.bfloat16),
        ),
        grid=(heads, rows * wanted * 2),
        grid_names=("heads", "pieces"),
        num_threads=3,
        thread_name="group",
        scratch_types=buffers(),
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
    return Maps(*maps)


def start_states(state: Float32[Array, "B H D D"], maps: Maps, interpret: Any = None) -> Float32[Array, "B Q H D D"]:
    """The state before each of P + 1 segments, from the one before the first; all [value, key].

    S_p+1 = S_p transition + local, one block per half of the values, the state in registers, in two bfloat16 parts
    like the transition.
    """
    rows, steps, heads, channels, _ = maps.local.shape
    product = tensor_core_product if interpret is None else emulated_product

    def body(state, local, transition, starts, parts, ready):
        head, row = lax.axis_index("heads"), lax.axis_index("pieces") // 2
        values = pl.ds(lax.axis_index("pieces") % 2 * SIDE, SIDE)

        def fetch(segment: jax.Array | int) -> None:
            stage = segment % AHEAD
            for part in range(2):
                source = transition.at[row, segment, part, head]
                plgpu.copy_gmem_to_smem(source, parts.at[stage, part], ready.at[stage])

        def step(segment: jax.Array, current: jax.Array) -> jax.Array:
            added = plgpu.load(local.at[row, segment, head, values], layout=PRODUCT, optimized=False)
            stage = segment % AHEAD
            high, low = (parts.at[stage, part] for part in range(2))
            ours = halves(current)
            plgpu.barrier_wait(ready.at[stage])
            following = product((SIDE, channels), (ours[0], high), (ours[0], low), (ours[1], high)) + added
            plgpu.commit_smem()
            pl.when(segment + AHEAD < steps)(lambda: fetch(segment + AHEAD))
            starts[row, segment + 1, head, values] = following
            return following

        for segment in range(min(AHEAD, steps)):
            fetch(segment)
        first = plgpu.load(state.at[row, head, values], layout=PRODUCT, optimized=False)
        starts[row, 0, head, values] = first
        lax.fori_loop(0, steps, step, first)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, steps + 1, heads, channels, channels), jnp.float32),
        grid=(heads, 2 * rows),
        grid_names=("heads", "pieces"),
        scratch_types=(
            plgpu.SMEM((AHEAD, 2, channels, channels), jnp.bfloat16, transforms=WIDE),
            plgpu.Barrier(num_arrivals=2, num_barriers=AHEAD),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="kda_starts",
    )(state, *maps)
