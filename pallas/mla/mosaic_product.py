"""Matrix products of Mosaic GPU kernels, and what stands for them where a kernel is interpreted on a CPU."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Product = Callable[[jax.Array | tuple[int, int], Any, Any], jax.Array]
"""(what to add to, or the shape of a product alone; left operand; right operand in shared memory) -> float32."""


def tensor_core(start: jax.Array | tuple[int, int], left: Any, right: Any) -> jax.Array:
    """`start` + left right on the tensor cores, waited for."""
    if isinstance(start, tuple):

        def alone(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, left, right)
            return acc[...]

        return pl.run_scoped(alone, plgpu.ACC(start, jnp.float32))
    return pl.run_state(lambda acc: plgpu.wgmma(acc, left, right))(plgpu.ACC.init(start))


def emulated(start: jax.Array | tuple[int, int], left: Any, right: Any) -> jax.Array:
    """The same with an ordinary product, since interpretation knows no tensor cores."""
    product = jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)
    return product if isinstance(start, tuple) else start + product


def product_for(interpret: Any) -> Product:
    """The product that a kernel uses."""
    return tensor_core if interpret is None else emulated
