"""Log-probabilities beside the sampled token's own: the best alternatives, and those of a prompt.

They are the model's own, before any rule, penalty or temperature, and travel as int32: log-probabilities by their bits.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

BLOCK = 64
"""Prompt positions whose logits exist at a time."""


def alternatives(logits: Float32[Array, "B V"], wanted: Bool[Array, " B"], count: int) -> Int32[Array, "B C"]:
    """Ids of the `count` best tokens of each row, then the bits of their log-probabilities; zeros if none is wanted."""

    def best(logits: Array) -> Array:
        values, ids = jax.lax.top_k(jax.nn.log_softmax(logits, axis=-1), count)
        return jnp.concatenate([ids.astype(jnp.int32), jax.lax.bitcast_convert_type(values, jnp.int32)], axis=1)

    def nothing(logits: Array) -> Array:
        return jnp.zeros((logits.shape[0], 2 * count), jnp.int32)

    return jax.lax.cond(jnp.any(wanted), best, nothing, logits)


def of_prompt(
    logits: Callable[[Array], Array],
    hidden: Float[Array, "B T D"],
    following: Int32[Array, "B T"],
    wanted: Bool[Array, " B"],
    count: int,
) -> Int32[Array, "B T C"]:
    """For each position the bits of the log-probability of the token that follows it, then its alternatives.

    `logits` maps hidden states to float32 logits. Zeros if nobody wants any; C is 1 + 2 * `count`.
    """
    rows, tokens = following.shape
    block = min(BLOCK, tokens)
    padding = -tokens % block

    def blocks(array: Array) -> Array:
        padded = jnp.pad(array, ((0, 0), (0, padding), *((0, 0),) * (array.ndim - 2)))
        return jnp.moveaxis(padded.reshape(rows, -1, block, *array.shape[2:]), 1, 0)

    def one(piece: tuple[Array, Array]) -> Array:
        here, after = piece
        values = logits(here).reshape(rows * block, -1)
        own = jnp.take_along_axis(jax.nn.log_softmax(values, axis=-1), after.reshape(-1, 1), axis=-1)
        best = alternatives(values, jnp.ones(rows * block, bool), count)
        return jnp.concatenate([jax.lax.bitcast_convert_type(own, jnp.int32), best], axis=1).reshape(rows, block, -1)

    def all_blocks(hidden: Array, following: Array) -> Array:
        pieces = jnp.moveaxis(jax.lax.map(one, (blocks(hidden), blocks(following))), 0, 1)
        return pieces.reshape(rows, tokens + padding, -1)[:, :tokens]

    def nothing(hidden: Array, following: Array) -> Array:
        return jnp.zeros((rows, tokens, 1 + 2 * count), jnp.int32)

    return jax.lax.cond(jnp.any(wanted), all_blocks, nothing, hidden, following)
