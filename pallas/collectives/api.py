"""The public sum over devices."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt32

from pallas.collectives import mosaic, mosaic_norm, xla
from pallas.dispatch import Implementation, select


@functools.partial(jax.jit, static_argnames=("axis", "dtype", "channel", "implementation"))
def all_reduce(
    x: Float[Array, "*shape"],
    axis: str,
    table: UInt32[Array, "1 W"] | None = None,
    *,
    dtype: DTypeLike | None = None,
    channel: int = 0,
    implementation: Implementation = None,
) -> Float[Array, "*shape"]:
    """The sum of `x` over the devices of mesh axis `axis`, inside `jax.shard_map`; in `dtype`, by default that of x.

    `table` is this device's row of `Inboxes.table`: with it a few rows are summed in one hop. Sums on one `channel`
    must depend on one another, so that all devices run them in the same order. Without it, and for what an inbox does
    not hold, the sum is the runtime's. All devices get the same bits.

    A program with such sums needs one exchange of the runtime's as well, before them: it makes all devices load their
    kernels before any begins, which a GPU that waits for another would prevent.
    """
    kind = jnp.dtype(x.dtype if dtype is None else dtype)
    return select(implementation, mosaic=mosaic.on_gpu, xla=xla.all_reduce)(x, axis, table, kind, channel)


@functools.partial(jax.jit, static_argnames=("axis", "dtype", "eps", "implementation"))
def normed_all_reduce(
    x: Float[Array, "N D"],
    axis: str,
    table: UInt32[Array, "1 W"] | None,
    weight: Float[Array, " D"],
    *,
    dtype: DTypeLike,
    eps: float,
    implementation: Implementation = None,
) -> Float[Array, "N D"]:
    """Weight times the RMSNorm of each row of `all_reduce`, which is rounded to `dtype` before and after: one kernel.

    Statistics are in float32; everything else is as in `all_reduce`, of whose sums on channel 0 this is one.
    """
    portable = functools.partial(_norm_of_sum, implementation)
    run = select(implementation, mosaic=mosaic_norm.on_gpu, xla=portable)
    return run(x, axis, table, weight, jnp.dtype(dtype), eps)


def _norm_of_sum(
    implementation: Implementation,
    x: Array,
    axis: str,
    table: Array | None,
    weight: Array,
    dtype: jnp.dtype,
    eps: float,
) -> Array:
    """The norm of a sum by a kernel of its own."""
    return xla.norm(all_reduce(x, axis, table, dtype=dtype, implementation=implementation), weight, eps)
