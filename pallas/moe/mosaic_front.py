"""The front of a MoE layer for one token as one kernel: router, latent down-projection, shared gate and up, routing.

Every thread block takes the same few outputs from beginning to end, as many as make one tile for each multiprocessor.
Blocks of the router have fewer outputs and more copies under way than others: a busy memory serves a block by what it
asks for, so they end first. Whoever of them counts last chooses the experts, while the others still stream. No block
ever waits for another.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf
from jaxtyping import Array, BFloat16, Float, Float32, Int32

from pallas import dispatch, inline
from pallas.gemv import xla as gemv_xla
from pallas.layouts import WIDE
from pallas.moe import mosaic_route, xla
from pallas.moe.types import Front, Routing
from pallas.precision import einsum
from pallas.transposed_store import emulated_store, store

ROWS = 64
"""Rows of a product."""
DEPTH = 64
"""Inputs of a buffer, one swizzled tile: 128 bytes."""
GROUPS = 4
"""Warpgroups of a block, which share its tile."""
COLUMNS = 8
"""Rows of x that a product takes; all but the first are empty."""
SHARE = ROWS // GROUPS
"""Outputs of a tile that a warpgroup finishes."""
STEP = GROUPS * DEPTH
"""Inputs that the warpgroups of a block take at a time, each a buffer."""
EARLIER = 8
"""How many outputs fewer a tile of the router has."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the kernel is cut."""

    height: int
    """Outputs of a tile, but for the router's."""
    stages: int = 5
    """Buffers of a warpgroup."""
    calm: int = 3
    """Buffers that it fills in blocks without a tile of the router."""
    blocks: int = 132
    """Thread blocks."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Sizes of a call."""

    sizes: tuple[int, ...]
    """Outputs of each matrix, the router first."""
    depth: int
    """Inputs."""
    cut: Settings
    emulated: bool

    @property
    def heights(self) -> tuple[int, ...]:
        """Outputs of a tile of each matrix."""
        return self.cut.height - EARLIER, *(self.cut.height,) * (len(self.sizes) - 1)

    @property
    def ends(self) -> tuple[int, ...]:
        """Tiles up to the end of each matrix."""
        return tuple(itertools.accumulate(-(-size // height) for size, height in zip(self.sizes, self.heights)))

    @property
    def parts(self) -> int:
        """Copies of a tile to each warpgroup."""
        return self.depth // STEP


def settings_for(sizes: Sequence[int]) -> Settings | None:
    """The lowest tiles of which there is at most one for each multiprocessor; None for more outputs than that."""
    blocks = dispatch.multiprocessors()
    cuts = (Settings(height=height, blocks=blocks) for height in range(2 * EARLIER, ROWS + 1, EARLIER))
    calls = (_Call(sizes=tuple(sizes), depth=STEP, cut=cut, emulated=False) for cut in cuts)
    return next((call.cut for call in calls if call.ends[-1] <= blocks), None)


def require_supported(x: jax.Array, matrices: Sequence[jax.Array], k: int) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernel does not serve."""
    arrays, sizes = (x, *matrices), [matrix.shape[0] for matrix in matrices]
    if any(array.dtype != jnp.bfloat16 for array in arrays):
        raise NotImplementedError(f"the moe front kernel serves bfloat16, got {[a.dtype.name for a in arrays]}")
    if x.shape[0] != 1:
        raise NotImplementedError(f"the moe front kernel serves one row, got {x.shape[0]}")
    if x.shape[1] % STEP or any(size < ROWS or size % 8 for size in sizes):
        raise NotImplementedError(
            f"the moe front kernel serves inputs in multiples of {STEP} and at least {ROWS} outputs in multiples of 8, "
            f"got {x.shape[1]} and {sizes}"
        )
    if settings_for(sizes) is None:
        raise NotImplementedError(
            f"the moe front kernel serves one tile a multiprocessor, got {sum(sizes)} outputs for "
            f"{dispatch.multiprocessors()} tiles of up to {ROWS}"
        )
    mosaic_route.require_supported(sizes[0], k)


def on_gpu(
    x: Float[Array, "N K"],
    router: Float[Array, "E K"],
    correction_bias: Float32[Array, " E"],
    matrices: tuple[Float[Array, "... K"], ...],
    *,
    k: int,
    scaling: float,
) -> Front:
    """See `pallas.moe.front`. Refuses with `NotImplementedError` what the kernel does not serve."""
    dispatch.require_hopper("moe front")
    flat = tuple(matrix.reshape(-1, x.shape[1]) for matrix in matrices)
    require_supported(x, (router, *flat), k)
    routing, products = differentiable(x, router, correction_bias, flat, k, scaling)
    shaped = (product.reshape(1, *matrix.shape[:-1]) for product, matrix in zip(products, matrices, strict=True))
    return Front(routing, tuple(shaped))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def differentiable(
    x: Array, router: Array, correction_bias: Array, matrices: tuple[Array, ...], k: int, scaling: float
) -> Front:
    """The kernel's values; gradients are those of ordinary products, with the choice as it was made."""
    return front(x, (router, *matrices), correction_bias, k=k, scaling=scaling)


def _forward(*args: Any) -> tuple[Front, tuple]:
    made = differentiable(*args)
    return made, (*args[:4], made.routing.ids)


def _backward(k: int, scaling: float, saved: tuple, gradient: Front) -> tuple:
    x, router, correction_bias, matrices, ids = saved

    def portable(x: Array, router: Array, matrices: tuple[Array, ...]) -> tuple:
        logits = einsum("nd,ed->ne", x.astype(jnp.float32), router.astype(jnp.float32))
        return xla.weights_of(logits, ids, scaling), gemv_xla.matmuls(x, matrices, (x.dtype,) * len(matrices))

    _, pull_back = jax.vjp(portable, x, router, matrices)
    of_x, of_router, of_matrices = pull_back((gradient.routing.weights, gradient.products))
    return of_x, of_router, jnp.zeros_like(correction_bias), of_matrices


differentiable.defvjp(_forward, _backward)


def _zeros(x: BFloat16[Array, "1 K"]) -> Int32[Array, "8"]:
    """Zeros in memory of their own; of ones that the compiler knows all calls would share one constant."""
    return jnp.minimum(lax.bitcast_convert_type(x[0, :8], jnp.int16).astype(jnp.int32) & 0x7FFF, 0)


def front(
    x: BFloat16[Array, "1 K"],
    matrices: Sequence[BFloat16[Array, "_ K"]],
    correction_bias: Float32[Array, " E"],
    *,
    k: int,
    scaling: float,
    interpret: Any = None,
    settings: Settings | None = None,
) -> Front:
    """Routing by the first matrix, [E, K], and the products with the others, in one launch."""
    sizes, emulated, smem = tuple(matrix.shape[0] for matrix in matrices), interpret is not None, plgpu.SMEM
    cut = settings or settings_for(sizes)
    assert cut is not None
    call = _Call(sizes=sizes, depth=x.shape[1], cut=cut, emulated=emulated)
    buffers, experts, spec = GROUPS * cut.stages, sizes[0], jax.ShapeDtypeStruct
    rows = jnp.pad(x, ((0, COLUMNS - 1), (0, 0))) if emulated else x  # the copy engine reads what is missing as zeros
    products = [spec((1, size), x.dtype if index else jnp.float32) for index, size in enumerate(sizes)]
    made = plgpu.kernel(
        lambda *refs, **scratch: _Warpgroup(call, k, scaling, refs, scratch).run(),
        out_type=[*products, spec((1, k), jnp.int32), spec((1, k), jnp.float32)],
        grid=(cut.blocks,),
        grid_names=("block",),
        num_threads=GROUPS,
        thread_name="group",
        scratch_types={
            "left": smem((buffers, ROWS, DEPTH), jnp.bfloat16, transforms=WIDE),
            "right": smem((buffers, COLUMNS, DEPTH), jnp.bfloat16, transforms=WIDE),
            "sums": smem((2, GROUPS, ROWS, COLUMNS), jnp.float32),
            "before": smem((GROUPS,), jnp.int32),
            "scores": smem((experts,), jnp.float32),
            "work": smem((mosaic_route.words(experts, k),), jnp.int32),
            "best": smem((mosaic_route.MOST_CHOSEN,), jnp.int32),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=buffers),
            "summed": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=2),
        },
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="moe_front",
    )(rows, *matrices, correction_bias, _zeros(x))
    logits, *others = made[: len(sizes)]
    routing = Routing(*made[len(sizes) :])
    if emulated:
        routing = mosaic_route.choose(logits, correction_bias, k=k, scaling=scaling, interpret=interpret)
    return Front(routing, tuple(others))


class _Warpgroup:
    """The work of one warpgroup of a block; built inside the kernel."""

    def __init__(self, call: _Call, k: int, scaling: float, refs: tuple[Any, ...], smem: dict[str, Any]) -> None:
        count = len(call.sizes)
        self.call, self.smem, self.x, self.matrices = call, smem, refs[0], refs[1 : count + 1]
        bias, self.counter, *outputs = refs[count + 1 :]
        self.outputs, (ids, weights) = outputs[:count], outputs[count:]
        self.group, self.block = lax.axis_index("group"), lax.axis_index("block")
        self.stages = jnp.where(self.block < call.ends[0], call.cut.stages, call.cut.calm)
        scratch = (smem[name] for name in ("scores", "work", "best"))
        refs = self.outputs[0].at[0], bias, ids.at[0], weights.at[0], *scratch
        self.select = partial(mosaic_route.select, *refs, k=k, scaling=scaling)

    def choose(self, tile: jax.Array, run: Callable[[int, jax.Array], None]) -> None:
        """`run(matrix, first row)` for the matrix of the tile; its last tile may overlap the one before."""
        call = self.call
        for index, (rows, height, end) in enumerate(zip(call.sizes, call.heights, call.ends)):
            first = call.ends[index - 1] if index else 0
            row = jnp.minimum((tile - first) * height, rows - height)
            pl.when((tile >= first) & (tile < end))(partial(run, index, row))

    def slot(self, stage: jax.Array) -> jax.Array:
        """The buffer of a stage."""
        return self.group * self.call.cut.stages + lax.rem(stage, self.stages)

    def fetch(self, stage: jax.Array) -> None:
        """Starts the copies of a stage, if there is one."""
        call, smem, slot = self.call, self.smem, self.slot(stage)
        tile = self.block + lax.div(stage, jnp.int32(call.parts)) * call.cut.blocks
        step = lax.rem(stage, jnp.int32(call.parts)) * GROUPS + self.group
        inputs = pl.ds(step * DEPTH, DEPTH)

        def read(index: int, row: jax.Array) -> None:
            height = call.heights[index]
            there = smem["left"].at[slot, pl.ds(0, height)]  # what lies below is multiplied, but never stored
            plgpu.copy_gmem_to_smem(self.matrices[index].at[pl.ds(row, height), inputs], there, smem["full"].at[slot])

        @pl.when(tile < call.ends[-1])
        def _start() -> None:
            self.choose(tile, read)
            # From a row that the tracer does not know to be the first: x has but one.
            source = self.x.at[pl.ds(lax.rem(stage, jnp.int32(1)), COLUMNS), inputs]
            plgpu.copy_gmem_to_smem(source, smem["right"].at[slot], smem["full"].at[slot])

    def tile_sum(self, item: jax.Array) -> jax.Array:
        """Products of the warpgroup's boxes of a tile."""
        call, smem = self.call, self.smem

        def one(total: Any, index: jax.Array) -> jax.Array | None:
            stage = item * call.parts + index
            slot = self.slot(stage)
            plgpu.barrier_wait(smem["full"].at[slot])
            left, right = smem["left"].at[slot], smem["right"].at[slot]
            if call.emulated:
                total += jnp.dot(left[...], right[...].T, preferred_element_type=jnp.float32)
            else:
                plgpu.wgmma(total, left, right.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                plgpu.commit_smem()
            self.fetch(stage + self.stages)
            return total if call.emulated else None

        def scope(total: Any) -> jax.Array:
            lax.fori_loop(0, call.parts, lambda index, _: one(total, index), None)
            return total[...]

        if call.emulated:
            zero = jnp.zeros((ROWS, COLUMNS), jnp.float32)
            return lax.fori_loop(0, call.parts, lambda index, total: one(total, index), zero)
        return pl.run_scoped(scope, plgpu.ACC((ROWS, COLUMNS), jnp.float32))

    def one_tile(self, item: jax.Array, _: None) -> None:
        """Sums and stores the `item`-th tile of this block."""
        call, smem, layout = self.call, self.smem, plgpu.Layout.WG_STRIDED((SHARE, COLUMNS), vec_size=1)
        sums, buffer = smem["sums"], lax.rem(item, jnp.int32(2))
        summed, first = smem["summed"].at[buffer], self.group * SHARE
        sums[buffer, self.group] = self.tile_sum(item)
        plgpu.barrier_arrive(summed)
        plgpu.barrier_wait(summed)
        mine = pl.ds(first, SHARE)
        loads = [plgpu.load(sums.at[buffer, member, mine], layout=layout) for member in range(GROUPS)]
        result = sum(loads[1:], loads[0])
        put = emulated_store if call.emulated else store

        def write(index: int, row: jax.Array) -> None:
            height, there = call.heights[index], self.outputs[index]
            put(there.at[:, pl.ds(row, height)], None, first, result.astype(there.dtype), layout, limit=height)
            if index == 0 and not call.emulated:
                self.route()

        self.choose(self.block + item * call.cut.blocks, write)

    def route(self) -> None:
        """Chooses the experts, if no logits are missing any more."""
        last = self.call.ends[0] * GROUPS - 1
        _count(self.counter, self.smem["before"].at[self.group], last)
        pl.when(self.smem["before"][self.group] == last)(self.select)

    def run(self) -> None:
        """All tiles of this block."""
        call = self.call
        for stage in range(call.cut.stages):
            pl.when(stage < self.stages)(partial(self.fetch, jnp.int32(stage)))
        items = lax.div(jnp.int32(call.ends[-1] - 1) - self.block + call.cut.blocks, jnp.int32(call.cut.blocks))
        lax.fori_loop(0, items, self.one_tile, None)


def _count(counter: Any, before: Any, last: int) -> None:
    """Leaves in `before` how many warpgroups have stored their logits before this one; the last one clears the counter.

    Whoever finds `last` sees what all of them stored.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def run(_: Any, counter: Any, before: Any) -> None:
        mgpu.utils.warpgroup_barrier()
        thread = arith.remui(mgpu.utils.thread_idx(), inline.i32(128))
        counts = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, thread, inline.i32(0)))
        with ir.InsertionPoint(counts.then_block):
            text = ".reg .pred p; fence.acq_rel.gpu; atom.add.acq_rel.gpu.global.s32 $0, [$1], 1;"
            text += f"setp.eq.s32 p, $0, {last}; @p st.global.s32 [$1], 0;"
            (found,) = inline.asm([inline.word()], text, "=&r,l,~{memory}", mgpu.utils.memref_ptr(counter))
            memref.store(found, before, [])
            scf.yield_([])
        mgpu.utils.warpgroup_barrier()

    run(counter, before)
