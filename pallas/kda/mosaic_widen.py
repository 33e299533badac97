"""bfloat16 to float32 in one integer operation a number: a shift for the lower half of a word, a mask for the upper.

The compiler takes the upper half out of its word before it shifts it: half an instruction more a number.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas import inline


def _widened(narrow: ir.Value) -> ir.Value:
    """A vector of an even number of bfloat16 as float32."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    count = ir.VectorType(narrow.type).shape[0]
    words = vector.bitcast(ir.VectorType.get((count // 2,), i32), narrow)
    numbers = []
    for place in range(count // 2):
        word = vector.extract(words, dynamic_position=[], static_position=[place])
        halves = arith.shli(word, inline.i32(16)), arith.andi(word, inline.i32(0xFFFF0000))
        numbers += [arith.bitcast(f32, half) for half in halves]
    return vector.from_elements(ir.VectorType.get((count,), f32), numbers)


@functools.cache
def _widening(shape: tuple[int, ...], layout: Any) -> Callable[[jax.Array], jax.Array]:
    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout))
    def run(_: Any, narrow: Any) -> Any:
        registers = np.empty(narrow.registers.shape, dtype=object)
        for place, register in np.ndenumerate(narrow.registers):
            registers[place] = _widened(register)
        return mgpu.FragmentedArray(_registers=registers, _layout=narrow.layout, _is_signed=None)

    return run


def widen(x: jax.Array, layout: Any) -> jax.Array:
    """`x`, bfloat16 in `layout` with two or more neighbours a lane, as float32."""
    return _widening(x.shape, layout)(x)


def emulated_widen(x: jax.Array, layout: Any) -> jax.Array:
    """`widen` for interpretation."""
    del layout
    return x.astype(jnp.float32)
