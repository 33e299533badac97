"""Joins the parts of a split attention where `mosaic_decode` is interpreted; on a GPU `mosaic_share` does."""

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int32

from pallas.mla.mosaic_plan import LOWEST, Plan, parts_of


def join(
    plan: Plan,
    mixed: Float[Array, "B G S N R"],
    stats: Float32[Array, "B G S 2 N"],
    length: Int32[Array, " B"],
    queries: int,
) -> BFloat16[Array, "B Q R"]:
    """The attention of every query: parts weighted by exp2(their maximum) and divided by the sum of all.

    Unwritten parts, whose memory may hold anything, weigh nothing.
    """
    used = parts_of(length, plan.parts, plan.least)
    there = (jnp.arange(plan.parts, dtype=jnp.int32)[None] < used[:, None])[:, None, :, None]
    tops, totals = (jnp.where(there, stats[:, :, :, kind], low) for kind, low in enumerate((LOWEST, 0.0)))
    values = jnp.where(there[..., None], mixed.astype(jnp.float32), 0.0)
    weights = jnp.exp2(tops - jnp.max(tops, axis=2, keepdims=True))
    value, total = jnp.sum(weights[..., None] * values, axis=2), jnp.sum(weights * totals, axis=2)
    value = value / jnp.maximum(total, 1e-30)[..., None]
    return value.reshape(value.shape[0], -1, plan.rank)[:, :queries].astype(jnp.bfloat16)
