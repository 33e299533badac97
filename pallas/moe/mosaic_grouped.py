"""The routed experts of many tokens: grouped products of packed weights with blocks of tokens of one expert.

Two warpgroups expand 64 weight rows each of both planes (gate and up, or both halves of the latent) into the left
operands of products with N tokens; a third starts the bulk copies. Tokens are on the narrow side, so a block may be
any multiple of eight of them and little is padding.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float32, Int32, UInt8

from pallas import dispatch, warp_product
from pallas.layouts import WIDE
from pallas.moe import grouped
from pallas.moe.mosaic_boxes import CONSUMERS, PLANES, TILE, Cut, Settings, Walk
from pallas.moe.mosaic_expand import (
    ROWS,
    blocks_of_box,
    emulated_expand,
    expand,
    interleave,
    place,
)
from pallas.moe.mosaic_stream import situ
from pallas.moe.types import PackedExperts
from pallas.moe.xla import combine
from pallas.transposed_store import emulated_store, store

BLOCKS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
"""Tokens of a block to choose from."""
COST_OF_A_BLOCK = 24.0
"""What a block costs beside its products, in tokens."""


def block_tokens(pairs: int, num_experts: int) -> int:
    """Tokens of a block for an expected even load, with a little room for loads above the mean."""
    load = max(1.0, pairs / num_experts)
    load += load**0.5
    return min(BLOCKS, key=lambda size: -(-load // size) * (size + COST_OF_A_BLOCK))


def _emulated_add(total: jax.Array, left: jax.Array, right: Any) -> jax.Array:
    return total + jnp.dot(left, right[...].T, preferred_element_type=jnp.float32)


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
    cut = Cut.of(rows, weights, expert.shape[0], settings)
    columns, tiles, parts, stages = cut.columns, cut.tiles, cut.parts, cut.stages
    emulated = interpret is not None
    put, turn = (emulated_store, emulated_expand) if emulated else (store, expand)
    zeros, add = (jnp.zeros, _emulated_add) if emulated else (warp_product.zeros, warp_product.accumulate_held)
    boxes_out = blocks_of_box(width)

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
        group = lax.axis_index("group")
        walk = Walk(cut, used, expert)

        @pl.when(group == CONSUMERS)
        def _produce() -> None:
            walk.produce(weights, rows, packed, inputs, full, empty)

        @pl.when(group < CONSUMERS)
        def _consume() -> None:
            plgpu.set_max_registers(settings.registers, action="increase")

            def scales(stage: jax.Array) -> tuple[jax.Array, ...]:
                return walk.scales(scale, group, stage)

            def products(item: jax.Array, first: tuple) -> tuple:
                def scope(*sums: Any) -> tuple:
                    def one(index: jax.Array, loaded: tuple) -> tuple:
                        stage = item * parts + index
                        slot = lax.rem(stage, jnp.int32(stages))
                        following = scales(stage + 1)
                        plgpu.barrier_wait(full.at[slot])
                        for plane, left, right in walk.operands(packed, inputs, group, slot, loaded, turn):
                            plgpu.wgmma(sums[plane], left, right.transpose((1, 0)))
                            plgpu.wgmma_wait(1)  # more operands at a time do not fit in registers
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(empty.at[slot])
                        return following

                    following = lax.fori_loop(0, parts, one, first)
                    return tuple(x[...] for x in sums), following

                return pl.run_scoped(scope, *(plgpu.ACC((ROWS, columns), jnp.float32),) * PLANES)

            def carried_products(item: jax.Array, first: tuple) -> tuple:
                def one(index: jax.Array, carry: tuple) -> tuple:
                    sums, loaded = list(carry[0]), carry[1]
                    stage = item * parts + index
                    slot = lax.rem(stage, jnp.int32(stages))
                    following = scales(stage + 1)
                    plgpu.barrier_wait(full.at[slot])
                    for plane, left, right in walk.operands(packed, inputs, group, slot, loaded, turn):
                        sums[plane] = add(sums[plane], left, right)
                    plgpu.barrier_arrive(empty.at[slot])
                    return tuple(sums), following

                return lax.fori_loop(0, parts, one, ((zeros((ROWS, columns)),) * PLANES, first))

            def tile(item: jax.Array, loaded: tuple) -> tuple:
                sums, following = (carried_products if emulated or settings.warps else products)(item, loaded)
                _, at, tile, _ = walk.locate(item * parts)
                moved = partial(place, blocks=boxes_out)
                walk.store(finish(*sums), out, at, tile, group, boxes_out, put, moved)
                return following

            lax.fori_loop(0, walk.items, tile, scales(jnp.int32(0)))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows.shape[0], width), jnp.bfloat16),
        grid=(settings.blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="group",
        scratch_types=cut.scratch(jnp.bfloat16, WIDE),
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
    order, used = grouped.plan_used(ids, num_experts, size)
    rows = grouped.dispatch(interleave(x), order)
    settings = settings or Settings(blocks=dispatch.multiprocessors(), warps=dispatch.warps_multiply())
    hidden = grouped_product(
        rows,
        experts.gate_up_packed,
        experts.gate_up_scale,
        order.expert,
        used,
        lambda gate, up: (situ(gate, up, beta, linear_beta),),
        inner,
        settings,
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
        settings,
        "moe_grouped_down",
        interpret,
    )
    return combine(grouped.collect(outputs, order), ids, weights, dtype or x.dtype)
