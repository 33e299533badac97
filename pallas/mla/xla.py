"""Portable latent attention: expanded for prefill, absorbed for decode."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas.mla import pages
from pallas.precision import einsum


def _visible(queries: int, keys: int, start: Int32[Array, " B"]) -> Bool[Array, "B T S"]:
    position = start[:, None] + jnp.arange(queries, dtype=jnp.int32)[None, :]
    return jnp.arange(keys, dtype=jnp.int32)[None, None, :] <= position[:, :, None]


def clean(latents: Float[Array, "B S L"], length: Int32[Array, " B"]) -> Float[Array, "B S L"]:
    """Zeros beyond each row's tokens: a stale NaN would survive a softmax weight of zero."""
    stored = jnp.arange(latents.shape[1], dtype=jnp.int32)[None] < length[:, None]
    return jnp.where(stored[..., None], latents, jnp.zeros((), latents.dtype))


def _softmax(scores: Float[Array, "B H T S"], visible: Bool[Array, "B T S"], scale: float) -> Float[Array, "B H T S"]:
    return jax.nn.softmax(jnp.where(visible[:, None], scores * scale, -jnp.inf), axis=-1)


def prefill(
    query: Float[Array, "B T H Q"],
    latents: Float[Array, "B S L"],
    key_up: Float[Array, "H K R"],
    value_up: Float[Array, "H V R"],
    start: Int32[Array, " B"],
    length: Int32[Array, " B"],
    *,
    scale: float,
) -> Float[Array, "B T H V"]:
    """See `pallas.mla.prefill`."""
    own, rank = key_up.shape[1:]
    visible = _visible(query.shape[1], latents.shape[1], start)
    latents = clean(latents, length)
    compressed, shared = latents[..., :rank], latents[..., rank:]
    key = einsum("bsr,hkr->bshk", compressed, key_up)
    value = einsum("bsr,hvr->bshv", compressed, value_up)
    scores = einsum("bthk,bshk->bhts", query[..., :own], key, out=jnp.dtype(jnp.float32))
    scores += einsum("bthc,bsc->bhts", query[..., own:], shared, out=jnp.dtype(jnp.float32))
    weights = _softmax(scores, visible, scale).astype(query.dtype)
    return einsum("bhts,bshv->bthv", weights, value)


def decode(
    query: Float[Array, "B W H Q"],
    pool: Float[Array, "pages page L"],
    page_table: Int32[Array, "B P"],
    key_up: Float[Array, "H K R"],
    value_up: Float[Array, "H V R"],
    start: Int32[Array, " B"],
    length: Int32[Array, " B"],
    page_scale: Float32[Array, " pages"] | None = None,
    *,
    scale: float,
) -> Float[Array, "B W H V"]:
    """See `pallas.mla.decode`: keys are folded into the query, values are lifted after the sum."""
    own, rank = key_up.shape[1:]
    latents = pages.gather(pool, page_table, page_scale).astype(query.dtype)
    # A query beyond the last token sees what the last one sees.
    last = jnp.maximum(length - 1, 0)[:, None, None]
    position = jnp.arange(latents.shape[1], dtype=jnp.int32)[None, None]
    visible = _visible(query.shape[1], latents.shape[1], start) & (position <= last)
    latents = clean(latents, length)
    absorbed = einsum("bwhk,hkr->bwhr", query[..., :own], key_up)
    full = jnp.concatenate([absorbed, query[..., own:]], axis=-1)
    scores = einsum("bwhl,bsl->bhws", full, latents, out=jnp.dtype(jnp.float32))
    weights = _softmax(scores, visible, scale).astype(query.dtype)
    mixed = einsum("bhws,bsr->bwhr", weights, latents[..., :rank])
    return einsum("bwhr,hvr->bwhv", mixed, value_up)
