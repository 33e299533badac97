"""Noise of a speculative step, and the distributions that it draws from.

Noise is keyed by a row's seed, the position of the step's anchor and a purpose. The anchor's position grows
with every step, so nothing repeats; keying by a drafted token's own position would draft it again with the
same noise after a rejection, which biases block verification.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from k3jax import sampling
from pallas import markov
from pallas.dispatch import select

ROUGH = 3
"""Digits that a draft's filters are found to: its distribution may be any, as long as it is the one drawn from."""

DRAFT, ACCEPT, FOLLOW = range(3)
"""Independent streams within a step."""


def keys(seed: UInt32[Array, " B"], position: Int32[Array, " B"], *purpose: int | Int32[Array, ""]) -> Array:
    """One random key per row."""

    def key(seed: Array, position: Array) -> Array:
        start = jax.random.fold_in(jax.random.key(seed), position)
        return functools.reduce(jax.random.fold_in, purpose, start)

    return jax.vmap(key)(seed, position)


def uniforms(seed: UInt32[Array, " B"], position: Int32[Array, " B"], purpose: int, size: int) -> Float32[Array, "B G"]:
    """Uniforms in [0, 1) of each row's own stream."""
    return jax.vmap(lambda key: jax.random.uniform(key, (size,)))(keys(seed, position, purpose))


def admitted(
    logits: Float[Array, "B V"],
    params: sampling.Sampling,
    filters: sampling.Filters | None = None,
    digits: int = sampling.DIGITS,
) -> Float32[Array, "B V"]:
    """Logits at the request's temperature, minus infinity where its filters drop a token.

    `filters` and `digits` as in `sampling.keep_likely`.
    """
    scaled = logits / jnp.maximum(params.temperature, sampling.GREEDY_BELOW)[:, None]
    return sampling.keep_likely(scaled, params, filters, digits)


def law(logits: Float[Array, "B V"], kept: Float32[Array, "B V"], params: sampling.Sampling) -> Float32[Array, "B V"]:
    """What a request draws from, given `admitted` logits: their softmax, one-hot for greedy rows."""
    best = jnp.argmax(logits, axis=-1)[:, None]
    # The best token is never dropped, so it is the maximum that a softmax looks for.
    mass = jnp.exp(kept - jnp.take_along_axis(kept, best, axis=-1))
    random = mass / jnp.sum(mass, axis=-1, keepdims=True)
    one = jnp.arange(logits.shape[-1], dtype=best.dtype)[None] == best
    return jnp.where(random_rows(params), random, one.astype(jnp.float32))


def laws(
    logits: Float[Array, "B G V"], kept: Float32[Array, "B G V"], params: sampling.Sampling
) -> Float32[Array, "B G V"]:
    """`law` at every place of a block at once."""
    each = jax.tree.map(lambda column: jnp.repeat(column, logits.shape[1], axis=0), params)
    flat = (array.reshape(-1, array.shape[-1]) for array in (logits, kept))
    return law(*flat, each).reshape(logits.shape)


def pick(
    logits: Float[Array, "B V"], kept: Float32[Array, "B V"], params: sampling.Sampling, row_keys: Array
) -> Int32[Array, " B"]:
    """A token of each row's `law`, without its sum: the noise decides between unnormalised logits as well."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(row_keys)
    return jnp.argmax(jnp.where(random_rows(params), kept + noise, logits), axis=-1).astype(jnp.int32)


def random_rows(params: sampling.Sampling) -> Bool[Array, "B 1"]:
    """Rows that are not greedy."""
    return (params.temperature >= sampling.GREEDY_BELOW)[:, None]


def block_noise(
    params: sampling.Sampling, position: Int32[Array, " B"], shape: tuple[int, int]
) -> tuple[Float32[Array, "G V"], Float32[Array, " B"]]:
    """Noise of one row's drafts and what its logits are multiplied by; none, and nothing, for a greedy row.

    Of logits * scale + noise the largest is what `pick` picks at each place, without filters.
    """
    return select(None, mosaic=_noise_by_kernel, xla=_noise)(params, position, shape)


def _noise_by_kernel(
    params: sampling.Sampling, position: Int32[Array, " 1"], shape: tuple[int, int]
) -> tuple[Float32[Array, "G V"], Float32[Array, " 1"]]:
    return markov.noise(params.seed, position, params.temperature, DRAFT, shape)


def _noise(
    params: sampling.Sampling, position: Int32[Array, " 1"], shape: tuple[int, int]
) -> tuple[Float32[Array, "G V"], Float32[Array, " 1"]]:
    places, random = jnp.arange(shape[0], dtype=jnp.int32), random_rows(params)
    row_keys = jax.vmap(lambda place: keys(params.seed, position, DRAFT, place)[0])(places)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, shape[1:]))(row_keys)
    scale = jnp.where(random[:, 0], 1 / jnp.maximum(params.temperature, sampling.GREEDY_BELOW), 1.0)
    return jnp.where(random, noise, 0.0), scale


def draw(probability: Float32[Array, "B V"], row_keys: Array) -> Int32[Array, " B"]:
    """One token of each row's distribution; of a one-hot one, its token."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, probability.shape[1:]))(row_keys)
    return jnp.argmax(jnp.log(probability) + noise, axis=-1).astype(jnp.int32)


def distribution(
    logits: Float[Array, "B V"], params: sampling.Sampling, filters: sampling.Filters | None = None
) -> Float32[Array, "B V"]:
    """What a request draws from: temperature and filters applied, one-hot for greedy rows."""
    return law(logits, admitted(logits, params, filters), params)
