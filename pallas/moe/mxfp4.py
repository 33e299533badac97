"""MXFP4 (E2M1 codes, E8M0 scales) decoded exactly, in integer arithmetic.

Floating-point multiplication by 2^(scale - 127) would flush the smallest values to zero on some
backends; here the bits of each float are put together directly. The lower nibble comes first.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8, UInt32

GROUP = 32
"""Consecutive inputs that share one scale byte."""

MAX_SCALE = 252
"""Largest scale whose every code is finite: 6 * 2^(252 - 127)."""


def codes(packed: UInt8[Array, "*rows half"]) -> UInt8[Array, "*rows 2*half"]:
    """E2M1 codes 0 .. 15 in input order."""
    pair = jnp.stack([packed & jnp.uint8(15), packed >> jnp.uint8(4)], axis=-1)
    return pair.reshape(*packed.shape[:-1], -1)


def _float32_bits(code: UInt32[Array, "..."], scale: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """IEEE-754 bits of (-1)^s * magnitude(code) * 2^(scale - 127), subnormals included.

    Magnitudes are 0, 0.5, then (1 + m/2) * 2^(e-1) for exponent field e = 1 .. 3 and mantissa bit m.
    """
    exponent_field, mantissa = (code >> 1) & 3, code & 1
    is_half = (exponent_field == 0) & (mantissa == 1)
    exponent = scale + jnp.where(is_half, jnp.uint32(0), exponent_field)  # biased exponent plus one
    fraction = jnp.where(is_half, jnp.uint32(0), mantissa << 22)
    normal = ((exponent - 1) << 23) | fraction
    # Biased exponents 0 and -1 are subnormal: the hidden bit becomes explicit and shifts down.
    subnormal = ((jnp.uint32(1) << 23) | fraction) >> (jnp.uint32(2) - jnp.minimum(exponent, jnp.uint32(2)))
    bits = jnp.where(exponent >= 2, normal, subnormal)
    bits = jnp.where((exponent_field == 0) & (mantissa == 0), jnp.uint32(0), bits)
    return bits | ((code >> 3) << 31)


def dequantize(
    packed: UInt8[Array, "*rows half"], scale: UInt8[Array, "*rows groups"], dtype: DTypeLike = jnp.float32
) -> Float[Array, "*rows 2*half"]:
    """Exact values as bfloat16 or float32; `half` is 16 times `groups`.

    Scales above `MAX_SCALE` can overflow, 255 means NaN; a checkpoint with one is refused while it is read.
    """
    grouped = codes(packed).reshape(*scale.shape, GROUP).astype(jnp.uint32)
    bits = _float32_bits(grouped, scale[..., None].astype(jnp.uint32))
    if dtype == jnp.float32:
        values = lax.bitcast_convert_type(bits, jnp.float32)
    elif dtype == jnp.bfloat16:  # two significant bits at most, so the upper half holds them all
        values = lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    else:
        raise ValueError(f"MXFP4 cannot be decoded exactly as {dtype}, expected bfloat16 or float32")
    return values.reshape(*packed.shape[:-1], -1)
