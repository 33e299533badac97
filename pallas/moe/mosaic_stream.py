"""A streaming product of a few rows with many experts' packed weights: the decode kernels of the MoE.

Every warpgroup owns a ring of buffers and walks over its share of the work, (block, tile of 64 weight rows, depth);
bulk copies of later stages are under way while it expands the codes of the present one. Weights are the left operand
of the tensor-core products, so one to sixteen tokens cost the same. With `split` > 1 the warpgroups of a thread block
share one tile, each a part of its depth, and add their sums through shared memory.
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

from pallas.moe.mosaic_expand import (
    DEPTH,
    ROWS,
    SWIZZLED,
    blocks_of_box,
    emulated_expand,
    expand,
    interleave,
    place,
    scale_layout,
)
from pallas.transposed_store import emulated_store, store

WIDE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
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
    target: Int32[Array, "U N"] | None
    """Row of the output of each row of a block, negative for none; None puts row n of block u at u * N + n."""


class Cut(NamedTuple):
    """Static sizes of one call."""

    planes: int
    tiles: int
    buffers: int
    """Buffers that the depth of a tile fills."""
    box: int
    """Blocks of 128 inputs in a box."""
    columns: int
    resident: bool
    settings: Settings


def situ(gate: jax.Array, up: jax.Array, beta: float, linear_beta: float) -> jax.Array:
    """`pallas.activation.situ` on float32 registers."""
    return beta * jnp.tanh(gate / beta) / (1.0 + jnp.exp(-gate)) * (linear_beta * jnp.tanh(up / linear_beta))


def stream(
    rows: BFloat16[Array, "R K"],
    weights: UInt8[Array, "E P M K//2"],
    scale: UInt8[Array, "E P M K//32"],
    work: Work,
    out: jax.ShapeDtypeStruct,
    finish: Callable[..., jax.Array],
    columns: int,
    settings: Settings,
    name: str,
    interpret: Any = None,
) -> jax.Array:
    """Rows of `out`, [*, M], from `finish(plane 0, plane 1, ...)` of the products with the planes of the weights.

    `rows` holds the activations interleaved. With exactly N = 8 rows all blocks share them.
    Without targets the output is interleaved as well.
    """
    planes, tiles, depth = weights.shape[1], weights.shape[2] // ROWS, rows.shape[1]
    box = blocks_of_box(depth)
    buffers = depth // (DEPTH * box * settings.chunks)
    cut = Cut(planes, tiles, buffers, box, columns, rows.shape[0] == columns <= 8, settings)
    body = _body(cut, work.target is not None, out.dtype, finish, interpret is not None)
    smem, groups, stages, chunks = plgpu.SMEM, settings.groups, settings.stages, settings.chunks
    width = DEPTH * box * chunks
    shared = (buffers, columns, width) if cut.resident else (groups * stages, columns, width)
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
            "rows": smem(shared, jnp.bfloat16, transforms=WIDE),
            "sums": smem((groups, planes, ROWS, columns), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=chunks * planes + (not cut.resident), num_barriers=groups * stages),
            "shared": plgpu.Barrier(num_arrivals=buffers),
            "summed": plgpu.Barrier(num_arrivals=groups),
            "drained": plgpu.Barrier(num_arrivals=groups),
        },
        compiler_params=PARAMS,
        interpret=interpret,
        kernel_name=name,
    )
    tables = work.expert, work.first_row, work.used, *(() if work.target is None else (work.target,))
    # The copy engine counts five dimensions, two of which the swizzle takes.
    result = kernel(rows, weights.reshape(-1, *weights.shape[2:]), scale, *tables)
    return interleave(result) if interpret is not None and work.target is None else result


class _Place(NamedTuple):
    """Where a stage of a warpgroup lies."""

    exists: jax.Array
    block: jax.Array
    tile: jax.Array
    depth: jax.Array


def _body(
    cut: Cut, targeted: bool, dtype: Any, finish: Callable[..., jax.Array], emulated: bool
) -> Callable[..., None]:
    settings = cut.settings
    chunks, stages, columns = settings.chunks, settings.stages, cut.columns
    share, width, groups_of_scales = ROWS // settings.split, chunks * cut.box * DEPTH, GROUPS_OF_SCALES * cut.box
    layout = plgpu.Layout.WG_STRIDED((share, columns), vec_size=1)
    turn = emulated_expand if emulated else expand
    put = emulated_store if emulated else store

    def body(rows_in: Any, weights: Any, scale: Any, expert: Any, first_row: Any, used: Any, *rest: Any, **smem: Any):
        target, out = (rest[0], rest[1]) if targeted else (None, rest[0])
        group, block = lax.axis_index("group"), lax.axis_index("block")
        total = used[0] * cut.tiles
        if settings.split > 1:
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
                    source = rows_in.at[pl.ds(first_row[at.block], columns), inputs]
                    plgpu.copy_gmem_to_smem(source, smem["rows"].at[slot], ready)

        def scales(stage: jax.Array) -> tuple[jax.Array, ...]:
            at = locate(stage)
            chosen = jnp.maximum(expert[at.block], 0)
            loaded = []
            for chunk in range(chunks):
                inputs = pl.ds((at.depth * chunks + chunk) * groups_of_scales, groups_of_scales)
                for plane in range(cut.planes):
                    source = scale.at[chosen, plane, pl.ds(at.tile * ROWS, ROWS), inputs]
                    loaded.append(plgpu.load(source, layout=scale_layout(cut.box), optimized=False).astype(jnp.int32))
            return tuple(loaded)

        def operands(stage: jax.Array, loaded: tuple[jax.Array, ...]) -> Any:
            """(plane, weights in registers, activations) of a stage that has arrived."""
            slot = group * stages + lax.rem(stage, jnp.int32(stages))
            depth = locate(stage).depth
            right = smem["rows"].at[depth if cut.resident else slot]
            for chunk in range(chunks):
                for plane in range(cut.planes):
                    for block in range(cut.box):
                        source, scale = smem["packed"].at[slot, chunk, plane], loaded[chunk * cut.planes + plane]
                        inputs = pl.ds((chunk * cut.box + block) * DEPTH, DEPTH)
                        yield plane, turn(source, scale, cut.box, block), right.at[:, inputs]

        def wait(stage: jax.Array) -> None:
            plgpu.barrier_wait(smem["full"].at[group * stages + lax.rem(stage, jnp.int32(stages))])

        def tile_sums(item: jax.Array, first: tuple[jax.Array, ...]) -> tuple:
            """(sums of each plane, scales of the next stage)."""

            def scope(*sums: Any) -> tuple:
                def one(stage: jax.Array, loaded: tuple) -> tuple:
                    following = scales(stage + 1)
                    wait(stage)
                    for plane, left, right in operands(stage, loaded):
                        plgpu.wgmma(sums[plane], left, right.transpose((1, 0)))
                        plgpu.wgmma_wait(1)  # more operands at a time do not fit in registers
                    plgpu.wgmma_wait(0)
                    plgpu.commit_smem()
                    fetch(stage + stages)
                    return following

                following = lax.fori_loop(first_stage(item), first_stage(item + 1), one, first)
                return tuple(x[...] for x in sums), following

            return pl.run_scoped(scope, *(plgpu.ACC((ROWS, columns), jnp.float32),) * cut.planes)

        def emulated_sums(item: jax.Array, first: tuple[jax.Array, ...]) -> tuple:
            def one(stage: jax.Array, carry: tuple) -> tuple:
                sums, loaded = list(carry[0]), carry[1]
                following = scales(stage + 1)
                wait(stage)
                for plane, left, right in operands(stage, loaded):
                    sums[plane] += jnp.dot(left, right[...].T, preferred_element_type=jnp.float32)
                fetch(stage + stages)
                return tuple(sums), following

            zeros = (jnp.zeros((ROWS, columns), jnp.float32),) * cut.planes
            return lax.fori_loop(first_stage(item), first_stage(item + 1), one, (zeros, first))

        offset = part * share if settings.split > 1 else 0
        members = range(settings.groups) if settings.split > 1 else (group,)

        def totals() -> list[jax.Array]:
            """This warpgroup's share of the sums of each plane."""
            values = []
            for plane in range(cut.planes):
                loads = [
                    plgpu.load(smem["sums"].at[member, plane, pl.ds(offset, share)], layout=layout)
                    for member in members
                ]
                values.append(sum(loads[1:], loads[0]))
            return values

        def emit(item: jax.Array, values: list[jax.Array]) -> None:
            number = start + item * stride
            tile, block = lax.rem(number, jnp.int32(cut.tiles)), lax.div(number, jnp.int32(cut.tiles))
            value = finish(*values).astype(dtype)
            if targeted:
                there = out.at[:, pl.ds(tile * ROWS, ROWS)]
                put(there, target.at[block], offset, value, layout)
            else:
                box = blocks_of_box(cut.tiles * ROWS)
                in_box = box * DEPTH // ROWS
                columns_out = pl.ds(lax.div(tile, jnp.int32(in_box)) * box * DEPTH, box * DEPTH)
                there = out.at[pl.ds(block * columns, columns), columns_out]
                moved = partial(place, blocks=box)
                put(there, None, offset + lax.rem(tile, jnp.int32(in_box)) * ROWS, value, layout, moved)

        def tile(item: jax.Array, loaded: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            sums, following = (emulated_sums if emulated else tile_sums)(item, loaded)
            shared = settings.split > 1
            if shared:
                pl.when(item > 0)(lambda: plgpu.barrier_wait(smem["drained"]))
            for plane, value in enumerate(sums):
                smem["sums"][group, plane] = value
            if shared:
                plgpu.barrier_arrive(smem["summed"])
                plgpu.barrier_wait(smem["summed"])
            else:
                plgpu.commit_smem()
            values = totals()
            if shared:
                plgpu.barrier_arrive(smem["drained"])
            else:
                plgpu.commit_smem()
            emit(item, values)
            return following

        if cut.resident:

            @pl.when(group == 0)
            def _share() -> None:
                for index in range(smem["rows"].shape[0]):
                    source = rows_in.at[:, pl.ds(index * width, width)]
                    plgpu.copy_gmem_to_smem(source, smem["rows"].at[index], smem["shared"])

        for stage in range(stages):
            fetch(jnp.int32(stage))
        first = scales(jnp.int32(0))
        if cut.resident:
            plgpu.barrier_wait(smem["shared"])
        items = lax.div(jnp.maximum(total - start + stride - 1, 0), jnp.int32(stride))
        lax.fori_loop(0, items, tile, first)
        if settings.split > 1:
            pl.when(items > 0)(lambda: plgpu.barrier_wait(smem["drained"]))

    return body
