"""The portable sum over devices, which XLA leaves to NCCL on GPUs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def all_reduce(
    x: Float[Array, "*shape"], axis: str, table: Array | None, dtype: jnp.dtype, channel: int
) -> Float[Array, "*shape"]:
    """See `pallas.collectives.all_reduce`: inboxes are not needed."""
    del table, channel
    return jax.lax.psum(x, axis).astype(dtype)
