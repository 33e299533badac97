"""Noise of a speculative step, and the distributions that it draws from.

Noise is keyed by a row's seed, the position of the step's anchor and a purpose. The anchor's position grows
with every step, so nothing repeats; keying by a drafted token's own position would draft it again with the
same noise after a rejection, which biases block verification.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt32

from k3jax import sampling

DRAFT, ACCEPT, FOLLOW = range(3)
"""Independent streams within a step."""


def keys(seed: UInt32[Array, " B"], position: Int32[Array, " B"], *purpose: int) -> Array:
    """One random key per row."""

    def key(seed: Array, position: Array) -> Array:
        start = jax.random.fold_in(jax.random.key(seed), position)
        return functools.reduce(jax.random.fold_in, purpose, start)

    return jax.vmap(key)(seed, position)


def uniforms(seed: UInt32[Array, " B"], position: Int32[Array, " B"], purpose: int, size: int) -> Float32[Array, "B G"]:
    """Uniforms in [0, 1) of each row's own stream."""
    return jax.vmap(lambda key: jax.random.uniform(key, (size,)))(keys(seed, position, purpose))


def draw(probability: Float32[Array, "B V"], row_keys: Array) -> Int32[Array, " B"]:
    """One token of each row's distribution; of a one-hot one, its token."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, probability.shape[1:]))(row_keys)
    return jnp.argmax(jnp.log(probability) + noise, axis=-1).astype(jnp.int32)


def distribution(
    logits: Float[Array, "B V"], params: sampling.Sampling, filters: bool | None = None
) -> Float32[Array, "B V"]:
    """What a request draws from: temperature and filters applied, one-hot for greedy rows."""
    scaled = logits / jnp.maximum(params.temperature, sampling.GREEDY_BELOW)[:, None]
    random = jax.nn.softmax(sampling.keep_likely(scaled, params, filters), axis=-1)
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    return jnp.where((params.temperature >= sampling.GREEDY_BELOW)[:, None], random, best)
