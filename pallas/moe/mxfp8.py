"""MXFP8 activations: e4m3 numbers (four significant bits, largest 448) and one E8M0 scale per 32 of them.

The scale of a block is the smallest power of two with which nothing in it exceeds 448, so no value saturates; values
round to the nearest, ties to even. Roundings are spelled out: XLA drops a conversion to float8 and back.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float8e4m3fn, UInt8

Activations = Literal["mxfp8"] | None
"""Format that the products' inputs are rounded to; None keeps them."""
BLOCK = 32
"""Consecutive inputs that share a scale."""
FEWEST_TOKENS = 129
"""From this many tokens on a call multiplies quantised activations; fewer are limited by the bytes of the weights."""

_TOP_EXPONENT = 8
_TOP_FRACTION = 0x600000
"""448 is 1.75 * 2^8: exponent and float32 fraction bits of the largest number."""
_SMALLEST_NORMAL, _STEP = 2.0**-6, 2.0**-9


class Mxfp8(NamedTuple):
    """Numbers of value `values` * 2^(scale - 127); scale 255 stands for NaN."""

    values: Float8e4m3fn[Array, "*rows K"]
    scale: UInt8[Array, "*rows blocks"]


def quantize(x: Float[Array, "*rows K"], block: int = BLOCK) -> Mxfp8:
    """`x` with a scale for each `block` consecutive inputs; a block with a NaN or an infinity becomes NaN."""
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, block)
    scale = _scales(jnp.max(jnp.abs(blocks), axis=-1))
    inverse = _power(254 - jnp.minimum(scale, 253))
    values = _round(blocks * inverse[..., None]).reshape(x.shape).astype(jnp.float8_e4m3fn)
    return Mxfp8(values, scale.astype(jnp.uint8))


def rounded(x: Float[Array, "*rows K"]) -> Float[Array, "*rows K"]:
    """The numbers that `quantize` keeps of `x`, exact in bfloat16 already."""
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK)
    scale = _scales(jnp.max(jnp.abs(blocks), axis=-1, keepdims=True))
    kept = _round(blocks * _power(254 - jnp.minimum(scale, 253))) * unit(scale)
    return kept.reshape(x.shape).astype(x.dtype)


def unit(scale: jax.Array) -> jax.Array:
    """What a one counts under a scale byte, in float32."""
    return jnp.where(scale == 255, jnp.nan, _power(jnp.minimum(scale.astype(jnp.int32), 254)))


def _scales(largest: jax.Array) -> jax.Array:
    """Scale bytes for blocks of such largest magnitudes, as int32."""
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    carry = ((bits & 0x7FFFFF) > _TOP_FRACTION).astype(jnp.int32)
    return jnp.where(bits >= 0x7F800000, 255, jnp.clip((bits >> 23) - _TOP_EXPONENT + carry, 1, 253))


def _power(biased: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(biased.astype(jnp.int32) << 23, jnp.float32)


def _round(x: jax.Array) -> jax.Array:
    """float32 numbers of magnitude up to 448 rounded to e4m3."""
    normal = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3)
    subnormal = lax.round(x / _STEP, lax.RoundingMethod.TO_NEAREST_EVEN) * _STEP
    return jnp.where(jnp.abs(x) < _SMALLEST_NORMAL, subnormal, normal)
