"""The routed experts of many tokens with MXFP8 activations: grouped products of e4m3 numbers.

As `mosaic_grouped`, with products of twice the rate. Weights are exact: their scales fold into the codes
(`mosaic_mxfp8_expand`). Block scales of the activations fold into the values as well, relative to the largest of a
token's: e4m3 has exponents enough, what a token's largest exceeds more than 2^14 times keeps an absolute precision of
2^-18 of that largest instead of four significant bits. Sums of a box of 256 inputs are added up in float32 outside of
the tensor cores, which keep about 14 bits of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Int32, UInt8

from pallas.moe import grouped, mxfp8
from pallas.moe import mosaic_mxfp8_expand as operands
from pallas.moe.mosaic_boxes import CONSUMERS, PLANES, TILE, Cut, Settings, Walk
from pallas.moe.mosaic_expand import ROWS, blocks_of_box
from pallas.moe.mosaic_grouped import block_tokens
from pallas.moe.mosaic_pair import WIDE
from pallas.moe.mosaic_stream import situ
from pallas.moe.types import PackedExperts
from pallas.moe.xla import combine
from pallas.transposed_store import emulated_store, store


def grouped_product(
    rows: Float8e4m3fn[Array, "R K"],
    unit: Float32[Array, " R"],
    weights: UInt8[Array, "E 2 M K//2"],
    scale: UInt8[Array, "E 2 M K//32"],
    expert: Int32[Array, " blocks"],
    used: Int32[Array, "1"],
    finish: Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]],
    width: int,
    settings: Settings,
    name: str,
    interpret: Any = None,
) -> Float[Array, "R width"]:
    """Row blocks of `rows`, interleaved and times `unit`, times the planes of their experts' weights, in bfloat16.

    `finish` maps both products to one array (the output has M columns, interleaved) or to two (2 M columns).
    """
    cut = Cut.of(rows, weights, expert.shape[0], settings)
    columns, tiles, parts, stages = cut.columns, cut.tiles, cut.parts, cut.stages
    emulated = interpret is not None
    put = emulated_store if emulated else store
    turn = operands.emulated_expand if emulated else operands.expand
    level_of = operands.emulated_levels if emulated else operands.levels
    add = operands.emulated_promote if emulated else operands.promote
    layout, boxes_out = plgpu.Layout.WGMMA, blocks_of_box(width)

    def body(
        rows: Any,
        unit: Any,
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

            def products(slot: jax.Array, levels: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                def scope(*sums: Any) -> tuple[jax.Array, ...]:
                    for plane, left, right in walk.operands(packed, inputs, group, slot, levels, turn):
                        plgpu.wgmma(sums[plane], left, right.transpose((1, 0)))
                        plgpu.wgmma_wait(1)  # more operands at a time do not fit in registers
                    plgpu.wgmma_wait(0)
                    return tuple(x[...] for x in sums)

                return pl.run_scoped(scope, *(plgpu.ACC((ROWS, columns), jnp.float32),) * PLANES)

            def emulated_products(slot: jax.Array, levels: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                sums = [jnp.zeros((ROWS, columns), jnp.float32)] * PLANES
                for plane, left, right in walk.operands(packed, inputs, group, slot, levels, turn):
                    left, right = left.astype(jnp.float32), right[...].astype(jnp.float32)
                    sums[plane] += jnp.dot(left, right.T, precision=lax.Precision.HIGHEST)
                return tuple(sums)

            def one(item: jax.Array, index: jax.Array, carry: tuple) -> tuple:
                sums, loaded = carry
                stage = item * parts + index
                slot = lax.rem(stage, jnp.int32(stages))
                following = scales(stage + 1)
                levels, factors = zip(*(level_of(x, cut.box) for x in loaded), strict=True)
                plgpu.barrier_wait(full.at[slot])
                found = (emulated_products if emulated else products)(slot, levels)
                plgpu.barrier_arrive(empty.at[slot])
                return tuple(add(*x) for x in zip(sums, found, factors, strict=True)), following

            def tile(item: jax.Array, loaded: tuple) -> tuple:
                zeros = jnp.zeros((ROWS, columns), jnp.float32)
                start = zeros if emulated else plgpu.layout_cast(zeros, layout)
                sums, following = lax.fori_loop(0, parts, partial(one, item), ((start,) * PLANES, loaded))
                _, at, tile, _ = walk.locate(item * parts)
                there = unit.at[pl.ds(at * columns, columns)]
                counts = there[...] if emulated else plgpu.load(there, layout=layout.reduce(0), optimized=False)
                counts = lax.broadcast_in_dim(counts * operands.CODE_UNIT, (ROWS, columns), (1,))
                moved = partial(operands.place, blocks=boxes_out)
                walk.store(finish(*(x * counts for x in sums)), out, at, tile, group, boxes_out, put, moved)
                return following

            lax.fori_loop(0, walk.items, tile, scales(jnp.int32(0)))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows.shape[0], width), jnp.bfloat16),
        grid=(settings.blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="group",
        scratch_types=cut.scratch(operands.E4M3, WIDE),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, approx_math=True
        ),
        interpret=interpret,
        kernel_name=name,
    )
    # The copy engine counts five dimensions, two of which the swizzle takes.
    result = kernel(rows, unit, weights.reshape(-1, *weights.shape[2:]), scale, expert, used)
    return operands.interleave(result) if emulated and width == tiles * TILE else result


def _dispatch(values: Float8e4m3fn[Array, "N L"], order: grouped.Plan) -> Float8e4m3fn[Array, "R L"]:
    """The input of every row; XLA gathers words in half the time of bytes."""
    words = lax.bitcast_convert_type(values.reshape(values.shape[0], -1, 4), jnp.uint32)
    rows = lax.bitcast_convert_type(grouped.dispatch(words, order), operands.E4M3)
    return rows.reshape(rows.shape[0], -1)


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
    """`api.experts` with `activations="mxfp8"` for any number of tokens."""
    num_experts, _, inner = experts.gate_up_packed.shape[:3]
    latent = x.shape[1]
    size = block_tokens(ids.size, num_experts)
    order, used = grouped.plan_used(ids, num_experts, size)
    run = partial(grouped_product, expert=order.expert, used=used, settings=settings or Settings(), interpret=interpret)
    tokens = mxfp8.quantize(x, latent)
    up = partial(run, finish=lambda gate, up: (situ(gate, up, beta, linear_beta),), width=inner, name="moe_mxfp8_up")
    hidden = up(
        _dispatch(operands.interleave(tokens.values), order),
        grouped.dispatch(mxfp8.unit(tokens.scale), order)[:, 0],
        experts.gate_up_packed,
        experts.gate_up_scale,
    )
    hidden = mxfp8.quantize(hidden, inner)
    halves = (num_experts, PLANES, latent // PLANES)
    down = partial(run, finish=lambda lower, upper: (lower, upper), width=latent, name="moe_mxfp8_down")
    outputs = down(
        hidden.values,
        mxfp8.unit(hidden.scale)[:, 0],
        experts.down_packed.reshape(*halves, -1),
        experts.down_scale.reshape(*halves, -1),
    )
    return combine(grouped.collect(outputs, order), ids, weights, dtype or x.dtype)
