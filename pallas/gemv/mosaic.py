"""The skinny product as one streaming Mosaic GPU kernel: at most sixteen rows of activations against a large matrix.

Weights are the left operand of products of single warps (`pallas.warp_product`), so one to eight rows cost the same.
Those of 8 bits become float16 in registers, and the sums are multiplied with their output's scale. Each warpgroup keeps
a ring of buffers filled by bulk copies; the warpgroups of a thread block share a tile of up to 64 weight rows, each a
part of its depth, and add their sums through shared memory, or take tiles of their own where matrices are shallow.
Tiles are as high as gives every block the same work; matrices with very few rows are cut along their depth as well,
into slices whose float32 sums are added outside.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int8

from pallas import inline, warp_product
from pallas.dispatch import BLACKWELL, HOPPER, MULTIPROCESSORS, multiprocessors, require_capability
from pallas.gemv import widen, xla
from pallas.gemv.finish import Finish
from pallas.gemv.int8 import BOX, Int8Matrix
from pallas.layouts import WIDE
from pallas.transposed_store import emulated_store, store

ROWS = 64
MOST_TOKENS = 16
DEPTH = 64
"""Inputs of a buffer, one swizzled tile: 128 bytes."""
SLICES = (1, 2, 3, 4, 5, 6, 7, 8)
HEIGHTS = (64, 56, 48)
"""Of tiles; lower ones leave too little under way in a ring."""
BYTES_PER_US, JOIN_US, SUM_US = 4.3e6, 0.3, 1.2
"""Of the memory; of the warpgroups' sums at the end of a tile; of adding slices in the kernel that takes them."""
SHALLOW = 512
"""Inputs up to which warpgroups share no tile."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the kernel is cut."""

    groups: int = 4
    """Warpgroups of a thread block, which share a tile."""
    stages: int = 3
    """Buffers of a warpgroup; each has barriers to be prepared."""
    slices: int = 1
    """Parts of the depth that different thread blocks take."""
    blocks: int = MULTIPROCESSORS
    """Thread blocks."""
    shared: bool = True
    """Whether the warpgroups of a thread block share a tile; otherwise each takes one of its own."""
    height: int = ROWS
    """Outputs of a tile, a multiple of 8 up to the 64 of a product."""

    @property
    def members(self) -> int:
        """Warpgroups that share a tile."""
        return self.groups if self.shared else 1

    @property
    def workers(self) -> int:
        """Takers of tiles."""
        return self.blocks * self.groups // self.members

    def unit(self, *, narrow: bool) -> int:
        """What the inputs must be a multiple of."""
        return self.members * self.slices * (BOX if narrow else DEPTH)


def settings_for(
    rows: Sequence[int], depth: int, *, narrow: bool = False, finished: bool = False, whole: bool = False
) -> Settings:
    """The cut of the shortest expected time, and tiles of their own for shallow matrices.

    Matrices of few tiles are cut into lower ones, so that every block gets as many, or along their depth. Sums that
    are `finished` in the kernel are those of the whole depth, of tiles that a block's warpgroups share. If `whole`,
    tiles do not overlap.
    """
    blocks = multiprocessors()
    if depth <= SHALLOW and not finished:
        # Many small rings: a tile is a few boxes, and between two of them nothing is under way.
        return Settings(shared=False, stages=2, blocks=2 * blocks)
    kinds = itertools.product((1,) if finished else SLICES, HEIGHTS)
    cuts = [Settings(slices=slices, height=height, blocks=blocks) for slices, height in kinds]
    usable = [cut for cut in cuts if depth % cut.unit(narrow=narrow) == 0]
    if whole:
        usable = [cut for cut in usable if not any(count % cut.height for count in rows)]

    def expected_us(cut: Settings) -> float:
        tiles = sum(-(-count // cut.height) for count in rows)
        turns = -(-tiles * cut.slices // cut.workers)
        bytes_of_turn = cut.workers * cut.height * depth // cut.slices * (1 if narrow else 2)
        parts = 2 * 4 * cut.slices * sum(rows) * 8 / BYTES_PER_US  # written and read, of eight rows
        return turns * (bytes_of_turn / BYTES_PER_US + JOIN_US) + (SUM_US + parts if cut.slices > 1 else 0.0)

    return min(usable, key=expected_us, default=cuts[0])


def matmuls(
    x: Float[Array, "M K"],
    weights: Sequence[Float[Array, "_ K"] | Int8[Array, "_ K"]],
    dtypes: Sequence[jnp.dtype] | None = None,
    interpret: Any = None,
    settings: Settings | None = None,
    scales: Sequence[Float32[Array, " _"]] = (),
) -> tuple[Float[Array, "M _"], ...]:
    """`api.matmuls`; `scales` of the outputs where the weights are int8."""
    tokens, depth = x.shape
    sizes = tuple(matrix.shape[0] for matrix in weights)
    dtypes = tuple(dtypes or (x.dtype,) * len(sizes))
    narrow = bool(scales)
    cut = settings or settings_for(sizes, depth, narrow=narrow)
    for matrix in weights:
        require_supported(x, matrix, cut, narrow=narrow)
    columns = 8 if tokens <= 8 else 16
    if columns > 8 or interpret is not None:
        # The copy engine reads what is missing of one tile of eight rows as zeros.
        x = jnp.pad(x, ((0, columns - tokens), (0, 0)))
    x = widen.to_half(x) if narrow else x
    kinds = (jnp.dtype(jnp.float32),) * len(sizes) if cut.slices > 1 else dtypes
    call = Call(
        tokens=tokens,
        columns=columns,
        sizes=sizes,
        dtypes=kinds,
        depth=depth,
        cut=cut,
        narrow=narrow,
        emulated=interpret is not None,
    )
    sums = kernel(call, interpret)(x, *weights, *scales)
    return tuple(jnp.sum(part, axis=0).astype(dtype) for part, dtype in zip(sums, dtypes))


def require_supported(x: jax.Array, weights: jax.Array, cut: Settings, *, narrow: bool) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernel does not serve."""
    wanted = jnp.dtype(jnp.int8 if narrow else jnp.bfloat16)
    if x.dtype != jnp.bfloat16 or weights.dtype != wanted:
        raise NotImplementedError(f"gemv mosaic serves bfloat16 and {wanted}, got {x.dtype} and {weights.dtype}")
    if x.shape[0] > MOST_TOKENS:
        raise NotImplementedError(f"gemv mosaic serves up to {MOST_TOKENS} rows, got {x.shape[0]}")
    unit = cut.unit(narrow=narrow)
    if weights.shape[0] < ROWS or weights.shape[0] % 8 or x.shape[1] % unit:
        raise NotImplementedError(
            f"gemv mosaic serves at least {ROWS} outputs in multiples of 8 and inputs in multiples of {unit}, "
            f"got {weights.shape[0]} and {x.shape[1]}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Sizes of a call."""

    tokens: int
    columns: int
    """Rows of x and, of them, what a product takes: 8 or 16."""
    sizes: tuple[int, ...]
    dtypes: tuple[jnp.dtype, ...]
    depth: int
    cut: Settings
    narrow: bool
    emulated: bool
    finish: Finish | None = None
    """What becomes of the sums of the one matrix; nothing else than rounding, if there is none."""
    heads: int = 1
    """Parts of the outputs that have inputs of their own, of as many channels of x each."""

    @property
    def kind(self) -> Any:
        """Of the operands of products."""
        return jnp.float16 if self.narrow else jnp.bfloat16

    @property
    def box(self) -> int:
        """Inputs of a copy."""
        return BOX if self.narrow else DEPTH

    @property
    def parts(self) -> int:
        """Copies of a tile to each warpgroup."""
        return self.depth // (self.box * self.cut.members * self.cut.slices)

    @property
    def share(self) -> int:
        """Outputs of a tile that a warpgroup finishes."""
        return ROWS // self.cut.members

    @property
    def ends(self) -> tuple[int, ...]:
        """Tiles up to the end of each matrix."""
        return tuple(itertools.accumulate(-(-rows // self.cut.height) for rows in self.sizes))

    @property
    def total(self) -> int:
        """Tiles of all slices."""
        return self.ends[-1] * self.cut.slices

    @property
    def out_types(self) -> list[jax.ShapeDtypeStruct]:
        """Of the kernel."""
        if self.finish:
            return self.finish.outputs(self.sizes[0], self.cut.height)
        kinds = zip(self.sizes, self.dtypes)
        return [jax.ShapeDtypeStruct((self.cut.slices, self.tokens, rows), dtype) for rows, dtype in kinds]

    @property
    def layout(self) -> Any:
        """How a finished part lies in registers."""
        strided = plgpu.Layout.WG_STRIDED((self.share, self.columns), vec_size=1)
        return strided if self.cut.shared else plgpu.Layout.WGMMA


class _Warpgroup:
    """The work of one warpgroup of a block; built inside the kernel."""

    def __init__(self, call: Call, x: Any, refs: tuple[Any, ...], smem: dict[str, Any]) -> None:
        count, cut = len(call.sizes), call.cut
        self.call, self.x, self.smem = call, x, smem
        behind = len(refs) - len(call.out_types)
        scaled = 2 * count if call.narrow else count
        self.matrices, self.scales, self.extras = refs[:count], refs[count:scaled], refs[scaled:behind]
        self.outputs = refs[behind:]
        self.group, block = lax.axis_index("group"), lax.axis_index("block")
        self.worker = block if cut.shared else self.group * cut.blocks + block
        shared = (self.group, self.group * call.share) if cut.shared else (jnp.int32(0), jnp.int32(0))
        self.member, self.first_row = shared

    def choose(self, tile: jax.Array, run: Callable[[int, jax.Array], None]) -> None:
        """`run(matrix, first row)` for the matrix of the tile; its last tile may overlap the one before."""
        for index, (rows, end) in enumerate(zip(self.call.sizes, self.call.ends)):
            first = self.call.ends[index - 1] if index else 0
            row = jnp.minimum((tile - first) * self.call.cut.height, rows - self.call.cut.height)
            if len(self.call.sizes) == 1:
                run(index, row)
            else:
                pl.when((tile >= first) & (tile < end))(partial(run, index, row))

    def fetch(self, stage: jax.Array) -> None:
        """Starts the copies of a stage, if there is one."""
        call, cut, smem = self.call, self.call.cut, self.smem
        item = self.worker + lax.div(stage, jnp.int32(call.parts)) * cut.workers

        @pl.when(item < call.total)
        def _start() -> None:
            tile, piece = lax.div(item, jnp.int32(cut.slices)), lax.rem(item, jnp.int32(cut.slices))
            slot = self.slot(stage)
            step = (piece * call.parts + lax.rem(stage, jnp.int32(call.parts))) * cut.members + self.member
            channels = inputs = pl.ds(step * call.box, call.box)

            def read(index: int, row: jax.Array) -> None:
                source = self.matrices[index].at[pl.ds(row, cut.height), channels]
                target = smem["left"].at[slot]
                target = target if cut.height == ROWS else target.at[pl.ds(0, cut.height)]
                plgpu.copy_gmem_to_smem(source, target, smem["full"].at[slot])

            self.choose(tile, read)
            # From a row that the tracer does not know to be the first: x may have fewer.
            rows = pl.ds(lax.rem(stage, jnp.int32(1)), call.columns)
            if call.heads > 1:
                head = lax.div(tile * cut.height, jnp.int32(call.sizes[0] // call.heads))
                inputs = pl.ds(head * (self.x.shape[1] // call.heads) + step * call.box, call.box)
            plgpu.copy_gmem_to_smem(self.x.at[rows, inputs], smem["right"].at[slot], smem["full"].at[slot])

    def slot(self, stage: jax.Array) -> jax.Array:
        """The buffer of a stage."""
        stages = self.call.cut.stages
        return self.group * stages + lax.rem(stage, jnp.int32(stages))

    def operands(self, slot: jax.Array) -> Iterator[tuple[Any, Any]]:
        """Weights and activations of a buffer: bfloat16 as it lies, codes in halves through registers."""
        left, right = self.smem["left"], self.smem["right"]
        turn = widen.emulated_widen if self.call.emulated else widen.widen
        if not self.call.narrow:
            yield left.at[slot], right.at[slot]
        else:
            for half in range(2):
                yield turn(left.at[slot], half), right.at[slot, :, pl.ds(half * DEPTH, DEPTH)]

    def multipliers(self, tile: jax.Array) -> jax.Array:
        """Scales of this warpgroup's part of a tile."""
        call, layout, shape = self.call, self.call.layout, (self.call.share, self.call.columns)
        by_row = widen.emulated_by_row if call.emulated else widen.by_row
        found = jnp.zeros(shape, jnp.float32)
        found = found if call.emulated else plgpu.layout_cast(found, layout)
        for index, (rows, end) in enumerate(zip(call.sizes, call.ends)):
            first = call.ends[index - 1] if index else 0
            row = jnp.clip((tile - first) * call.cut.height, 0, rows - call.cut.height) + self.first_row
            values = by_row(self.scales[index], row, shape, layout)
            if len(call.sizes) == 1:
                return values
            found += values * ((tile >= first) & (tile < end)).astype(jnp.float32)
        return found

    def tile_sum(self, item: jax.Array) -> jax.Array:
        """Products of the warpgroup's boxes of a tile."""
        call = self.call

        def one(index: jax.Array, total: jax.Array) -> jax.Array:
            stage = item * call.parts + index
            slot = self.slot(stage)
            plgpu.barrier_wait(self.smem["full"].at[slot])
            for weights, inputs in self.operands(slot):
                total = self.accumulate(total, weights, inputs)
            if not call.emulated:
                inline.synchronize()  # every warp has read the buffer
            self.fetch(stage + call.cut.stages)
            return total

        shape = ROWS, call.columns
        zeros = jnp.zeros(shape, jnp.float32) if call.emulated else warp_product.zeros(shape)
        return lax.fori_loop(0, call.parts, one, zeros)

    def accumulate(self, total: jax.Array, weights: Any, inputs: Any) -> jax.Array:
        """`total` plus the products of a box."""
        if self.call.emulated:
            return total + jnp.dot(weights[...], inputs[...].T, preferred_element_type=jnp.float32)
        if self.call.narrow:
            return warp_product.accumulate_held(total, weights, inputs)
        return warp_product.accumulate(total, [weights], inputs)

    def joined(self, buffer: jax.Array, value: jax.Array) -> jax.Array:
        """This warpgroup's part of the sum of all."""
        sums, summed = self.smem["sums"], self.smem["summed"]
        sums[buffer, self.group] = value
        plgpu.barrier_arrive(summed.at[buffer])
        plgpu.barrier_wait(summed.at[buffer])
        mine, layout = pl.ds(self.first_row, self.call.share), self.call.layout
        loads = [plgpu.load(sums.at[buffer, i, mine], layout=layout) for i in range(self.call.cut.groups)]
        return sum(loads[1:], loads[0])

    def one_tile(self, item: jax.Array, prepared: Any) -> None:
        """Sums, scales and stores the `item`-th tile of this worker; `prepared` serves all of them."""
        call, cut, finish = self.call, self.call.cut, self.call.finish
        number = self.worker + item * cut.workers
        tile, piece = lax.div(number, jnp.int32(cut.slices)), lax.rem(number, jnp.int32(cut.slices))
        # Long before they are needed.
        factor = self.multipliers(tile) if call.narrow else None
        first = jnp.minimum(tile * cut.height, call.sizes[0] - cut.height)
        begun = finish.begin(self, first) if finish else None
        result = self.tile_sum(item)
        if cut.shared:
            result = self.joined(lax.rem(item, jnp.int32(2)), result)
        if factor is not None:
            result = result * (factor * widen.HALF_SCALE)
        if finish:
            finish.put(self, (prepared, begun), item, first, result)
            return
        put = emulated_store if call.emulated else store

        def write(index: int, row: jax.Array) -> None:
            target = self.outputs[index].at[piece, :, pl.ds(row, cut.height)]
            limit = None if cut.height == ROWS else cut.height
            kind = call.dtypes[index]
            rounded = widen.to_half(result) if kind == jnp.float16 else result.astype(kind)
            put(target, None, self.first_row, rounded, call.layout, limit=limit)

        self.choose(tile, write)

    def run(self) -> None:
        """All tiles of this worker."""
        call, finish = self.call, self.call.finish
        for stage in range(call.cut.stages):
            self.fetch(jnp.int32(stage))
        prepared = finish.prepare(self) if finish else None
        items = lax.div(jnp.int32(call.total - 1) - self.worker + call.cut.workers, jnp.int32(call.cut.workers))
        lax.fori_loop(0, items, lambda item, _: self.one_tile(item, prepared), None)


def kernel(call: Call, interpret: Any) -> Any:
    """Takes x, matrices, their scales, what `finish` asks for."""
    cut, smem = call.cut, plgpu.SMEM
    buffers = cut.groups * cut.stages
    left = {"transforms": widen.SWIZZLED if call.narrow else WIDE}
    joint = {
        "sums": smem((2, cut.groups, ROWS, call.columns), jnp.float32),
        "summed": plgpu.Barrier(num_arrivals=cut.groups, num_barriers=2),
    }
    return plgpu.kernel(
        lambda x, *refs, **scratch: _Warpgroup(call, x, refs, scratch).run(),
        out_type=call.out_types,
        grid=(cut.blocks,),
        grid_names=("block",),
        num_threads=cut.groups,
        thread_name="group",
        scratch_types={
            "left": smem((buffers, ROWS, call.box), jnp.int8 if call.narrow else jnp.bfloat16, **left),
            "right": smem((buffers, call.columns, call.box), call.kind, transforms=WIDE),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=buffers),
            **(joint if cut.shared else {}),
            **(call.finish.scratch(cut.groups) if call.finish else {}),
        },
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="gemv_int8" if call.narrow else "gemv",
    )


def on_gpu(
    x: Float[Array, "M K"], weights: tuple[Float[Array, "_ K"] | Int8Matrix, ...], dtypes: tuple[jnp.dtype, ...]
) -> tuple[Float[Array, "M _"], ...]:
    """`matmuls`, refusing where there is no GPU that it was compiled for.

    Gradients are those of ordinary products; int8 has none.
    """
    require_capability("gemv mosaic", HOPPER, BLACKWELL)
    narrow = [matrix for matrix in weights if isinstance(matrix, Int8Matrix)]
    if not narrow:
        return _differentiable(x, weights, dtypes)
    if len(narrow) < len(weights):
        raise NotImplementedError("gemv mosaic serves matrices of one kind, got int8 beside others")
    return matmuls(x, [matrix.codes for matrix in narrow], dtypes, scales=[matrix.scale for matrix in narrow])


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _differentiable(x: Array, weights: tuple[Array, ...], dtypes: tuple[jnp.dtype, ...]) -> tuple[Array, ...]:
    return matmuls(x, weights, dtypes)


def _forward(x: Array, weights: tuple[Array, ...], dtypes: tuple[jnp.dtype, ...]) -> tuple:
    return matmuls(x, weights, dtypes), (x, weights)


def _backward(dtypes: tuple[jnp.dtype, ...], saved: tuple, gradient: tuple[Array, ...]) -> tuple:
    _, pull_back = jax.vjp(lambda x, weights: xla.matmuls(x, weights, dtypes), *saved)
    return pull_back(gradient)


_differentiable.defvjp(_forward, _backward)
