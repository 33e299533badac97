"""The routed experts of many tokens with MXFP8 activations: grouped products of e4m3 numbers.

As `mosaic_grouped`, with products of twice the rate. Weights are exact: their scales fold into the codes
(`mosaic_mxfp8_expand`). Block scales of the activations fold into the values as well, relative to the largest of a
token's: e4m3 has exponents enough, what a token's largest exceeds more than 2^14 times keeps an absolute precision of
2^-18 of that largest instead of four significant bits. Sums of a box of 256 inputs are added up in float32 outside of
the tensor cores, which keep about 14 bits of them.
"""

import dataclasses
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
from pallas.moe.mosaic_expand import DEPTH, ROWS, SWIZZLED, blocks_of_box, scale_layout
from pallas.moe.mosaic_grouped import CONSUMERS, PLANES, SHARED_MEMORY, TILE, block_tokens
from pallas.moe.mosaic_stream import situ
from pallas.moe.types import PackedExperts
from pallas.moe.xla import combine
from pallas.transposed_store import emulated_store, store

WIDE = (plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(128))
"""How activations lie in shared memory: lines of 128 bytes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a grouped kernel is cut."""

    stages: int | None = None
    """Buffers; None takes as many as fit, four at most."""
    blocks: int = 132
    """Thread blocks."""
    registers: int = 232
    """Of a thread that computes."""


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
    box = blocks_of_box(rows.shape[1])
    depth_of_box, packed_width, groups = box * DEPTH, box * DEPTH // 2, box * DEPTH // 32
    count, tiles, parts = expert.shape[0], weights.shape[2] // TILE, rows.shape[1] // depth_of_box
    columns = rows.shape[0] // count
    stages = settings.stages or min(4, SHARED_MEMORY // (PLANES * TILE * packed_width + columns * depth_of_box))
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
        group, block = lax.axis_index("group"), lax.axis_index("block")
        total = used[0] * tiles
        items = lax.div(jnp.maximum(total - block + settings.blocks - 1, 0), jnp.int32(settings.blocks))

        def locate(stage: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            """(slot, block, tile, box) of a stage."""
            item = block + lax.div(stage, jnp.int32(parts)) * settings.blocks
            item = jnp.maximum(jnp.minimum(item, total - 1), 0)
            slot, at = lax.rem(stage, jnp.int32(stages)), lax.div(item, jnp.int32(tiles))
            return slot, at, lax.rem(item, jnp.int32(tiles)), lax.rem(stage, jnp.int32(parts))

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
                source = rows.at[pl.ds(at * columns, columns), pl.ds(depth * depth_of_box, depth_of_box)]
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
                there = pl.ds(tile * TILE + group * ROWS, ROWS), pl.ds(depth * groups, groups)
                loads = (scale.at[expert[at], plane, *there] for plane in range(PLANES))
                return tuple(plgpu.load(x, layout=scale_layout(box), optimized=False).astype(jnp.int32) for x in loads)

            def pairs(slot: jax.Array, levels: tuple[jax.Array, ...]) -> Any:
                """(plane, weights in registers, activations) of a buffer that has arrived."""
                for half in range(box):
                    for plane in range(PLANES):
                        source = packed.at[slot, plane, pl.ds(group * ROWS, ROWS)]
                        right = inputs.at[slot, :, pl.ds(half * DEPTH, DEPTH)]
                        yield plane, turn(source, levels[plane], box, half), right

            def products(slot: jax.Array, levels: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                def scope(*sums: Any) -> tuple[jax.Array, ...]:
                    for plane, left, right in pairs(slot, levels):
                        plgpu.wgmma(sums[plane], left, right.transpose((1, 0)))
                        plgpu.wgmma_wait(1)  # more operands at a time do not fit in registers
                    plgpu.wgmma_wait(0)
                    return tuple(x[...] for x in sums)

                return pl.run_scoped(scope, *(plgpu.ACC((ROWS, columns), jnp.float32),) * PLANES)

            def emulated_products(slot: jax.Array, levels: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                sums = [jnp.zeros((ROWS, columns), jnp.float32)] * PLANES
                for plane, left, right in pairs(slot, levels):
                    left, right = left.astype(jnp.float32), right[...].astype(jnp.float32)
                    sums[plane] += jnp.dot(left, right.T, precision=lax.Precision.HIGHEST)
                return tuple(sums)

            def one(item: jax.Array, index: jax.Array, carry: tuple) -> tuple:
                sums, loaded = carry
                stage = item * parts + index
                slot = lax.rem(stage, jnp.int32(stages))
                following = scales(stage + 1)
                levels, factors = zip(*(level_of(x, box) for x in loaded), strict=True)
                plgpu.barrier_wait(full.at[slot])
                found = (emulated_products if emulated else products)(slot, levels)
                plgpu.barrier_arrive(empty.at[slot])
                return tuple(add(*x) for x in zip(sums, found, factors, strict=True)), following

            def tile(item: jax.Array, loaded: tuple) -> tuple:
                zeros = jnp.zeros((ROWS, columns), jnp.float32)
                start = zeros if emulated else plgpu.layout_cast(zeros, layout)
                sums, following = lax.fori_loop(0, parts, partial(one, item), ((start,) * PLANES, loaded))
                _, at, tile, _ = locate(item * parts)
                there = unit.at[pl.ds(at * columns, columns)]
                counts = there[...] if emulated else plgpu.load(there, layout=layout.reduce(0), optimized=False)
                counts = lax.broadcast_in_dim(counts * operands.CODE_UNIT, (ROWS, columns), (1,))
                results = finish(*(x * counts for x in sums))
                for plane, value in enumerate(results):
                    first, offset, moved = plane * tiles * TILE + tile * TILE, group * ROWS, None
                    if len(results) == 1 and boxes_out == 2:
                        # Two tiles share a box of the interleaved output.
                        offset += lax.rem(tile, jnp.int32(2)) * TILE
                        first = lax.div(tile, jnp.int32(2)) * 2 * TILE
                    if len(results) == 1:
                        moved = partial(operands.place, blocks=boxes_out)
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
            plgpu.SMEM(
                (stages, PLANES, TILE, packed_width), jnp.uint8, **({"transforms": SWIZZLED} if box == 2 else {})
            ),
            plgpu.SMEM((stages, columns, depth_of_box), operands.E4M3, transforms=WIDE),
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
    # Slots without an expert form a last group, whose blocks are not run.
    order = grouped.plan(jnp.where(ids < 0, num_experts, ids), num_experts + 1, size)
    used = jnp.sum(order.filled.reshape(-1, size)[:, 0] & (order.expert < num_experts)).astype(jnp.int32).reshape(1)
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
