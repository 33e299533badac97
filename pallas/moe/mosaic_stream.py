"""A streaming product of a few rows with many experts' packed weights: the decode kernels of the MoE.

Every warpgroup owns a ring of buffers and walks over its share of the work, (block, tile of 64 weight rows, depth);
bulk copies of later stages are under way while it expands the codes of the present one. Weights are the left operand
of the tensor-core products, so one to sixteen tokens cost the same. With `split` > 1 the warpgroups of a thread block
share one tile, each a part of its depth, and add their sums through shared memory.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Int32, UInt8

from pallas.moe.mosaic_expand import DEPTH, ROWS, SCALE_LAYOUT, emulated_expand, expand, interleave, place
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
    """Blocks of 128 inputs in a buffer."""
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
    parts: int
    """Stages of a warpgroup per tile."""
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

    `rows` holds the activations interleaved in blocks of 128 inputs. With exactly N = 8 rows all blocks share them.
    Without targets the output is interleaved as well.
    """
    planes, tiles, depth = weights.shape[1], weights.shape[2] // ROWS, rows.shape[1]
    parts = depth // (DEPTH * settings.chunks * settings.split)
    cut = Cut(planes, tiles, parts, columns, rows.shape[0] == columns <= 8, settings)
    body = _body(cut, work.target is not None, out.dtype, finish, interpret is not None)
    smem, groups, stages, chunks = plgpu.SMEM, settings.groups, settings.stages, settings.chunks
    shared = (depth // DEPTH, columns, DEPTH) if cut.resident else (groups * stages, columns, DEPTH * chunks)
    kernel = plgpu.kernel(
        body,
        out_type=out,
        grid=(settings.blocks,),
        grid_names=("block",),
        num_threads=groups,
        thread_name="group",
        scratch_types={
            "packed": smem((groups * stages, chunks, planes, ROWS, PACKED_DEPTH), jnp.uint8),
            "rows": smem(shared, jnp.bfloat16, transforms=WIDE),
            "sums": smem((2 if settings.split > 1 else 1, groups, planes, ROWS, columns), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=chunks + (not cut.resident), num_barriers=groups * stages),
            "shared": plgpu.Barrier(num_arrivals=depth // DEPTH),
            "summed": plgpu.Barrier(num_arrivals=groups, num_barriers=2),
        },
        compiler_params=PARAMS,
        interpret=interpret,
        kernel_name=name,
    )
    tables = work.expert, work.first_row, work.used, *(() if work.target is None else (work.target,))
    result = kernel(rows, weights, scale, *tables)
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
    share = ROWS // settings.split
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
            item = start + lax.div(stage, jnp.int32(cut.parts)) * stride
            depth = lax.rem(stage, jnp.int32(cut.parts)) * settings.split + part
            safe = jnp.maximum(jnp.minimum(item, total - 1), 0)
            block, tile = lax.div(safe, jnp.int32(cut.tiles)), lax.rem(safe, jnp.int32(cut.tiles))
            return _Place(item < total, block, tile, depth)

        def fetch(stage: jax.Array) -> None:
            at = locate(stage)

            @pl.when(at.exists)
            def _start() -> None:
                slot = group * stages + lax.rem(stage, jnp.int32(stages))
                chosen, ready = expert[at.block], smem["full"].at[slot]
                for chunk in range(chunks):
                    inputs = pl.ds((at.depth * chunks + chunk) * PACKED_DEPTH, PACKED_DEPTH)
                    source = weights.at[chosen, :, pl.ds(at.tile * ROWS, ROWS), inputs]
                    plgpu.copy_gmem_to_smem(source, smem["packed"].at[slot, chunk], ready)
                if not cut.resident:
                    inputs = pl.ds(at.depth * chunks * DEPTH, chunks * DEPTH)
                    source = rows_in.at[pl.ds(first_row[at.block], columns), inputs]
                    plgpu.copy_gmem_to_smem(source, smem["rows"].at[slot], ready)

        def scales(stage: jax.Array) -> tuple[jax.Array, ...]:
            at = locate(stage)
            chosen = expert[at.block]
            loaded = []
            for chunk in range(chunks):
                inputs = pl.ds((at.depth * chunks + chunk) * GROUPS_OF_SCALES, GROUPS_OF_SCALES)
                for plane in range(cut.planes):
                    source = scale.at[chosen, plane, pl.ds(at.tile * ROWS, ROWS), inputs]
                    loaded.append(plgpu.load(source, layout=SCALE_LAYOUT, optimized=False).astype(jnp.int32))
            return tuple(loaded)

        def operands(stage: jax.Array, loaded: tuple[jax.Array, ...]) -> Any:
            """(plane, weights in registers, activations) of a stage that has arrived."""
            slot = group * stages + lax.rem(stage, jnp.int32(stages))
            depth = locate(stage).depth
            for chunk in range(chunks):
                if cut.resident:
                    right = smem["rows"].at[depth * chunks + chunk]
                else:
                    right = smem["rows"].at[slot, :, pl.ds(chunk * DEPTH, DEPTH)]
                for plane in range(cut.planes):
                    left = turn(smem["packed"].at[slot, chunk, plane], loaded[chunk * cut.planes + plane])
                    yield plane, left, right

        def wait(stage: jax.Array) -> None:
            plgpu.barrier_wait(smem["full"].at[group * stages + lax.rem(stage, jnp.int32(stages))])

        def tile_sums(item: jax.Array, first: tuple[jax.Array, ...]) -> tuple:
            """(sums of each plane, scales of the next stage)."""

            def scope(*sums: Any) -> tuple:
                def one(index: jax.Array, loaded: tuple) -> tuple:
                    stage = item * cut.parts + index
                    following = scales(stage + 1)
                    wait(stage)
                    for plane, left, right in operands(stage, loaded):
                        plgpu.wgmma(sums[plane], left, right.transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    plgpu.commit_smem()
                    fetch(stage + stages)
                    return following

                following = lax.fori_loop(0, cut.parts, one, first)
                return tuple(x[...] for x in sums), following

            return pl.run_scoped(scope, *(plgpu.ACC((ROWS, columns), jnp.float32),) * cut.planes)

        def emulated_sums(item: jax.Array, first: tuple[jax.Array, ...]) -> tuple:
            def one(index: jax.Array, carry: tuple) -> tuple:
                sums, loaded = list(carry[0]), carry[1]
                stage = item * cut.parts + index
                following = scales(stage + 1)
                wait(stage)
                for plane, left, right in operands(stage, loaded):
                    sums[plane] += jnp.dot(left, right[...].T, preferred_element_type=jnp.float32)
                fetch(stage + stages)
                return tuple(sums), following

            zeros = (jnp.zeros((ROWS, columns), jnp.float32),) * cut.planes
            return lax.fori_loop(0, cut.parts, one, (zeros, first))

        def emit(item: jax.Array, buffer: jax.Array) -> None:
            at = locate(item * cut.parts)
            offset = part * share if settings.split > 1 else 0
            members = range(settings.groups) if settings.split > 1 else (group,)
            values = []
            for plane in range(cut.planes):
                loads = [
                    plgpu.load(smem["sums"].at[buffer, member, plane, pl.ds(offset, share)], layout=layout)
                    for member in members
                ]
                values.append(sum(loads[1:], loads[0]))
            value = finish(*values).astype(dtype)
            if targeted:
                there = out.at[:, pl.ds(at.tile * ROWS, ROWS)]
                put(there, target.at[at.block], offset, value, layout)
            else:
                columns_out = pl.ds(lax.div(at.tile, jnp.int32(2)) * DEPTH, DEPTH)
                there = out.at[pl.ds(at.block * columns, columns), columns_out]
                put(there, None, offset + lax.rem(at.tile, jnp.int32(2)) * ROWS, value, layout, place)

        def tile(item: jax.Array, loaded: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            sums, following = (emulated_sums if emulated else tile_sums)(item, loaded)
            buffer = lax.rem(item, jnp.int32(2)) if settings.split > 1 else jnp.int32(0)
            for plane, value in enumerate(sums):
                smem["sums"][buffer, group, plane] = value
            if settings.split > 1:
                plgpu.barrier_arrive(smem["summed"].at[buffer])
                plgpu.barrier_wait(smem["summed"].at[buffer])
            else:
                plgpu.commit_smem()
            emit(item, buffer)
            if settings.split == 1:
                plgpu.commit_smem()
            return following

        if cut.resident:

            @pl.when(group == 0)
            def _share() -> None:
                for index in range(smem["rows"].shape[0]):
                    source = rows_in.at[:, pl.ds(index * DEPTH, DEPTH)]
                    plgpu.copy_gmem_to_smem(source, smem["rows"].at[index], smem["shared"])

        for stage in range(stages):
            fetch(jnp.int32(stage))
        first = scales(jnp.int32(0))
        if cut.resident:
            plgpu.barrier_wait(smem["shared"])
        items = lax.div(jnp.maximum(total - start + stride - 1, 0), jnp.int32(stride))
        lax.fori_loop(0, items, tile, first)

    return body
