"""Portable AttnRes that never stacks the sources and has a two-phase form."""

import functools
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas.attn_res.types import Read, Summary


def _score(source: Float[Array, "*batch D"], pseudo_query: Float[Array, " D"], eps: float) -> Float[Array, "*batch"]:
    """The normalisation is pulled out of the product: rsqrt(mean v^2 + eps) * <v, norm * query>."""
    value = source.astype(jnp.float32)
    projected = jnp.einsum("...d,d->...", value, pseudo_query, precision=jax.lax.Precision.HIGHEST)
    return jax.lax.rsqrt(jnp.mean(jnp.square(value), axis=-1) + eps) * projected


def _pseudo_query(norm: Float[Array, "*sites D"], query: Float[Array, "*sites D"]) -> Float[Array, "*sites D"]:
    return norm.astype(jnp.float32) * query.astype(jnp.float32)


def mix(
    sources: tuple[Float[Array, "*batch D"], ...],
    prefix: Float[Array, "*batch D"],
    norm: Float[Array, " D"],
    query: Float[Array, " D"],
    *,
    eps: float,
) -> Float[Array, "*batch D"]:
    """See `pallas.attn_res.mix`."""
    if not sources:
        return prefix
    pseudo_query = _pseudo_query(norm, query)
    values = (*sources, prefix)
    scores = jnp.stack([_score(value, pseudo_query, eps) for value in values])
    weights = jax.nn.softmax(scores, axis=0)
    terms = [weight[..., None] * value.astype(jnp.float32) for weight, value in zip(weights, values, strict=True)]
    return functools.reduce(operator.add, terms).astype(prefix.dtype)


def read(
    sources: tuple[Float[Array, "*batch D"], ...],
    prefix: Float[Array, "*batch D"],
    output: Float[Array, "*batch D"] | None,
    norm: Float[Array, " D"],
    query: Float[Array, " D"],
    out_norm: Float[Array, " D"],
    eps: float,
    norm_eps: float,
) -> Read:
    """See `pallas.attn_res.read`; the norm's weight acts after rounding, as Moonshot's does."""
    prefix = prefix if output is None else prefix + output
    wide = mix(sources, prefix, norm, query, eps=eps).astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + norm_eps)
    return Read(prefix, jnp.broadcast_to(out_norm, prefix.shape) * (wide * scale).astype(prefix.dtype))


def summarize(
    sources: tuple[Float[Array, "*batch D"], ...],
    norms: Float[Array, "sites D"],
    queries: Float[Array, "sites D"],
    *,
    eps: float,
) -> Summary:
    """See `pallas.attn_res.summarize`; at least one source."""
    if not sources:
        raise ValueError("summarize got no sources, expected at least one frozen block; the mix of none is the prefix")
    values = jnp.stack(sources).astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(values), axis=-1) + eps)
    projected = jnp.einsum(
        "n...d,sd->sn...", values, _pseudo_query(norms, queries), precision=jax.lax.Precision.HIGHEST
    )
    scores = scale[None] * projected
    maximum = jnp.max(scores, axis=1)
    weights = jnp.exp(scores - maximum[:, None])
    mixed = jnp.einsum("sn...,n...d->s...d", weights, values, precision=jax.lax.Precision.HIGHEST)
    return Summary(maximum, jnp.sum(weights, axis=1), mixed)


def merge(
    summary: Summary,
    site: int | Int[Array, ""],
    prefix: Float[Array, "*batch D"],
    norm: Float[Array, " D"],
    query: Float[Array, " D"],
    *,
    eps: float,
) -> Float[Array, "*batch D"]:
    """See `pallas.attn_res.merge`."""
    score = _score(prefix, _pseudo_query(norm, query), eps)
    maximum = jnp.maximum(summary.maximum[site], score)
    old, new = jnp.exp(summary.maximum[site] - maximum), jnp.exp(score - maximum)
    mixed = old[..., None] * summary.mixed[site] + new[..., None] * prefix.astype(jnp.float32)
    return (mixed / (old * summary.total[site] + new)[..., None]).astype(prefix.dtype)
