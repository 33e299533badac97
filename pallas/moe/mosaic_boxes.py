"""How the grouped kernels walk over their work.

Every thread block takes items (a block of rows, a tile of outputs) in turn, and of each item box after box of its
inputs. One warpgroup fetches boxes into a ring of buffers, two multiply them.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas.moe.mosaic_expand import DEPTH, ROWS, SWIZZLED, blocks_of_box, scale_layout
from pallas.moe.mosaic_stream import GROUPS_OF_SCALES, PACKED_DEPTH

CONSUMERS = 2
SHARED_MEMORY = 225_000
"""Bytes for buffers; barriers and alignment take the rest."""
PLANES = 2
TILE = CONSUMERS * ROWS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a grouped kernel is cut."""

    stages: int | None = None
    """Buffers; None takes as many as fit, four at most."""
    blocks: int = 132
    """Thread blocks."""
    registers: int = 232
    """Of a thread that computes."""
    warps: bool = False
    """Whether each warp multiplies for itself, on GPUs without warpgroup products."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Sizes of a call."""

    box: int
    """Blocks of 128 inputs in a box."""
    columns: int
    """Rows of a block: they are the columns of the products."""
    tiles: int
    parts: int
    """Boxes of the whole depth."""
    stages: int
    blocks: int

    @classmethod
    def of(cls, rows: jax.Array, weights: jax.Array, blocks_of_rows: int, settings: Settings) -> "Cut":
        """The sizes for `rows` in so many blocks, and [E, 2, M, K / 2] weights."""
        box, columns = blocks_of_box(rows.shape[1]), rows.shape[0] // blocks_of_rows
        buffer = PLANES * TILE * box * PACKED_DEPTH + rows.dtype.itemsize * columns * box * DEPTH
        return cls(
            box=box,
            columns=columns,
            tiles=weights.shape[2] // TILE,
            parts=rows.shape[1] // (box * DEPTH),
            stages=settings.stages or min(4, SHARED_MEMORY // buffer),
            blocks=settings.blocks,
        )

    @property
    def depth(self) -> int:
        """Inputs of a box."""
        return self.box * DEPTH

    def scratch(self, inputs: Any, transforms: Any) -> tuple[Any, ...]:
        """Ring of packed weights, ring of `inputs`, barriers of full and of empty buffers."""
        packed = (self.stages, PLANES, TILE, self.box * PACKED_DEPTH)
        return (
            plgpu.SMEM(packed, jnp.uint8, **({"transforms": SWIZZLED} if self.box == 2 else {})),
            plgpu.SMEM((self.stages, self.columns, self.depth), inputs, transforms=transforms),
            plgpu.Barrier(num_arrivals=PLANES + 1, num_barriers=self.stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=self.stages),
        )


class Walk:
    """The way of one thread block; built inside the kernel."""

    def __init__(self, cut: Cut, used: Any, expert: Any) -> None:
        block = lax.axis_index("block")
        total = used[0] * cut.tiles
        self.items = lax.div(jnp.maximum(total - block + cut.blocks - 1, 0), jnp.int32(cut.blocks))
        """Items of this block."""
        self.cut, self._expert, self._block, self._total = cut, expert, block, total

    def locate(self, stage: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """(slot, block of rows, tile, box) of a stage."""
        cut = self.cut
        depth = lax.rem(stage, jnp.int32(cut.parts))
        item = self._block + lax.div(stage, jnp.int32(cut.parts)) * cut.blocks
        item = jnp.maximum(jnp.minimum(item, self._total - 1), 0)
        slot = lax.rem(stage, jnp.int32(cut.stages))
        return slot, lax.div(item, jnp.int32(cut.tiles)), lax.rem(item, jnp.int32(cut.tiles)), depth

    def produce(self, weights: Any, rows: Any, packed: Any, inputs: Any, full: Any, empty: Any) -> None:
        """Starts the copies of every box as soon as a buffer is empty, and waits until the last ones are."""
        cut, width = self.cut, self.cut.box * PACKED_DEPTH
        plgpu.set_max_registers(40, action="decrease")

        def fetch(stage: jax.Array, _: None) -> None:
            slot, at, tile, depth = self.locate(stage)
            pl.when(stage >= cut.stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
            there = pl.ds(tile * TILE, TILE), pl.ds(depth * width, width)
            for plane in range(PLANES):
                source = weights.at[self._expert[at] * PLANES + plane, *there]
                plgpu.copy_gmem_to_smem(source, packed.at[slot, plane], full.at[slot])
            source = rows.at[pl.ds(at * cut.columns, cut.columns), pl.ds(depth * cut.depth, cut.depth)]
            plgpu.copy_gmem_to_smem(source, inputs.at[slot], full.at[slot])

        def drain(stage: jax.Array, _: None) -> None:
            pl.when(stage >= cut.stages)(lambda: plgpu.barrier_wait(empty.at[lax.rem(stage, jnp.int32(cut.stages))]))

        lax.fori_loop(0, self.items * cut.parts, fetch, None)
        lax.fori_loop(self.items * cut.parts, self.items * cut.parts + cut.stages, drain, None)

    def scales(self, scale: Any, group: jax.Array, stage: jax.Array) -> tuple[jax.Array, ...]:
        """The scale bytes of a stage's weights of a warpgroup, for both planes."""
        groups = self.cut.box * GROUPS_OF_SCALES
        _, at, tile, depth = self.locate(stage)
        there = pl.ds(tile * TILE + group * ROWS, ROWS), pl.ds(depth * groups, groups)
        loads = (scale.at[self._expert[at], plane, *there] for plane in range(PLANES))
        layout = scale_layout(self.cut.box)
        return tuple(plgpu.load(x, layout=layout, optimized=False).astype(jnp.int32) for x in loads)

    def operands(
        self, packed: Any, inputs: Any, group: jax.Array, slot: jax.Array, loaded: tuple, turn: Callable[..., jax.Array]
    ) -> Iterator[tuple[int, jax.Array, Any]]:
        """(plane, weights in registers, activations) of a buffer that has arrived; `turn` expands codes."""
        for block in range(self.cut.box):
            for plane in range(PLANES):
                source = packed.at[slot, plane, pl.ds(group * ROWS, ROWS)]
                right = inputs.at[slot, :, pl.ds(block * DEPTH, DEPTH)]
                yield plane, turn(source, loaded[plane], self.cut.box, block), right

    def store(
        self,
        results: tuple[jax.Array, ...],
        out: Any,
        at: jax.Array,
        tile: jax.Array,
        group: jax.Array,
        boxes_out: int,
        put: Callable[..., None],
        moved: Callable[..., Any],
    ) -> None:
        """A warpgroup's part of a tile: one result in the order of `moved`, for a next product, or two as they are."""
        cut, one = self.cut, len(results) == 1
        for plane, value in enumerate(results):
            first, offset = plane * cut.tiles * TILE + tile * TILE, group * ROWS
            if one and boxes_out == 2:
                # Two tiles share a box of the interleaved output.
                offset += lax.rem(tile, jnp.int32(2)) * TILE
                first = lax.div(tile, jnp.int32(2)) * 2 * TILE
            wide = TILE * (boxes_out if one else 1)
            target = out.at[pl.ds(at * cut.columns, cut.columns), pl.ds(first, wide)]
            put(target, None, offset, value.astype(jnp.bfloat16), plgpu.Layout.WGMMA, moved if one else None)
