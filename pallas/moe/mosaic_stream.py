"""A streaming product of a few rows with many experts' packed weights: the decode kernels of the MoE.

Every warpgroup owns a ring of buffers and walks over its share of the work, (block, tile of 64 weight rows, depth);
bulk copies of later stages are under way while it turns the codes of the present one into operands. Weights are the
left operand of the tensor-core products, so one to four tokens cost the same. With `split` > 1 the warpgroups of a
thread block share one tile, each a part of its depth: they leave their sums in shared memory and go on, and one of them
in turn adds them up and stores the result.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Int32, UInt8

from pallas.moe.mosaic_expand import DEPTH, ROWS, SWIZZLED, blocks_of_box
from pallas.moe.mosaic_pair import (
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
    settings: Settings


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
    cut = Cut(planes, tiles, buffers, box, resident, settings)
    by_group = not resident and inputs[1].ndim == 3
    body = _body(cut, work.target is not None, by_group, finish, interpret is not None)
    smem, groups, stages, chunks = plgpu.SMEM, settings.groups, settings.stages, settings.chunks
    width = DEPTH * box * chunks
    shared = (buffers, COLUMNS, width) if cut.resident else (groups * stages, COLUMNS, width)
    layout_of_box = {"transforms": SWIZZLED} if box == 2 else {}
    kernel = plgpu.kernel(
        body,
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


def _warpgroup_barrier() -> None:
    """Waits for the warpgroup's warps; unlike `commit_smem` not for their loads from memory as well."""

    @plgpu.inline_mgpu()
    def run(_: Any) -> None:
        mgpu.utils.warpgroup_barrier()

    run()


def _body(
    cut: Cut, targeted: bool, by_group: bool, finish: Callable[..., jax.Array], emulated: bool
) -> Callable[..., None]:
    settings = cut.settings
    chunks, stages, groups = settings.chunks, settings.stages, settings.groups
    width, groups_of_scales = chunks * cut.box * DEPTH, GROUPS_OF_SCALES * cut.box
    shared = settings.split > 1
    add = emulated_accumulate if emulated else accumulate
    combine = emulated_fold if emulated else fold
    put = emulated_store if emulated else store
    put_pairs = emulated_store_pairs if emulated else store_pairs
    settle = _nothing if emulated else _warpgroup_barrier

    def body(*refs: Any, **smem: Any) -> None:
        rows_in, *refs = refs
        unit, *refs = (smem["unit"], *refs) if cut.resident else refs
        weights, scale, expert, first_row, used, *rest = refs
        target = rest.pop(0) if targeted else None
        outputs = rest
        group, block = lax.axis_index("group"), lax.axis_index("block")
        total = used[0] * cut.tiles
        if shared:
            part, start, stride = group, block, settings.blocks
        else:
            part, start, stride = 0, block * settings.groups + group, settings.blocks * settings.groups

        def locate(stage: jax.Array) -> _Place:
            # The buffers of all tiles in a row go to the warpgroups in turn.
            number = stage * settings.split + part
            item = start + lax.div(number, jnp.int32(cut.buffers)) * stride
            depth = lax.rem(number, jnp.int32(cut.buffers))
            safe = jnp.maximum(jnp.minimum(item, total - 1), 0)
            block, tile = lax.div(safe, jnp.int32(cut.tiles)), lax.rem(safe, jnp.int32(cut.tiles))
            return _Place(item < total, block, tile, depth)

        def first_stage(item: jax.Array) -> jax.Array:
            """First stage of this warpgroup that belongs to its `item`-th tile."""
            return lax.div(item * cut.buffers + settings.split - 1 - part, jnp.int32(settings.split))

        def fetch(stage: jax.Array) -> None:
            at = locate(stage)

            @pl.when(at.exists)
            def _start() -> None:
                slot = group * stages + lax.rem(stage, jnp.int32(stages))
                chosen, ready = jnp.maximum(expert[at.block], 0), smem["full"].at[slot]
                for chunk in range(chunks):
                    inputs = pl.ds((at.depth * chunks + chunk) * cut.box * PACKED_DEPTH, cut.box * PACKED_DEPTH)
                    for plane in range(cut.planes):
                        source = weights.at[chosen * cut.planes + plane, pl.ds(at.tile * ROWS, ROWS), inputs]
                        plgpu.copy_gmem_to_smem(source, smem["packed"].at[slot, chunk, plane], ready)
                if not cut.resident:
                    inputs = pl.ds(at.depth * width, width)
                    source = rows_in.at[pl.ds(first_row[at.block], COLUMNS), inputs]
                    plgpu.copy_gmem_to_smem(source, smem["rows"].at[slot], ready)

        def scales(stage: jax.Array) -> tuple[jax.Array, ...]:
            at = locate(stage)
            chosen = jnp.maximum(expert[at.block], 0)
            loaded = []
            for chunk in range(chunks):
                inputs = pl.ds((at.depth * chunks + chunk) * groups_of_scales, groups_of_scales)
                for plane in range(cut.planes):
                    source = scale.at[chosen, plane, pl.ds(at.tile * ROWS, ROWS), inputs]
                    loaded.append(plgpu.load(source, layout=scale_layout(cut.box), optimized=False))
            return tuple(loaded)

        def units(stage: jax.Array) -> tuple[jax.Array | None, ...]:
            if not by_group:
                return (None,) * chunks
            at, layout = locate(stage), unit_layout(cut.box)
            first = at.depth * chunks * groups_of_scales
            there = (pl.ds(first + chunk * groups_of_scales, groups_of_scales) for chunk in range(chunks))
            return tuple(plgpu.load(unit.at[at.block, :, x], layout=layout, optimized=False) for x in there)

        def wait(stage: jax.Array) -> None:
            plgpu.barrier_wait(smem["full"].at[group * stages + lax.rem(stage, jnp.int32(stages))])

        def tile_sums(item: jax.Array, first: tuple) -> tuple:
            """(sums of each plane, scales and units of the next stage)."""

            def one(stage: jax.Array, carry: tuple) -> tuple:
                sums, (loaded, ones) = list(carry[0]), carry[1]
                following = scales(stage + 1), units(stage + 1)
                wait(stage)
                slot = group * stages + lax.rem(stage, jnp.int32(stages))
                right = smem["rows"].at[locate(stage).depth if cut.resident else slot]
                for chunk in range(chunks):
                    for plane in range(cut.planes):
                        left, mine = smem["packed"].at[slot, chunk, plane], loaded[chunk * cut.planes + plane]
                        sums[plane] = add(sums[plane], left, mine, right, ones[chunk], cut.box, chunk * cut.box)
                settle()  # every warp has read the buffer
                fetch(stage + stages)
                return tuple(sums), following

            zero = jnp.zeros((ROWS, COLUMNS), jnp.float32)
            zero = zero if emulated else plgpu.layout_cast(zero, plgpu.Layout.WGMMA)
            return lax.fori_loop(first_stage(item), first_stage(item + 1), one, ((zero,) * cut.planes, first))

        def total_of(buffer: jax.Array, plane: int) -> jax.Array:
            parts = (smem["sums"].at[buffer, member, plane] for member in (range(groups) if shared else (group,)))
            loads = [plgpu.load(part, layout=ENDS, optimized=False) for part in parts]
            return sum(loads[1:], loads[0])

        def emit(number: jax.Array, value: jax.Array) -> None:
            tile, block = lax.rem(number, jnp.int32(cut.tiles)), lax.div(number, jnp.int32(cut.tiles))
            columns = pl.ds(tile * ROWS, ROWS)
            if targeted:
                put(outputs[0].at[:, columns], target.at[block], 0, value, ENDS)
            else:
                rows, ones = outputs
                of_tile = pl.ds(tile * (ROWS // GROUP), ROWS // GROUP)
                put_pairs(rows.at[pl.ds(block * COLUMNS, COLUMNS), columns], ones.at[block, :, of_tile], value)

        def tile(item: jax.Array, loaded: tuple) -> tuple:
            sums, following = tile_sums(item, loaded)
            number, buffer = start + item * stride, lax.rem(item, jnp.int32(2))
            block = lax.div(number, jnp.int32(cut.tiles))
            ones = None if by_group else unit if cut.resident else unit.at[block]
            if shared:
                pl.when(item > 1)(lambda: plgpu.barrier_wait(smem["drained"].at[buffer]))
            for plane, value in enumerate(sums):
                combine(smem["sums"].at[buffer, group, plane], value, ones)
            if not shared:
                settle()
                emit(number, finish(*(total_of(buffer, plane) for plane in range(cut.planes))))
                return following
            turn = lax.rem(item, jnp.int32(groups))
            plgpu.barrier_arrive(smem["summed"].at[turn])

            @pl.when(group == turn)
            def _end() -> None:
                plgpu.barrier_wait(smem["summed"].at[turn])
                totals = [total_of(buffer, plane) for plane in range(cut.planes)]
                plgpu.barrier_arrive(smem["drained"].at[buffer])
                emit(number, finish(*totals))

            return following

        for stage in range(stages):
            fetch(jnp.int32(stage))
        if cut.resident:
            fill = emulated_quantize if emulated else quantize
            fill(rows_in, smem["rows"], smem["unit"], smem["largest"], groups)
            plgpu.commit_smem()
            plgpu.barrier_arrive(smem["shared"])
        first = scales(jnp.int32(0))
        if cut.resident:
            plgpu.barrier_wait(smem["shared"])
        items = lax.div(jnp.maximum(total - start + stride - 1, 0), jnp.int32(stride))
        lax.fori_loop(0, items, tile, (first, units(jnp.int32(0))))
        if shared:
            for last in range(2):

                @pl.when(items > last)
                def _leave(last: int = last) -> None:
                    plgpu.barrier_wait(smem["drained"].at[lax.rem(items - 1 - last, jnp.int32(2))])

    return body
