"""AttnRes as the report writes it: normalise, score, softmax, mix."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def mix(
    sources: tuple[Float[Array, "*batch D"], ...],
    prefix: Float[Array, "*batch D"],
    norm: Float[Array, " D"],
    query: Float[Array, " D"],
    *,
    eps: float = 1e-5,
) -> Float[Array, "*batch D"]:
    """The definition; see `pallas.attn_res.mix`."""
    values = jnp.stack([*sources, prefix]).astype(jnp.float32)
    keys = values / jnp.sqrt(jnp.mean(values**2, axis=-1, keepdims=True) + eps)
    pseudo_query = norm.astype(jnp.float32) * query.astype(jnp.float32)
    scores = jnp.einsum("s...d,d->s...", keys, pseudo_query, precision=jax.lax.Precision.HIGHEST)
    weights = jax.nn.softmax(scores, axis=0)
    mixed = jnp.einsum("s...,s...d->...d", weights, values, precision=jax.lax.Precision.HIGHEST)
    return mixed.astype(prefix.dtype)
