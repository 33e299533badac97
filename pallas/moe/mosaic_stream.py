"""A streaming product of a few rows with many experts' packed weights: the decode kernels of the MoE.

Every warpgroup owns a ring of buffers and walks over its share of the work, (block, tile of 64 weight rows, depth);
bulk copies of later stages are under way while it turns the codes of the present one into operands. Weights are the
left operand of the tensor-core products, so one to four tokens cost the same. With `split` > 1 the warpgroups of a
thread block share one tile, each a part of its depth: they leave their sums in shared memory and go on, and one of them
in turn adds them up and stores the result.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Int32, UInt8

from pallas import inline
from pallas.moe import mosaic_warp
from pallas.moe.mosaic_expand import DEPTH, ROWS, SWIZZLED, blocks_of_box
from pallas.moe.mosaic_pair import (
    CODE_UNIT,
    COLUMNS,
    E4M3,
    ENDS,
    TOKENS,
    WIDE,
    Pairs,
    accumulate,
    emulated_accumulate,
    emulated_fold,
    emulated_store_pairs,
    fold,
    scale_layout,
    store_pairs,
    unit_layout,
)
from pallas.moe.mosaic_quantize import emulated_quantize, quantize
from pallas.moe.mxfp4 import GROUP
from pallas.transposed_store import emulated_store, store

PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)
PACKED_DEPTH = DEPTH // 2
GROUPS_OF_SCALES = DEPTH // 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a streaming kernel is cut."""

    groups: int = 4
    """Warpgroups of a thread block."""
    split: int = 4
    """Warpgroups that share a tile: 1 or `groups`."""
    stages: int = 4
    """Buffers of a warpgroup."""
    chunks: int = 1
    """Boxes of 128 or 256 inputs in a buffer."""
    blocks: int = 132
    """Thread blocks."""
    warps: bool = False
    """Whether each warp multiplies for itself, on GPUs without warpgroup products."""


class Work(NamedTuple):
    """The blocks of work: N rows of activations times one expert's weights."""

    expert: Int32[Array, " U"]
    first_row: Int32[Array, " U"]
    """First of the block's N rows of activations."""
    used: Int32[Array, "1"]
    """Number of leading blocks that are real."""
    target: Int32[Array, "U 4"] | None
    """Row of the output of each token of a block, negative for none; None makes the output pairs."""


class Cut(NamedTuple):
    """Static sizes of one call."""

    planes: int
    tiles: int
    buffers: int
    """Buffers that the depth of a tile fills."""
    box: int
    """Blocks of 128 inputs in a box."""
    resident: bool
    """Whether the activations, the same for all blocks, stay in shared memory."""
    by_group: bool
    """Whether activations have a unit for each scale group."""
    targeted: bool
    """Whether results are rows of tokens, not pairs."""
    emulated: bool
    settings: Settings

    @property
    def shared(self) -> bool:
        """Whether the warpgroups of a thread block share its tiles."""
        return self.settings.split > 1

    @property
    def width(self) -> int:
        """Inputs of a buffer."""
        return self.settings.chunks * self.box * DEPTH

    @property
    def groups_of_scales(self) -> int:
        """Scale groups of a box."""
        return GROUPS_OF_SCALES * self.box


def situ(gate: jax.Array, up: jax.Array, beta: float, linear_beta: float) -> jax.Array:
    """`pallas.activation.situ` on float32 registers."""
    return beta * jnp.tanh(gate / beta) / (1.0 + jnp.exp(-gate)) * (linear_beta * jnp.tanh(up / linear_beta))


def stream(
    activations: Pairs | BFloat16[Array, "N K"],
    weights: UInt8[Array, "E P M bytes"],
    scale: UInt8[Array, "E P M groups"],
    work: Work,
    out: Any,
    finish: Callable[..., jax.Array],
    settings: Settings,
    name: str,
    interpret: Any = None,
) -> Any:
    """`finish(plane 0, plane 1, ...)` of the products of each block's tokens with the planes of its expert's weights.

    `activations` are those of up to four tokens that all blocks share, or the pairs of every block. `out` has the shape
    of the result: [*, M] float32, or without targets `Pairs` of every block with units of scale groups.
    """
    resident = not isinstance(activations, Pairs)
    inputs = (activations,) if resident else activations
    planes, tiles, depth = weights.shape[1], weights.shape[2] // ROWS, inputs[0].shape[1]
    box = blocks_of_box(depth)
    buffers = depth // (DEPTH * box * settings.chunks)
    by_group, targeted = not resident and inputs[1].ndim == 3, work.target is not None
    cut = Cut(planes, tiles, buffers, box, resident, by_group, targeted, interpret is not None, settings)
    smem, groups, stages, chunks = plgpu.SMEM, settings.groups, settings.stages, settings.chunks
    shared = (buffers if cut.resident else groups * stages, COLUMNS, cut.width)
    layout_of_box = {"transforms": SWIZZLED} if box == 2 else {}
    kernel = plgpu.kernel(
        lambda *refs, **scratch: Warpgroup(cut, finish, refs, scratch).run(),
        out_type=out,
        grid=(settings.blocks,),
        grid_names=("block",),
        num_threads=groups,
        thread_name="group",
        scratch_types={
            "packed": smem((groups * stages, chunks, planes, ROWS, box * PACKED_DEPTH), jnp.uint8, **layout_of_box),
            "rows": smem(shared, E4M3, transforms=WIDE),
            "unit": smem((TOKENS,), jnp.float32),
            "largest": smem((groups, 4, TOKENS), jnp.int32),
            "sums": smem((2, groups, planes, ROWS, TOKENS), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=chunks * planes + (not cut.resident), num_barriers=groups * stages),
            "shared": plgpu.Barrier(num_arrivals=groups),
            "summed": plgpu.Barrier(num_arrivals=groups, num_barriers=groups),
            "drained": plgpu.Barrier(num_arrivals=1, num_barriers=2),
        },
        compiler_params=PARAMS,
        interpret=interpret,
        kernel_name=name,
    )
    tables = work.expert, work.first_row, work.used, *(() if work.target is None else (work.target,))
    # The copy engine counts five dimensions, two of which the swizzle takes.
    return kernel(*inputs, weights.reshape(-1, *weights.shape[2:]), scale, *tables)


class _Place(NamedTuple):
    """Where a stage of a warpgroup lies."""

    exists: jax.Array
    block: jax.Array
    tile: jax.Array
    depth: jax.Array


def _nothing() -> None:
    """In interpretation a warpgroup is one thread."""


class Warpgroup:
    """The work of one warpgroup of a thread block; built inside the kernel."""

    def __init__(self, cut: Cut, finish: Callable[..., jax.Array], refs: tuple[Any, ...], smem: dict[str, Any]) -> None:
        self.cut, self.finish, self.smem = cut, finish, smem
        self.inputs, *rest = refs
        self.unit, *rest = (smem["unit"], *rest) if cut.resident else rest
        self.weights, self.scale, self.expert, self.first_row, used, *outputs = rest
        self.target = outputs.pop(0) if cut.targeted else None
        self.outputs = outputs
        settings = cut.settings
        self.group, block = lax.axis_index("group"), lax.axis_index("block")
        self.total = used[0] * cut.tiles
        if cut.shared:
            self.part, self.start, self.stride = self.group, block, settings.blocks
        else:
            self.part, self.start = 0, block * settings.groups + self.group
            self.stride = settings.blocks * settings.groups
        self.settle = _nothing if cut.emulated else inline.synchronize

    def locate(self, stage: jax.Array) -> _Place:
        """Where a stage lies: the buffers of all tiles in a row go to the warpgroups in turn."""
        cut = self.cut
        number = stage * cut.settings.split + self.part
        item = self.start + lax.div(number, jnp.int32(cut.buffers)) * self.stride
        depth = lax.rem(number, jnp.int32(cut.buffers))
        safe = jnp.maximum(jnp.minimum(item, self.total - 1), 0)
        block, tile = lax.div(safe, jnp.int32(cut.tiles)), lax.rem(safe, jnp.int32(cut.tiles))
        return _Place(item < self.total, block, tile, depth)

    def slot(self, stage: jax.Array) -> jax.Array:
        """The buffer of a stage."""
        stages = self.cut.settings.stages
        return self.group * stages + lax.rem(stage, jnp.int32(stages))

    def first_stage(self, item: jax.Array) -> jax.Array:
        """First stage of this warpgroup that belongs to its `item`-th tile."""
        split = self.cut.settings.split
        return lax.div(item * self.cut.buffers + split - 1 - self.part, jnp.int32(split))

    def fetch(self, stage: jax.Array) -> None:
        """Starts the copies of a stage, if there is one."""
        cut, smem, chunks = self.cut, self.smem, self.cut.settings.chunks
        at = self.locate(stage)

        @pl.when(at.exists)
        def _start() -> None:
            slot = self.slot(stage)
            chosen, ready = jnp.maximum(self.expert[at.block], 0), smem["full"].at[slot]
            for chunk in range(chunks):
                inputs = pl.ds((at.depth * chunks + chunk) * cut.box * PACKED_DEPTH, cut.box * PACKED_DEPTH)
                for plane in range(cut.planes):
                    source = self.weights.at[chosen * cut.planes + plane, pl.ds(at.tile * ROWS, ROWS), inputs]
                    plgpu.copy_gmem_to_smem(source, smem["packed"].at[slot, chunk, plane], ready)
            if not cut.resident:
                inputs = pl.ds(at.depth * cut.width, cut.width)
                source = self.inputs.at[pl.ds(self.first_row[at.block], COLUMNS), inputs]
                plgpu.copy_gmem_to_smem(source, smem["rows"].at[slot], ready)

    def scales(self, stage: jax.Array) -> tuple[jax.Array, ...]:
        """Scale bytes of a stage's weights."""
        cut, chunks, groups = self.cut, self.cut.settings.chunks, self.cut.groups_of_scales
        at = self.locate(stage)
        chosen = jnp.maximum(self.expert[at.block], 0)
        loaded = []
        for chunk in range(chunks):
            inputs = pl.ds((at.depth * chunks + chunk) * groups, groups)
            for plane in range(cut.planes):
                source = self.scale.at[chosen, plane, pl.ds(at.tile * ROWS, ROWS), inputs]
                loaded.append(plgpu.load(source, layout=scale_layout(cut.box), optimized=False))
        return tuple(loaded)

    def units(self, stage: jax.Array) -> tuple[jax.Array | None, ...]:
        """Units of a stage's activations, if they have one for each scale group."""
        chunks, groups = self.cut.settings.chunks, self.cut.groups_of_scales
        if not self.cut.by_group:
            return (None,) * chunks
        at, layout = self.locate(stage), unit_layout(self.cut.box)
        first = at.depth * chunks * groups
        there = (pl.ds(first + chunk * groups, groups) for chunk in range(chunks))
        return tuple(plgpu.load(self.unit.at[at.block, :, x], layout=layout, optimized=False) for x in there)

    def tile_sums(self, item: jax.Array, first: tuple) -> tuple:
        """(sums of each plane, scales and units of the next stage)."""
        cut, smem, chunks = self.cut, self.smem, self.cut.settings.chunks
        add = emulated_accumulate if cut.emulated else partial(accumulate, warps=cut.settings.warps)

        def one(stage: jax.Array, carry: tuple) -> tuple:
            sums, (loaded, ones) = list(carry[0]), carry[1]
            following = self.scales(stage + 1), self.units(stage + 1)
            plgpu.barrier_wait(smem["full"].at[self.slot(stage)])
            slot = self.slot(stage)
            right = smem["rows"].at[self.locate(stage).depth if cut.resident else slot]
            for chunk in range(chunks):
                for plane in range(cut.planes):
                    left, mine = smem["packed"].at[slot, chunk, plane], loaded[chunk * cut.planes + plane]
                    sums[plane] = add(sums[plane], left, mine, right, ones[chunk], cut.box, chunk * cut.box)
            self.settle()  # every warp has read the buffer
            self.fetch(stage + cut.settings.stages)
            return tuple(sums), following

        zero = jnp.zeros((ROWS, COLUMNS), jnp.float32)
        zero = zero if cut.emulated else plgpu.layout_cast(zero, plgpu.Layout.WGMMA)
        return lax.fori_loop(self.first_stage(item), self.first_stage(item + 1), one, ((zero,) * cut.planes, first))

    def total_of(self, buffer: jax.Array, plane: int) -> jax.Array:
        """The sum over the warpgroups that share a tile."""
        members = range(self.cut.settings.groups) if self.cut.shared else (self.group,)
        parts = (self.smem["sums"].at[buffer, member, plane] for member in members)
        loads = [plgpu.load(part, layout=ENDS, optimized=False) for part in parts]
        return sum(loads[1:], loads[0])

    def emit(self, number: jax.Array, value: jax.Array) -> None:
        """Stores a finished tile: rows of tokens, or pairs for the next product."""
        cut = self.cut
        tile, block = lax.rem(number, jnp.int32(cut.tiles)), lax.div(number, jnp.int32(cut.tiles))
        columns = pl.ds(tile * ROWS, ROWS)
        if self.target is not None:
            put = emulated_store if cut.emulated else store
            put(self.outputs[0].at[:, columns], self.target.at[block], 0, value, ENDS)
        else:
            put_pairs = emulated_store_pairs if cut.emulated else store_pairs
            rows, ones = self.outputs
            of_tile = pl.ds(tile * (ROWS // GROUP), ROWS // GROUP)
            put_pairs(rows.at[pl.ds(block * COLUMNS, COLUMNS), columns], ones.at[block, :, of_tile], value)

    def tile(self, item: jax.Array, loaded: tuple) -> tuple:
        """Sums and stores the `item`-th tile; of a shared one the warpgroups store in turn."""
        cut, smem, finish = self.cut, self.smem, self.finish
        code_unit = mosaic_warp.CODE_UNIT if cut.settings.warps else CODE_UNIT
        combine = emulated_fold if cut.emulated else partial(fold, code_unit=code_unit)
        sums, following = self.tile_sums(item, loaded)
        number, buffer = self.start + item * self.stride, lax.rem(item, jnp.int32(2))
        block = lax.div(number, jnp.int32(cut.tiles))
        ones = None if cut.by_group else self.unit if cut.resident else self.unit.at[block]
        if cut.shared:
            pl.when(item > 1)(lambda: plgpu.barrier_wait(smem["drained"].at[buffer]))
        for plane, value in enumerate(sums):
            combine(smem["sums"].at[buffer, self.group, plane], value, ones)
        if not cut.shared:
            self.settle()
            self.emit(number, finish(*(self.total_of(buffer, plane) for plane in range(cut.planes))))
            return following
        turn = lax.rem(item, jnp.int32(cut.settings.groups))
        plgpu.barrier_arrive(smem["summed"].at[turn])

        @pl.when(self.group == turn)
        def _end() -> None:
            plgpu.barrier_wait(smem["summed"].at[turn])
            totals = [self.total_of(buffer, plane) for plane in range(cut.planes)]
            plgpu.barrier_arrive(smem["drained"].at[buffer])
            self.emit(number, finish(*totals))

        return following

    def run(self) -> None:
        """All tiles of this warpgroup."""
        cut, smem = self.cut, self.smem
        for stage in range(cut.settings.stages):
            self.fetch(jnp.int32(stage))
        if cut.resident:
            fill = emulated_quantize if cut.emulated else quantize
            fill(self.inputs, smem["rows"], smem["unit"], smem["largest"], cut.settings.groups)
            plgpu.commit_smem()
            plgpu.barrier_arrive(smem["shared"])
        first = self.scales(jnp.int32(0))
        if cut.resident:
            plgpu.barrier_wait(smem["shared"])
        items = lax.div(jnp.maximum(self.total - self.start + self.stride - 1, 0), jnp.int32(self.stride))
        lax.fori_loop(0, items, self.tile, (first, self.units(jnp.int32(0))))
        if cut.shared:
            for last in range(2):

                @pl.when(items > last)
                def _leave(last: int = last) -> None:
                    plgpu.barrier_wait(smem["drained"].at[lax.rem(items - 1 - last, jnp.int32(2))])
