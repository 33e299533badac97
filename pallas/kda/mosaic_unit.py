"""Norms of the tokens of q and k that a warp holds, in one butterfly over its lanes.

Eight sums over 32 lanes take 40 exchanges one by one. Here each of the first three exchanges halves the number of sums
that a lane is left with, two more complete the one, and each factor is computed by four lanes instead of all.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas import inline
from pallas.kda.mosaic_token import CHANNELS, KEY_EPS

TOKENS = 4
"""Tokens of q, and of k, in a warp."""


def _f32(value: float) -> ir.Value:
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), value))


def _squares(numbers: ir.Value) -> ir.Value:
    """Sum of the squares of a vector's numbers."""
    total = None
    for place in range(ir.VectorType(numbers.type).shape[0]):
        number = vector.extract(numbers, dynamic_position=[], static_position=[place])
        square = arith.mulf(number, number, fastmath=arith.FastMathFlags.contract)
        total = square if total is None else arith.addf(total, square, fastmath=arith.FastMathFlags.contract)
    return total


def _exchanged(sums: list[ir.Value], lane: ir.Value, distance: int) -> list[ir.Value]:
    """Half as many sums over twice as many lanes; lanes whose number has the bit take the second half."""
    if len(sums) == 1:
        return [arith.addf(sums[0], utils.shfl_bfly(sums[0], distance))]
    upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, inline.i32(distance)), inline.i32(0))
    first, second = sums[: len(sums) // 2], sums[len(sums) // 2 :]
    kept = [arith.select(upper, b, a) for a, b in zip(first, second)]
    sent = [arith.select(upper, a, b) for a, b in zip(first, second)]
    return [arith.addf(mine, utils.shfl_bfly(theirs, distance)) for mine, theirs in zip(kept, sent)]


def _from_lane(value: ir.Value, lane: int) -> ir.Value:
    """The lane's value."""
    everyone, last = inline.i32(0xFFFFFFFF), inline.i32(31)
    return nvvm.shfl_sync(everyone, value, inline.i32(lane), last, nvvm.ShflKind.idx)


def unit_factors(layout: Any, rows: int) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """The function from q and k [rows, 128] in `layout`, float32, to what makes their rows D^-1/2 and 1 long."""
    result = plgpu.ShapeDtypeStruct((rows,), jnp.float32, layout=layout.reduce(1))

    @plgpu.inline_mgpu(arg_types=(layout, layout), return_type=(result, result))
    def run(_: Any, query: Any, key: Any) -> Any:
        lane = arith.remui(utils.thread_idx(), inline.i32(32))
        sums = [_squares(register) for plane in (query, key) for register in plane.registers.flat]
        for distance in (16, 8, 4, 2, 1):
            sums = _exchanged(sums, lane, distance)
        is_query = arith.cmpi(arith.CmpIPredicate.ult, lane, inline.i32(16))
        total = arith.addf(sums[0], _f32(KEY_EPS))
        root = llvm.inline_asm(ir.F32Type.get(), [total], "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", asm_dialect=0)
        factor = arith.mulf(root, arith.select(is_query, _f32(CHANNELS**-0.5), _f32(1.0)))
        reduced = layout.reduce(1).to_mgpu()
        planes = []
        for plane in range(2):
            owners = [16 * plane + 8 * (token // 2) + 4 * (token % 2) for token in range(TOKENS)]
            values = [_from_lane(factor, owner) for owner in owners]
            registers = np.array([_vector(x) for x in values], dtype=object).reshape(reduced.registers_shape((rows,)))
            planes.append(mgpu.FragmentedArray(_registers=registers, _layout=reduced, _is_signed=None))
        return tuple(planes)

    return run


def _vector(value: ir.Value) -> ir.Value:
    return vector.from_elements(ir.VectorType.get((1,), value.type), [value])


def emulated_unit_factors(layout: Any, rows: int) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """`unit_factors` for interpretation."""
    del layout, rows

    def run(query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        factor = lambda x: lax.rsqrt((x * x).sum(axis=1) + KEY_EPS)  # noqa: E731
        return factor(query) * CHANNELS**-0.5, factor(key)

    return run
