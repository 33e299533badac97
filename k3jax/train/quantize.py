"""MXFP4 quantisation-aware training: expert weights are rounded in the forward pass, gradients pass through.

A group of 32 inputs shares the scale 2^e. The largest magnitude decides e: it is 6 codes wide at most
after rounding, so values up to 7 * 2^e (which round to 6) keep the smaller scale. Codes round to nearest,
ties to even. Everything is exact in float32, so the training graph sees the very values that are shipped.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, UInt8

from pallas.moe.mxfp4 import GROUP, MAX_SCALE

_MANTISSA_BITS = 23
_LARGEST_KEPT = 0x600000  # mantissa of 1.75: a largest value of 7 * 2^e or more needs the next scale


def _grouped(weights: Float32[Array, "*rows n"]) -> Float32[Array, "*rows groups 32"]:
    if weights.shape[-1] % GROUP:
        raise ValueError(f"the last axis has {weights.shape[-1]} inputs, expected a multiple of {GROUP}")
    return weights.reshape(*weights.shape[:-1], -1, GROUP)


def _scale(groups: Float32[Array, "*rows 32"]) -> UInt8[Array, "*rows"]:
    """The E8M0 byte of each group, from the bits of its largest magnitude; 1 for a group of zeros."""
    bits = lax.bitcast_convert_type(jnp.max(jnp.abs(groups), axis=-1), jnp.uint32).astype(jnp.int32)
    exponent = bits >> _MANTISSA_BITS
    above = ((bits & ((1 << _MANTISSA_BITS) - 1)) >= _LARGEST_KEPT).astype(jnp.int32)
    return jnp.clip(exponent - 2 + above, 1, MAX_SCALE).astype(jnp.uint8)


def _power(exponent_field: Array) -> Float32[Array, "*rows"]:
    """2^(field - 127) for fields 1 to 254."""
    return lax.bitcast_convert_type(exponent_field.astype(jnp.uint32) << _MANTISSA_BITS, jnp.float32)


def _magnitude(groups: Float32[Array, "*rows 32"], scale: UInt8[Array, "*rows"]) -> Float32[Array, "*rows 32"]:
    """Magnitudes in units of the scale, rounded to 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    unit = jnp.abs(groups) * _power(254 - scale.astype(jnp.int32))[..., None]
    halves = jnp.round(unit * 2) / 2
    return jnp.where(unit < 2, halves, jnp.where(unit < 4, jnp.round(unit), jnp.minimum(jnp.round(unit / 2) * 2, 6)))


@jax.custom_vjp
def fake_quantize(weights: Float32[Array, "*rows n"]) -> Float32[Array, "*rows n"]:
    """The nearest MXFP4 values of groups of 32 inputs; the gradient is that of the identity."""
    groups = _grouped(weights)
    scale = _scale(groups)
    value = jnp.sign(groups) * _magnitude(groups, scale) * _power(scale.astype(jnp.int32))[..., None]
    return value.reshape(weights.shape)


fake_quantize.defvjp(lambda weights: (fake_quantize(weights), None), lambda _, gradient: (gradient,))


def pack(weights: Float32[Array, "*rows n"]) -> tuple[UInt8[Array, "*rows half"], UInt8[Array, "*rows groups"]]:
    """Bytes of the released format, (codes, scales); decoding them gives `fake_quantize(weights)` exactly."""
    groups = _grouped(weights)
    scale = _scale(groups)
    magnitude = _magnitude(groups, scale)
    code = jnp.where(magnitude < 2, magnitude * 2, jnp.where(magnitude < 4, magnitude + 2, magnitude / 2 + 4))
    negative = (groups < 0) & (magnitude > 0)
    nibbles = (code.astype(jnp.uint8) | (negative.astype(jnp.uint8) << 3)).reshape(*weights.shape[:-1], -1, 2)
    return nibbles[..., 0] | (nibbles[..., 1] << 4), scale
