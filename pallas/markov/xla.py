"""The portable Markov walk."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas.gemv import xla
from pallas.gemv.int8 import Int8Matrix


def walk(
    logits: Float32[Array, "P V"],
    noise: Float32[Array, "G V"],
    scale: Float32[Array, ""],
    anchor: Int32[Array, ""],
    embedding: Float[Array, "V r"],
    head: Int8Matrix,
) -> tuple[Int32[Array, " G"], Float32[Array, "G V"]]:
    """See `pallas.markov.walk`."""

    def one(previous: Int32[Array, ""], row: tuple[Array, Array]) -> tuple[Int32[Array, ""], tuple[Array, Array]]:
        (bias,) = xla.matmuls(embedding[previous][None], (head,), (jnp.dtype(jnp.float32),))
        score = (row[0] + bias[0]) * scale
        token = jnp.argmax(score + row[1]).astype(jnp.int32)
        return token, (token, score)

    return jax.lax.scan(one, anchor, (logits[: noise.shape[0]], noise))[1]
