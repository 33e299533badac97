"""How the grouped kernels walk over their work.

Every thread block takes items (a block of rows, a tile of outputs) in turn, and of each item box after box of its
inputs. One warpgroup fetches boxes into a ring of buffers, two multiply them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from pallas.moe import grouped
from pallas.moe.mosaic_expand import DEPTH, ROWS, SWIZZLED, scale_layout
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


def plan(ids: Int32[Array, "N k"], num_experts: int, size: int) -> tuple[grouped.Plan, Int32[Array, "1"]]:
    """(order of the rows in blocks of `size`, blocks that hold any); slots without an expert are not run."""
    # They form a last group.
    order = grouped.plan(jnp.where(ids < 0, num_experts, ids), num_experts + 1, size)
    used = jnp.sum(order.filled.reshape(-1, size)[:, 0] & (order.expert < num_experts)).astype(jnp.int32)
    return order, used.reshape(1)
