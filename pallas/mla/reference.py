"""Latent attention as the report writes it: per head keys and values, causal softmax."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def attend(
    query: Float[Array, "B T H Q"],
    latents: Float[Array, "B S L"],
    key_up: Float[Array, "H K R"],
    value_up: Float[Array, "H V R"],
    start: Int32[Array, " B"],
    *,
    scale: float,
) -> Float[Array, "B T H V"]:
    """The definition in float32; see `pallas.mla.prefill`."""
    highest = jax.lax.Precision.HIGHEST
    query, latents, key_up, value_up = (x.astype(jnp.float32) for x in (query, latents, key_up, value_up))
    rank = key_up.shape[-1]
    compressed, shared = latents[..., :rank], latents[..., rank:]
    heads = key_up.shape[0]
    key = jnp.concatenate(
        [
            jnp.einsum("bsr,hkr->bshk", compressed, key_up, precision=highest),
            jnp.repeat(shared[:, :, None], heads, axis=2),
        ],
        axis=-1,
    )
    value = jnp.einsum("bsr,hvr->bshv", compressed, value_up, precision=highest)
    scores = scale * jnp.einsum("bthq,bshq->bhts", query, key, precision=highest)
    position = start[:, None] + jnp.arange(query.shape[1], dtype=jnp.int32)[None]
    visible = jnp.arange(latents.shape[1], dtype=jnp.int32)[None, None] <= position[..., None]
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshv->bthv", weights, value, precision=highest)
