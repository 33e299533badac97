"""The routed experts of one token as one kernel.

A thread block takes a part of one expert's inner width from beginning to end: these rows of gate and up, SiTU, and what
they add to every output. What lies between the two products never leaves the block, so no block waits for another, and
weights of the second product are on their way while the first one ends. The sum over parts and experts is left to the
kernel that takes it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas import dispatch
from pallas.moe.mosaic_expand import DEPTH, ROWS, SWIZZLED, blocks_of_box
from pallas.moe.mosaic_pair import CODE_UNIT, COLUMNS, E4M3, TOKENS, WIDE, emulated_store_pairs
from pallas.moe.mosaic_quantize import emulated_quantize, quantize
from pallas.moe.mosaic_stream import PACKED_DEPTH, PARAMS, Cut, Settings, Warpgroup, situ
from pallas.moe.mosaic_token_down import Down, down_of, emulated_product, keep_pairs, product, scale_layout
from pallas.moe.mxfp4 import GROUP
from pallas.moe.types import PackedExperts

ONE_TILE, SEVERAL_TILES = Settings(stages=2), Settings(groups=3, split=3, stages=3)
"""For parts of one tile and of several, whose sums four warpgroups have no registers for."""


def settings_for(part: int) -> Settings:
    """How the kernel is cut for parts of so many inputs; all warpgroups of a block share its tiles."""
    return ONE_TILE if part == ROWS else SEVERAL_TILES


def cut_of(inner: int, latent: int, experts: int) -> Down:
    """The cut of the second product: as many parts as there are multiprocessors for, in whole tiles."""
    buffer, tiles = 2 * ROWS * blocks_of_box(latent) * PACKED_DEPTH, inner // ROWS
    parts = {count: inner // count for count in range(1, tiles + 1) if tiles % count == 0}
    cuts = {count: down_of(part, latent, buffer, settings_for(part).groups) for count, part in parts.items()}
    usable = {count: cut for count, cut in cuts.items() if cut is not None}
    at_once = [count for count in usable if count * experts <= dispatch.multiprocessors()]
    return usable[max(at_once, default=min(usable))]


def experts(
    x: Float[Array, "1 L"],
    ids: Int32[Array, "1 k"],
    weights: Float32[Array, "1 k"],
    packed: PackedExperts,
    beta: float,
    linear_beta: float,
    dtype: jnp.dtype | None = None,
    interpret: Any = None,
    settings: Settings | None = None,
    down: Down | None = None,
) -> Float[Array, "1 L"]:
    """`api.experts` for one token."""
    down = down or cut_of(packed.gate_up_packed.shape[2], x.shape[1], ids.shape[1])
    settings = settings or settings_for(down.part)
    finish = partial(situ, beta=beta, linear_beta=linear_beta)
    sums = partial_sums(x, ids[0], weights[0], packed, finish, settings, down, interpret)
    return jnp.sum(sums, axis=0).astype(dtype or x.dtype)[None]


def partial_sums(
    x: Float[Array, "1 L"],
    ids: Int32[Array, " k"],
    weights: Float32[Array, " k"],
    packed: PackedExperts,
    finish: Callable[..., jax.Array],
    settings: Settings,
    down: Down,
    interpret: Any,
) -> Float32[Array, "parts L"]:
    """What each part of each chosen expert adds; zeros for a slot without an expert."""
    gate_up, latent = packed.gate_up_packed, x.shape[1]
    tiles, box = gate_up.shape[2] // ROWS, blocks_of_box(latent)
    buffers, parts = latent // (DEPTH * box), tiles * ROWS // down.part
    cut = Cut(
        planes=2,
        tiles=tiles,
        buffers=buffers,
        box=box,
        resident=True,
        by_group=False,
        targeted=False,
        emulated=interpret is not None,
        settings=settings,
    )
    smem, groups, slots = plgpu.SMEM, settings.groups, settings.groups * settings.stages
    layout_of_box = {"transforms": SWIZZLED} if box == 2 else {}
    kernel = plgpu.kernel(
        lambda *refs, **scratch: _Part(cut, down, finish, refs, scratch).run(),
        out_type=jax.ShapeDtypeStruct((ids.shape[0] * parts, latent), jnp.float32),
        grid=(ids.shape[0] * parts,),
        grid_names=("block",),
        num_threads=groups,
        thread_name="group",
        scratch_types={
            "ring": plgpu.RefUnion(
                smem((slots, 1, 2, ROWS, box * PACKED_DEPTH), jnp.uint8, **layout_of_box),
                smem((slots, down.room, down.held, down.line), jnp.uint8, transforms=down.transforms),
            ),
            "rows": smem((buffers, COLUMNS, cut.width), E4M3, transforms=WIDE),
            "hidden": smem((COLUMNS, down.width), E4M3, transforms=WIDE),
            "unit": smem((TOKENS,), jnp.float32),
            "hidden_unit": smem((TOKENS, down.width // GROUP), jnp.float32),
            "largest": smem((groups, 4, TOKENS), jnp.int32),
            "sums": smem((2, groups, 2, ROWS, TOKENS), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            "filled": plgpu.Barrier(num_arrivals=down.lines * down.copies, num_barriers=slots),
            "shared": plgpu.Barrier(num_arrivals=groups),
            "summed": plgpu.Barrier(num_arrivals=groups, num_barriers=groups),
            "drained": plgpu.Barrier(num_arrivals=1, num_barriers=2),
            "made": plgpu.Barrier(num_arrivals=down.part // ROWS),
        },
        compiler_params=PARAMS,
        interpret=interpret,
        kernel_name="moe_token",
    )
    first = gate_up.reshape(-1, *gate_up.shape[2:]), packed.gate_up_scale
    return kernel(x, *first, packed.down_packed, packed.down_scale, ids, weights)


class _Part(Warpgroup):
    """One warpgroup of a block; its buffers hold weights of the first product, then of the second."""

    def __init__(
        self, cut: Cut, down: Down, finish: Callable[..., jax.Array], refs: tuple[Any, ...], smem: dict[str, Any]
    ) -> None:
        x, weights, scale, self.down_weights, self.down_scale, ids, factors, self.out = refs
        packed, left = smem["ring"]
        smem = {**smem, "packed": packed, "left": left}
        super().__init__(cut, finish, (x, weights, scale, ids, None, (1,), self.out), smem)
        self.down, self.block, self.items = down, lax.axis_index("block"), down.part // ROWS
        parts = cut.tiles // self.items
        slot, self.piece = lax.div(self.block, jnp.int32(parts)), lax.rem(self.block, jnp.int32(parts))
        self.start, self.stride = slot * cut.tiles + self.piece * self.items, 1
        self.total = self.start + self.items
        self.chosen, self.exists = jnp.maximum(ids[slot], 0), ids[slot] >= 0
        self.factor = factors[slot] * CODE_UNIT
        self.before = self.first_stage(jnp.int32(self.items))
        """Stages of the first product that are this warpgroup's."""
        groups = cut.settings.groups
        self.stages = lax.div(jnp.int32(down.stages + groups - 1) - self.group, jnp.int32(groups))
        """Stages of the second one."""

    def outputs_of(self, stage: jax.Array) -> jax.Array:
        """First output of a stage of the second product."""
        return (self.group + stage * self.cut.settings.groups) * self.down.rows

    def fetch(self, stage: jax.Array) -> None:
        """Starts the copies of a stage of either product, if there is one."""
        super().fetch(stage)
        later = stage - self.before
        pl.when((later >= 0) & (later < self.stages))(partial(self.fetch_down, stage, later))

    def fetch_down(self, stage: jax.Array, later: jax.Array) -> None:
        """Starts the copies of stage `later` of the second product."""
        down, slot = self.down, self.slot(stage)
        each = down.rows // down.copies
        for line in range(down.lines):
            inputs = pl.ds((self.piece * down.lines + line) * down.line, down.line)
            for copy in range(down.copies):
                source = self.down_weights.at[self.chosen, pl.ds(self.outputs_of(later) + copy * each, each), inputs]
                there = self.smem["left"].at[slot, line, pl.ds(copy * each, each)]
                plgpu.copy_gmem_to_smem(source, there, self.smem["filled"].at[slot])

    def emit(self, number: jax.Array, value: jax.Array) -> None:
        """Keeps the hidden numbers of a tile as pairs."""
        tile, hidden, unit = number - self.start, self.smem["hidden"], self.smem["hidden_unit"]
        if self.cut.emulated:
            groups = pl.ds(tile * (ROWS // GROUP), ROWS // GROUP)
            emulated_store_pairs(hidden.at[:, pl.ds(tile * ROWS, ROWS)], unit.at[:, groups], value)
        else:
            keep_pairs(hidden, unit, tile, value)
            plgpu.commit_smem()
        plgpu.barrier_arrive(self.smem["made"])

    def down_scales(self, later: jax.Array) -> tuple[jax.Array, ...]:
        """Scale bytes of a stage of the second product: of each tile and line."""
        down = self.down
        first = jnp.minimum(self.outputs_of(later), down.outputs - down.rows)  # also where there is no such stage
        loaded = []
        for tile in range(down.tiles):
            for line in range(down.lines):
                inputs = pl.ds((self.piece * down.lines + line) * down.groups, down.groups)
                source = self.down_scale.at[self.chosen, pl.ds(first + tile * ROWS, ROWS), inputs]
                loaded.append(plgpu.load(source, layout=scale_layout(down.groups), optimized=False))
        return tuple(loaded)

    def down_stage(self, later: jax.Array, loaded: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Outputs of a stage of the second product; returns the scales of the next one."""
        smem, stage = self.smem, self.before + later
        multiply = emulated_product if self.cut.emulated else product
        following = self.down_scales(later + 1)
        slot = self.slot(stage)
        plgpu.barrier_wait(smem["filled"].at[slot])
        there = self.out.at[self.block, pl.ds(self.outputs_of(later), self.down.rows)]
        right = smem["hidden"], smem["hidden_unit"]
        multiply(smem["left"].at[slot], loaded, *right, there, self.factor, self.exists, self.down)
        self.settle()  # every warp has read the buffer
        self.fetch(stage + self.cut.settings.stages)
        return following

    def run(self) -> None:
        """Everything of this warpgroup."""
        cut, smem = self.cut, self.smem
        for stage in range(cut.settings.stages):
            self.fetch(jnp.int32(stage))
        fill = emulated_quantize if cut.emulated else quantize
        fill(self.inputs, smem["rows"], smem["unit"], smem["largest"], cut.settings.groups)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem["shared"])
        first = self.scales(jnp.int32(0))
        plgpu.barrier_wait(smem["shared"])
        lax.fori_loop(0, self.items, self.tile, (first, (None,)))
        loaded = self.down_scales(jnp.int32(0))
        plgpu.barrier_wait(smem["made"])
        lax.fori_loop(0, self.stages, self.down_stage, loaded)
        for last in range(min(2, self.items)):
            plgpu.barrier_wait(smem["drained"].at[(self.items - 1 - last) % 2])
