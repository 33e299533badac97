"""The skinny product as one streaming Mosaic GPU kernel: at most sixteen rows of activations against a large matrix.

Weights are the left operand of the tensor-core products, so one to eight rows cost the same. Each warpgroup keeps a
ring of buffers filled by bulk copies; the warpgroups of a thread block share a tile of 64 weight rows, each a part of
its depth, and add their sums through shared memory. Matrices with few rows are cut along their depth as well, into
slices whose float32 sums are added outside.
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
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas.dispatch import require_hopper
from pallas.gemv import xla
from pallas.transposed_store import emulated_store, store

ROWS = 64
MOST_TOKENS = 16
DEPTH = 64
"""Inputs of a buffer, one swizzled tile: 128 bytes."""
WIDE = (plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(128))
MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the kernel is cut."""

    groups: int = 4
    """Warpgroups of a thread block, which share a tile."""
    stages: int = 5
    """Buffers of a warpgroup."""
    slices: int = 1
    """Parts of the depth that different thread blocks take."""
    blocks: int = MULTIPROCESSORS
    """Thread blocks."""


def settings_for(rows: Sequence[int], depth: int) -> Settings:
    """A cut that fills the multiprocessors: slices for matrices of few tiles."""
    tiles = sum(-(-count // ROWS) for count in rows)
    usable = [s for s in (1, 2, 3, 4, 6, 7, 8) if depth % (s * 4 * DEPTH) == 0] or [1]
    waves = {s: -(-tiles * s // MULTIPROCESSORS) * MULTIPROCESSORS / (tiles * s) + 0.03 * s for s in usable}
    return Settings(slices=min(waves, key=lambda s: waves[s]))


def matmuls(
    x: Float[Array, "M K"],
    weights: Sequence[Float[Array, "_ K"]],
    dtypes: Sequence[jnp.dtype] | None = None,
    interpret: Any = None,
    settings: Settings | None = None,
) -> tuple[Float[Array, "M _"], ...]:
    """`api.matmuls`."""
    tokens, depth = x.shape
    sizes = tuple(matrix.shape[0] for matrix in weights)
    dtypes = tuple(dtypes or (x.dtype,) * len(sizes))
    cut = settings or settings_for(sizes, depth)
    for matrix in weights:
        require_supported(x, matrix, cut)
    columns = 8 if tokens <= 8 else 16
    if settings is None and columns > 8:
        cut = dataclasses.replace(cut, stages=cut.stages - 1)  # as much as shared memory holds
    padded = jnp.pad(x, ((0, columns - tokens), (0, 0)))
    kinds = (jnp.dtype(jnp.float32),) * len(sizes) if cut.slices > 1 else dtypes
    sums = _kernel(columns, sizes, kinds, depth, cut, interpret)(padded, *weights)
    return tuple(jnp.sum(part[:, :tokens], axis=0).astype(dtype) for part, dtype in zip(sums, dtypes))


def require_supported(x: jax.Array, weights: jax.Array, cut: Settings) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernel does not serve."""
    if x.dtype != jnp.bfloat16 or weights.dtype != jnp.bfloat16:
        raise NotImplementedError(f"gemv mosaic serves bfloat16, got {x.dtype} and {weights.dtype}")
    if x.shape[0] > MOST_TOKENS:
        raise NotImplementedError(f"gemv mosaic serves up to {MOST_TOKENS} rows, got {x.shape[0]}")
    if weights.shape[0] < ROWS or weights.shape[0] % 8 or x.shape[1] % (cut.groups * cut.slices * DEPTH):
        raise NotImplementedError(
            f"gemv mosaic serves at least {ROWS} outputs in multiples of 8 and inputs in multiples of "
            f"{cut.groups * cut.slices * DEPTH}, got {weights.shape[0]} and {x.shape[1]}"
        )


def _kernel(
    columns: int, sizes: tuple[int, ...], dtypes: tuple[jnp.dtype, ...], depth: int, cut: Settings, interpret: Any
) -> Any:
    groups, stages, share = cut.groups, cut.stages, ROWS // cut.groups
    parts = depth // (DEPTH * groups * cut.slices)
    ends = tuple(itertools.accumulate(-(-rows // ROWS) for rows in sizes))
    total = ends[-1] * cut.slices
    layout = plgpu.Layout.WG_STRIDED((share, columns), vec_size=1)
    put = store if interpret is None else emulated_store

    def body(x: Any, *refs: Any, left: Any, right: Any, sums: Any, full: Any, summed: Any) -> None:
        matrices, outputs = refs[: len(sizes)], refs[len(sizes) :]
        group, block = lax.axis_index("group"), lax.axis_index("block")

        def choose(tile: jax.Array, run: Callable[[int, jax.Array], None]) -> None:
            """`run(matrix, first row)` for the matrix of the tile; its last tile may overlap the one before."""
            for index, (rows, end) in enumerate(zip(sizes, ends)):
                first = ends[index - 1] if index else 0
                row = jnp.minimum((tile - first) * ROWS, rows - ROWS)
                if len(sizes) == 1:
                    run(index, row)
                else:
                    pl.when((tile >= first) & (tile < end))(partial(run, index, row))

        def fetch(stage: jax.Array) -> None:
            item = block + lax.div(stage, jnp.int32(parts)) * cut.blocks

            @pl.when(item < total)
            def _start() -> None:
                tile, piece = lax.div(item, jnp.int32(cut.slices)), lax.rem(item, jnp.int32(cut.slices))
                slot = group * stages + lax.rem(stage, jnp.int32(stages))
                step = (piece * parts + lax.rem(stage, jnp.int32(parts))) * groups + group
                inputs = pl.ds(step * DEPTH, DEPTH)

                def read(index: int, row: jax.Array) -> None:
                    source = matrices[index].at[pl.ds(row, ROWS), inputs]
                    plgpu.copy_gmem_to_smem(source, left.at[slot], full.at[slot])

                choose(tile, read)
                plgpu.copy_gmem_to_smem(x.at[:, inputs], right.at[slot], full.at[slot])

        def ring(stage: jax.Array) -> jax.Array:
            return group * stages + lax.rem(stage, jnp.int32(stages))

        def tile_sum(item: jax.Array) -> jax.Array:
            def scope(total: Any) -> jax.Array:
                def one(index: jax.Array, _: None) -> None:
                    stage = item * parts + index
                    slot = ring(stage)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(total, left.at[slot], right.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    plgpu.commit_smem()
                    fetch(stage + stages)

                lax.fori_loop(0, parts, one, None)
                return total[...]

            return pl.run_scoped(scope, plgpu.ACC((ROWS, columns), jnp.float32))

        def emulated_sum(item: jax.Array) -> jax.Array:
            def one(index: jax.Array, total: jax.Array) -> jax.Array:
                stage = item * parts + index
                slot = ring(stage)
                plgpu.barrier_wait(full.at[slot])
                total += jnp.dot(left[slot], right[slot].T, preferred_element_type=jnp.float32)
                fetch(stage + stages)
                return total

            return lax.fori_loop(0, parts, one, jnp.zeros((ROWS, columns), jnp.float32))

        def tile(item: jax.Array, _: None) -> None:
            number = block + item * cut.blocks
            piece = lax.rem(number, jnp.int32(cut.slices))
            value = (tile_sum if interpret is None else emulated_sum)(item)
            buffer = lax.rem(item, jnp.int32(2))
            sums[buffer, group] = value
            plgpu.barrier_arrive(summed.at[buffer])
            plgpu.barrier_wait(summed.at[buffer])
            mine = pl.ds(group * share, share)
            loads = [plgpu.load(sums.at[buffer, member, mine], layout=layout) for member in range(groups)]
            result = sum(loads[1:], loads[0])

            def write(index: int, row: jax.Array) -> None:
                target = outputs[index].at[piece, :, pl.ds(row, ROWS)]
                put(target, None, group * share, result.astype(dtypes[index]), layout)

            choose(lax.div(number, jnp.int32(cut.slices)), write)

        for stage in range(stages):
            fetch(jnp.int32(stage))
        lax.fori_loop(0, lax.div(jnp.int32(total - 1) - block + cut.blocks, jnp.int32(cut.blocks)), tile, None)

    smem = plgpu.SMEM
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((cut.slices, columns, *size), dtype) for *size, dtype in zip(sizes, dtypes)],
        grid=(cut.blocks,),
        grid_names=("block",),
        num_threads=groups,
        thread_name="group",
        scratch_types={
            "left": smem((groups * stages, ROWS, DEPTH), jnp.bfloat16, transforms=WIDE),
            "right": smem((groups * stages, columns, DEPTH), jnp.bfloat16, transforms=WIDE),
            "sums": smem((2, groups, ROWS, columns), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=groups * stages),
            "summed": plgpu.Barrier(num_arrivals=groups, num_barriers=2),
        },
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="gemv",
    )


def on_gpu(
    x: Float[Array, "M K"], weights: tuple[Float[Array, "_ K"], ...], dtypes: tuple[jnp.dtype, ...]
) -> tuple[Float[Array, "M _"], ...]:
    """`matmuls`, refusing where there is no Hopper GPU. Gradients are those of ordinary products."""
    require_hopper("gemv mosaic")
    return _differentiable(x, weights, dtypes)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _differentiable(x: Array, weights: tuple[Array, ...], dtypes: tuple[jnp.dtype, ...]) -> tuple[Array, ...]:
    return matmuls(x, weights, dtypes)


def _forward(x: Array, weights: tuple[Array, ...], dtypes: tuple[jnp.dtype, ...]) -> tuple:
    return matmuls(x, weights, dtypes), (x, weights)


def _backward(dtypes: tuple[jnp.dtype, ...], saved: tuple, gradient: tuple[Array, ...]) -> tuple:
    _, pull_back = jax.vjp(lambda x, weights: xla.matmuls(x, weights, dtypes), *saved)
    return pull_back(gradient)


_differentiable.defvjp(_forward, _backward)
