"""JAX's random bits from inside a kernel: Threefry-2x32 (Salmon et al. 2011) by plain integer arithmetic.

Bits are those of `jax.random` with its default, partitionable implementation: where they are made changes no draw.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Key = tuple[jax.Array, jax.Array]
"""Two words of 32 bits: scalars, or arrays of keys."""

GREEDY_BELOW = 1e-5
"""Temperatures below this one mean the most likely token."""

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_TINY = 2.0**-126
"""The least normal float32, which `jax.random.gumbel` puts in place of zero."""


def threefry(key: Key, high: jax.Array, low: jax.Array) -> Key:
    """The two words that a counter of two words is encrypted to."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    left, right = high + keys[0], low + keys[1]
    for turn in range(5):
        for distance in _ROTATIONS[turn % 2]:
            left = left + right
            right = left ^ ((right << jnp.uint32(distance)) | (right >> jnp.uint32(32 - distance)))
        left = left + keys[(turn + 1) % 3]
        right = right + (keys[(turn + 2) % 3] + jnp.uint32(turn + 1))
    return left, right


def fold(seed: jax.Array, *data: Any) -> Key:
    """`jax.random.key(seed)` with each of `data` folded in, scalars or arrays; all uint32."""
    key = (jnp.zeros_like(seed), seed)
    for number in data:
        number = jnp.asarray(number, jnp.uint32)
        key = threefry(key, jnp.zeros_like(number), number)
    return key


def unit(key: Key, place: jax.Array) -> jax.Array:
    """What `jax.random.uniform(key, (n,))` has at each `place`, uint32: float32 in [0, 1)."""
    one, other = threefry(key, jnp.zeros_like(place), place)
    bits = ((one ^ other) >> jnp.uint32(9)) | jnp.uint32(0x3F800000)
    return lax.bitcast_convert_type(bits, jnp.float32) - 1.0


def exponential(key: Key, place: jax.Array) -> jax.Array:
    """E > 0, of which `jax.random.gumbel(key, (n,))` has -log(E) at each `place`: float32, exponentially spread."""
    return -jnp.log(jnp.maximum(unit(key, place) + _TINY, _TINY))
