"""The portable Markov walk."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas.gemv import xla
from pallas.gemv.int8 import Int8Matrix


def walk(
    base: Float32[Array, "G V"],
    scale: Float32[Array, ""],
    anchor: Int32[Array, ""],
    embedding: Float[Array, "V r"],
    head: Int8Matrix,
) -> tuple[Int32[Array, " G"], Float32[Array, "G V"]]:
    """See `pallas.markov.walk`."""

    def one(previous: Int32[Array, ""], base: Float32[Array, " V"]) -> tuple[Int32[Array, ""], tuple[Array, Array]]:
        (bias,) = xla.matmuls(embedding[previous][None], (head,), (jnp.dtype(jnp.float32),))
        token = jnp.argmax(base + scale * bias[0]).astype(jnp.int32)
        return token, (token, bias[0])

    return jax.lax.scan(one, anchor, base)[1]
