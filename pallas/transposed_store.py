"""Results of swapped products, [weight rows, tokens], stored as rows of tokens."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf

from pallas import inline


def store(
    out: Any,
    target: Any,
    offset: Any,
    value: jax.Array,
    layout: Any,
    place: Callable | None = None,
    limit: int | None = None,
) -> None:
    """out[n, place(offset + r)] = value[r, n]; with targets out[target[n], ...] where that is not negative.

    Without targets, tokens that `out` has no rows for are dropped, and so are rows from offset + r = `limit` on.
    """
    refs = (out,) if target is None else (out, target)
    column = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=layout) + offset
    row = plgpu.broadcasted_iota(jnp.int32, value.shape, 1, layout=layout)

    @plgpu.inline_mgpu(arg_types=((plgpu.RefType(),) * len(refs), layout, layout, layout))
    def run(_: Any, refs: tuple, row: Any, column: Any, value: Any) -> None:
        kind, rows = ir.IndexType.get(), ir.MemRefType(refs[0].type).shape[0]
        for r, c, v in zip(*(inline.elements(x.registers) for x in (row, column, value)), strict=True):
            r, c = arith.index_cast(kind, r), arith.index_cast(kind, c)
            bounds = [(r, rows)] if rows < value.shape[1] else []
            bounds += [] if limit is None else [(c, limit)]
            if len(refs) == 1 and not bounds:
                memref.store(v, refs[0], [r, c])
                continue
            if len(refs) == 1:
                checks = [arith.cmpi(arith.CmpIPredicate.ult, x, arith.constant(kind, end)) for x, end in bounds]
                inside = scf.IfOp(functools.reduce(arith.andi, checks))
                with ir.InsertionPoint(inside.then_block):
                    memref.store(v, refs[0], [r, c])
                    scf.yield_([])
                continue
            there = memref.load(refs[1], [r])
            zero = arith.constant(there.type, ir.IntegerAttr.get(there.type, 0))
            wanted = scf.IfOp(arith.cmpi(arith.CmpIPredicate.sge, there, zero))
            with ir.InsertionPoint(wanted.then_block):
                memref.store(v, refs[0], [arith.index_cast(kind, there), c])
                scf.yield_([])

    run(refs, row, column if place is None else place(column), value)


def emulated_store(
    out: Any,
    target: Any,
    offset: Any,
    value: jax.Array,
    layout: Any,
    place: Callable | None = None,
    limit: int | None = None,
) -> None:
    """`store` for interpretation on a CPU; leaves `place` to the caller, so that a row is one store.

    With a `limit`, eight rows are stored or dropped together.
    """
    step = value.shape[0] if limit is None else 8
    for n in range(value.shape[1] if target is not None else min(value.shape[1], out.shape[0])):
        there = n if target is None else target[n]
        for first in range(0, value.shape[0], step):
            wanted = (jnp.asarray(there) >= 0) & (True if limit is None else offset + first < limit)
            pl.when(wanted)(partial(_store_row, out, there, offset + first, value[first : first + step, n]))


def _store_row(out: Any, row: Any, offset: Any, value: jax.Array) -> None:
    out[row, pl.ds(offset, value.shape[0])] = value
