"""The sum of what all devices have, as the kernel defines it: in float32 and in the order of devices."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def all_reduce(parts: Float[Array, "N *shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """The definition, on an array that has the devices' parts along its first axis."""

    def add(total: jax.Array, part: jax.Array) -> tuple[jax.Array, None]:
        return total + part.astype(jnp.float32), None

    total, _ = jax.lax.scan(add, parts[0].astype(jnp.float32), parts[1:])
    return total.astype(dtype)
