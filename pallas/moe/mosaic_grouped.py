"""The routed experts of many tokens: grouped products of packed weights with blocks of tokens of one expert.

Two warpgroups expand 64 weight rows each of both planes (gate and up, or both halves of the latent) into the left
operands of products with N tokens; a third starts the bulk copies. Tokens are on the narrow side, so a block may be
any multiple of eight of them and little is padding.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float32, Int32, UInt8

from pallas.moe import grouped
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
from pallas.moe.mosaic_stream import GROUPS_OF_SCALES, PACKED_DEPTH, situ
from pallas.moe.types import PackedExperts
from pallas.moe.xla import combine
from pallas.transposed_store import emulated_store, store

WIDE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""How activations lie in shared memory: lines of 128 bytes."""
CONSUMERS = 2
SHARED_MEMORY = 225_000
"""Bytes for buffers; barriers and alignment take the rest."""
PLANES = 2
TILE = CONSUMERS * ROWS
BLOCKS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
"""Tokens of a block to choose from."""
COST_OF_A_BLOCK = 24.0
"""What a block costs beside its products, in tokens."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a grouped kernel is cut."""

    stages: int | None = None
    """Buffers; None takes as many as fit, four at most."""
    blocks: int = 132
    """Thread blocks."""
    registers: int = 232
    """Of a thread that computes."""


def block_tokens(pairs: int, num_experts: int) -> int:
    """Tokens of a block for an expected even load, with a little room for loads above the mean."""
    load = max(1.0, pairs / num_experts)
    load += load**0.5
    return min(BLOCKS, key=lambda size: -(-load // size) * (size + COST_OF_A_BLOCK))


def grouped_product(
    rows: BFloat16[Array, "R K"],
    weights: UInt8[Array, "E 2 M K//2"],
    scale: UInt8[Array, "E 2 M K//32"],
    expert: Int32[Array, " blocks"],
    used: Int32[Array, "1"],
    finish: Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]],
    width: int,
    settings: Settings,
    name: str,
    interpret: Any = None,
) -> BFloat16[Array, "R width"]:
    """Row blocks of `rows`, interleaved, times the planes of their experts' weights.

    `finish` maps both products to one array (the output has M columns, interleaved) or to two (2 M columns).
    """
    box = blocks_of_box(rows.shape[1])
    width_of_box, packed_width, groups_of_scales = box * DEPTH, box * PACKED_DEPTH, box * GROUPS_OF_SCALES
    count, tiles, parts = expert.shape[0], weights.shape[2] // TILE, rows.shape[1] // width_of_box
    columns = rows.shape[0] // count
    buffer = PLANES * TILE * packed_width + 2 * columns * width_of_box
    stages = settings.stages or min(4, SHARED_MEMORY // buffer)
    emulated = interpret is not None
    put, turn = (emulated_store, emulated_expand) if emulated else (store, expand)
    layout, boxes_out = plgpu.Layout.WGMMA, blocks_of_box(width)
    layout_of_box = {"transforms": SWIZZLED} if box == 2 else {}

    def body(
        rows: Any,
        weights: Any,
        scale: Any,
        expert: Any,
        used: Any,
        out: Any,
        packed: Any,
        inputs: Any,
        full: Any,
        empty: Any,
    ) -> None:
        group, block = lax.axis_index("group"), lax.axis_index("block")
        total = used[0] * tiles
        items = lax.div(jnp.maximum(total - block + settings.blocks - 1, 0), jnp.int32(settings.blocks))

        def locate(stage: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            """(slot, block, tile, depth) of a stage."""
            depth = lax.rem(stage, jnp.int32(parts))
            item = block + lax.div(stage, jnp.int32(parts)) * settings.blocks
            item = jnp.maximum(jnp.minimum(item, total - 1), 0)
            slot = lax.rem(stage, jnp.int32(stages))
            return slot, lax.div(item, jnp.int32(tiles)), lax.rem(item, jnp.int32(tiles)), depth

        @pl.when(group == CONSUMERS)
        def _produce() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def fetch(stage: jax.Array, _: None) -> None:
                slot, at, tile, depth = locate(stage)
                pl.when(stage >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                there = pl.ds(tile * TILE, TILE), pl.ds(depth * packed_width, packed_width)
                for plane in range(PLANES):
                    source = weights.at[expert[at] * PLANES + plane, *there]
                    plgpu.copy_gmem_to_smem(source, packed.at[slot, plane], full.at[slot])
                source = rows.at[pl.ds(at * columns, columns), pl.ds(depth * width_of_box, width_of_box)]
                plgpu.copy_gmem_to_smem(source, inputs.at[slot], full.at[slot])

            def drain(stage: jax.Array, _: None) -> None:
                pl.when(stage >= stages)(lambda: plgpu.barrier_wait(empty.at[lax.rem(stage, jnp.int32(stages))]))

            lax.fori_loop(0, items * parts, fetch, None)
            lax.fori_loop(items * parts, items * parts + stages, drain, None)

        @pl.when(group < CONSUMERS)
        def _consume() -> None:
            plgpu.set_max_registers(settings.registers, action="increase")

            def scales(stage: jax.Array) -> tuple[jax.Array, ...]:
                _, at, tile, depth = locate(stage)
                there = pl.ds(tile * TILE + group * ROWS, ROWS), pl.ds(depth * groups_of_scales, groups_of_scales)
                loads = (scale.at[expert[at], plane, *there] for plane in range(PLANES))
                return tuple(plgpu.load(x, layout=scale_layout(box), optimized=False).astype(jnp.int32) for x in loads)

            def operands(slot: jax.Array, loaded: tuple) -> Iterator[tuple[int, jax.Array, Any]]:
                """(plane, weights in registers, activations) of a buffer that has arrived."""
                for block in range(box):
                    for plane in range(PLANES):
                        source = packed.at[slot, plane, pl.ds(group * ROWS, ROWS)]
                        right = inputs.at[slot, :, pl.ds(block * DEPTH, DEPTH)]
                        yield plane, turn(source, loaded[plane], box, block), right

            def products(item: jax.Array, first: tuple) -> tuple:
                def scope(*sums: Any) -> tuple:
                    def one(index: jax.Array, loaded: tuple) -> tuple:
                        stage = item * parts + index
                        slot = lax.rem(stage, jnp.int32(stages))
                        following = scales(stage + 1)
                        plgpu.barrier_wait(full.at[slot])
                        for plane, left, right in operands(slot, loaded):
                            plgpu.wgmma(sums[plane], left, right.transpose((1, 0)))
                            plgpu.wgmma_wait(1)  # more operands at a time do not fit in registers
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(empty.at[slot])
                        return following

                    following = lax.fori_loop(0, parts, one, first)
                    return tuple(x[...] for x in sums), following

                return pl.run_scoped(scope, *(plgpu.ACC((ROWS, columns), jnp.float32),) * PLANES)

            def emulated_products(item: jax.Array, first: tuple) -> tuple:
                def one(index: jax.Array, carry: tuple) -> tuple:
                    sums, loaded = list(carry[0]), carry[1]
                    stage = item * parts + index
                    slot = lax.rem(stage, jnp.int32(stages))
                    following = scales(stage + 1)
                    plgpu.barrier_wait(full.at[slot])
                    for plane, left, right in operands(slot, loaded):
                        sums[plane] += jnp.dot(left, right[...].T, preferred_element_type=jnp.float32)
                    plgpu.barrier_arrive(empty.at[slot])
                    return tuple(sums), following

                return lax.fori_loop(0, parts, one, ((jnp.zeros((ROWS, columns), jnp.float32),) * PLANES, first))

            def tile(item: jax.Array, loaded: tuple) -> tuple:
                sums, following = (emulated_products if emulated else products)(item, loaded)
                _, at, tile, _ = locate(item * parts)
                results = finish(*sums)
                for plane, value in enumerate(results):
                    first, offset, moved = plane * tiles * TILE + tile * TILE, group * ROWS, None
                    if len(results) == 1 and boxes_out == 2:
                        # Two tiles share a box of the interleaved output.
                        offset += lax.rem(tile, jnp.int32(2)) * TILE
                        first = lax.div(tile, jnp.int32(2)) * 2 * TILE
                    if len(results) == 1:
                        moved = partial(place, blocks=boxes_out)
                    wide = TILE * (boxes_out if len(results) == 1 else 1)
                    target = out.at[pl.ds(at * columns, columns), pl.ds(first, wide)]
                    put(target, None, offset, value.astype(jnp.bfloat16), layout, moved)
                return following

            lax.fori_loop(0, items, tile, scales(jnp.int32(0)))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows.shape[0], width), jnp.bfloat16),
        grid=(settings.blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="group",
        scratch_types=(
            plgpu.SMEM((stages, PLANES, TILE, packed_width), jnp.uint8, **layout_of_box),
            plgpu.SMEM((stages, columns, width_of_box), jnp.bfloat16, transforms=WIDE),
            plgpu.Barrier(num_arrivals=PLANES + 1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, approx_math=True
        ),
        interpret=interpret,
        kernel_name=name,
    )
    # The copy engine counts five dimensions, two of which the swizzle takes.
    result = kernel(rows, weights.reshape(-1, *weights.shape[2:]), scale, expert, used)
    return interleave(result) if emulated and width == tiles * TILE else result


def experts(
    x: Float[Array, "N L"],
    ids: Int32[Array, "N k"],
    weights: Float32[Array, "N k"],
    experts: PackedExperts,
    beta: float,
    linear_beta: float,
    dtype: jnp.dtype | None = None,
    interpret: Any = None,
    settings: Settings | None = None,
) -> Float[Array, "N L"]:
    """`api.experts` for any number of tokens."""
    num_experts, _, inner = experts.gate_up_packed.shape[:3]
    latent = x.shape[1]
    size = block_tokens(ids.size, num_experts)
    # Slots without an expert form a last group, whose blocks are not run.
    order = grouped.plan(jnp.where(ids < 0, num_experts, ids), num_experts + 1, size)
    used = jnp.sum(order.filled.reshape(-1, size)[:, 0] & (order.expert < num_experts)).astype(jnp.int32).reshape(1)
    rows = grouped.dispatch(interleave(x), order)
    cut = settings or Settings()
    hidden = grouped_product(
        rows,
        experts.gate_up_packed,
        experts.gate_up_scale,
        order.expert,
        used,
        lambda gate, up: (situ(gate, up, beta, linear_beta),),
        inner,
        cut,
        "moe_grouped_up",
        interpret,
    )
    halves = (num_experts, PLANES, latent // PLANES)
    outputs = grouped_product(
        hidden,
        experts.down_packed.reshape(*halves, -1),
        experts.down_scale.reshape(*halves, -1),
        order.expert,
        used,
        lambda lower, upper: (lower, upper),
        latent,
        cut,
        "moe_grouped_down",
        interpret,
    )
    return combine(grouped.collect(outputs, order), ids, weights, dtype or x.dtype)
