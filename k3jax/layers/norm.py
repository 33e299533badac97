"""RMS normalisation with Moonshot's rounding."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*batch D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*batch D"]:
    """Weight * round(x / sqrt(mean(x^2) + eps)): statistics in float32, the weight acts after rounding."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return jnp.broadcast_to(weight, x.shape) * (wide * scale).astype(x.dtype)


class RmsNorm(nnx.Module):
    """RMS normalisation over the last axis."""

    def __init__(self, weight: Array, eps: float) -> None:
        self.weight = nnx.Param(weight)
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Normalises the last axis of `x`."""
        return rms_norm(x, self.weight[...], self.eps)
