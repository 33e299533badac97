"""Log-probabilities beside the sampled token's own: the best alternatives, and those of a prompt.

They are the model's own, before any rule, penalty or temperature, and travel as int32: log-probabilities by their bits.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from k3jax.conditional import run_if

BLOCK = 64
"""Prompt positions whose logits exist at a time."""
CHUNK = 256
"""Tokens of which only the best is looked at first."""


def alternatives(logits: Float32[Array, "B V"], wanted: Bool[Array, " B"], count: int) -> Int32[Array, "B C"]:
    """Ids of the `count` best tokens of each row, then the bits of their log-probabilities; zeros if none is wanted."""
    some = jnp.any(wanted)

    def best(logits: Array) -> Array:
        values, ids = top(jax.nn.log_softmax(logits, axis=-1), count)
        found = jnp.concatenate([ids, jax.lax.bitcast_convert_type(values, jnp.int32)], axis=1)
        return jnp.where(some, found, 0)

    def nothing(logits: Array) -> Array:
        return jnp.zeros((logits.shape[0], 2 * count), jnp.int32)

    return run_if(some, best, nothing, logits)


def top(values: Float32[Array, "B V"], count: int) -> tuple[Float32[Array, "B C"], Int32[Array, "B C"]]:
    """`jax.lax.top_k` without a sort of everything: the `count` best are in the `count` chunks with the best maxima."""
    rows, size = values.shape
    chunks = -(-size // CHUNK)
    if not count or chunks <= 2 * count:
        best, ids = jax.lax.top_k(values, count)
        return best, ids.astype(jnp.int32)
    padded = jnp.pad(values, ((0, 0), (0, chunks * CHUNK - size)), constant_values=-jnp.inf).reshape(rows, -1, CHUNK)
    # In order of their ids, so that equal values come in that order too.
    chosen = jnp.sort(jax.lax.top_k(jnp.max(padded, axis=-1), count)[1], axis=-1)
    candidates = jnp.take_along_axis(padded, chosen[..., None], axis=1).reshape(rows, -1)
    best, place = jax.lax.top_k(candidates, count)
    chunk = jnp.take_along_axis(chosen, place // CHUNK, axis=-1)
    return best, (chunk * CHUNK + place % CHUNK).astype(jnp.int32)


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
