"""Rotary position embedding of the draft models, with YaRN scaling."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from k3jax.dspark.config import Rope, Yarn


def frequencies(rope: Rope, dim: int) -> Float[np.ndarray, " half"]:
    """Angle per position of each of the `dim / 2` pairs, in float64."""
    plain = rope.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    return plain if rope.yarn is None else _yarn(rope.theta, rope.yarn, plain, dim)


def _yarn(theta: float, yarn: Yarn, plain: Float[np.ndarray, " half"], dim: int) -> Float[np.ndarray, " half"]:
    """Slow pairs are divided by the factor, fast ones kept, with a linear ramp between (arXiv 2309.00071)."""

    def boundary(rotations: float) -> float:
        return dim * math.log(yarn.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(boundary(yarn.beta_fast)), 0), min(math.ceil(boundary(yarn.beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def angles(
    position: Int32[Array, "B T"], rope: Rope, dim: int
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosines and sines of each pair's angle at these positions, in float32, times YaRN's factor."""
    angle = position.astype(jnp.float32)[..., None] * jnp.asarray(frequencies(rope, dim), jnp.float32)[None, None]
    return rope.attention_factor * jnp.cos(angle), rope.attention_factor * jnp.sin(angle)


def rotate(x: Float[Array, "B T *heads C"], position: Int32[Array, "B T"], rope: Rope) -> Float[Array, "B T *heads C"]:
    """Rotates the last axis by each token's position; angles in float32, one rounding."""
    dim = x.shape[-1]
    shape = (*position.shape, *[1] * (x.ndim - 3), dim // 2)
    cos, sin = (table.reshape(shape) for table in angles(position, rope, dim))
    wide = x.astype(jnp.float32)
    first, second = (wide[..., 0::2], wide[..., 1::2]) if rope.interleaved else jnp.split(wide, 2, axis=-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    if rope.interleaved:
        return jnp.stack(rotated, axis=-1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
