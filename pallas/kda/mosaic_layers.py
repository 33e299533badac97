"""Operands of one layer among those of many, chosen by a block of a Mosaic GPU kernel when it runs.

Pallas can only branch over references, which repeats what a branch does with them: 69 layers take it nine seconds to
lower. `Addresses` branches over the addresses alone. `Branches` says the same in Pallas, for interpretation on a CPU.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

SCALAR = plgpu.Layout.WG_SPLAT(())


class Piece(NamedTuple):
    """`operand[index]` with a layout; an index holds integers, traced scalars, static slices and `pl.ds`."""

    operand: int
    index: tuple
    layout: Any


class Branches:
    """A branch for every layer, in Pallas."""

    def __init__(self, layers: Sequence[Sequence[Any]], layer: jax.Array) -> None:
        self.layers, self.layer = layers, layer

    def read(self, *pieces: Piece) -> tuple[jax.Array, ...]:
        """The pieces of the chosen layer."""

        def of(refs: Sequence[Any]) -> tuple[jax.Array, ...]:
            load = lambda x: plgpu.load(refs[x.operand].at[x.index], layout=x.layout, optimized=False)  # noqa: E731
            return tuple(map(load, pieces))

        return lax.switch(self.layer, [lambda refs=refs: of(refs) for refs in self.layers])

    def write(self, *pieces: tuple[Piece, jax.Array]) -> None:
        """Overwrites pieces of the chosen layer."""

        def of(refs: Sequence[Any]) -> None:
            for piece, value in pieces:
                refs[piece.operand][piece.index] = value

        lax.switch(self.layer, [lambda refs=refs: of(refs) for refs in self.layers])


class Addresses(Branches):
    """A branch over the addresses of every layer, and one copy of what is done there."""

    def read(self, *pieces: Piece) -> tuple[jax.Array, ...]:
        """The pieces of the chosen layer."""
        refs = self.layers[0]
        results = tuple(
            plgpu.ShapeDtypeStruct(shape_of(refs[x.operand].shape, x.index), refs[x.operand].dtype, layout=x.layout)
            for x in pieces
        )

        @plgpu.inline_mgpu(arg_types=self._types(pieces), return_type=results)
        def run(_: Any, layer: Any, scalars: list[Any], layers: list[list[Any]]) -> tuple[Any, ...]:
            slices = self._slices(pieces, layer, scalars, layers)
            load = mgpu.FragmentedArray.load_untiled
            return tuple(
                load(ref, layout=piece.layout.to_mgpu(), optimized=False) for ref, piece in zip(slices, pieces)
            )

        return run(self.layer, scalars_of(pieces), [list(refs) for refs in self.layers])

    def write(self, *pieces: tuple[Piece, jax.Array]) -> None:
        """Overwrites pieces of the chosen layer."""
        where = [piece for piece, _ in pieces]

        @plgpu.inline_mgpu(arg_types=(*self._types(where), [piece.layout for piece in where]), return_type=())
        def run(_: Any, layer: Any, scalars: list[Any], layers: list[list[Any]], values: list[Any]) -> tuple:
            for ref, value in zip(self._slices(where, layer, scalars, layers), values):
                value.store_untiled(ref, optimized=False)
            return ()

        run(self.layer, scalars_of(where), [list(refs) for refs in self.layers], [value for _, value in pieces])

    def _types(self, pieces: Sequence[Piece]) -> tuple:
        refs = [[plgpu.RefType() for _ in refs] for refs in self.layers]
        return SCALAR, [SCALAR] * len(scalars_of(pieces)), refs

    def _slices(
        self, pieces: Sequence[Piece], layer: Any, scalars: list[Any], layers: list[list[Any]]
    ) -> Iterator[ir.Value]:
        used = sorted({piece.operand for piece in pieces})
        chosen = dict(zip(used, choose(as_index(layer), [[refs[number] for number in used] for refs in layers])))
        values = map(as_index, scalars)
        for piece in pieces:
            yield utils.memref_slice(chosen[piece.operand], tuple(placed(x, values) for x in piece.index))


def shape_of(shape: tuple[int, ...], index: tuple) -> tuple[int, ...]:
    """The shape of an indexed operand."""
    sizes = []
    for size, x in zip(shape, (*index, *(slice(None),) * (len(shape) - len(index)))):
        if isinstance(x, slice):
            sizes.append(len(range(size)[x]))
        elif isinstance(x, pl.Slice):
            sizes.append(x.size)
    return tuple(sizes)


def scalars_of(pieces: Sequence[Piece]) -> list[jax.Array]:
    """The traced parts of the pieces' indices, in order."""
    starts = [x.start if isinstance(x, pl.Slice) else x for piece in pieces for x in piece.index]
    return [x for x in starts if isinstance(x, jax.Array)]


def placed(x: Any, values: Iterator[ir.Value]) -> Any:
    """An entry of an index with its traced part taken from `values`."""
    if isinstance(x, pl.Slice):
        return utils.DynamicSlice(next(values) if isinstance(x.start, jax.Array) else x.start, x.size)
    return next(values) if isinstance(x, jax.Array) else x


def as_index(scalar: Any) -> ir.Value:
    """A scalar of Pallas as an index of MLIR."""
    return arith.index_cast(ir.IndexType.get(), scalar.registers.item())


def choose(layer: ir.Value, layers: Sequence[Sequence[ir.Value]]) -> list[ir.Value]:
    """References to the operands of layer number `layer`."""
    pointer = llvm.PointerType.get()
    switch = scf.IndexSwitchOp([pointer] * len(layers[0]), layer, range(len(layers) - 1))
    default, *cases = list(switch.regions)
    for region, refs in zip((*cases, default), layers):
        with ir.InsertionPoint(region.blocks[0]):
            scf.yield_([utils.memref_ptr(ref) for ref in refs])
    return [utils.ptr_as_memref(address, ir.MemRefType(ref.type)) for address, ref in zip(switch.results, layers[0])]
