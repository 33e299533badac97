"""The Mosaic GPU backend of latent attention: projections by XLA around the kernels."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas.dispatch import BLACKWELL, HOPPER, require_capability
from pallas.mla import mosaic_decode, mosaic_plan, mosaic_prefill, xla
from pallas.precision import einsum


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
    """`api.decode`: keys are folded into the query, values are lifted after the sum."""
    require_capability("mla mosaic decode", HOPPER, BLACKWELL)
    own, rank = key_up.shape[1:]
    mosaic_plan.require_supported(query, pool, rank)
    rows, tokens, heads, _ = query.shape
    absorbed = einsum("bwhk,hkr->bwhr", query[..., :own], key_up)
    absorbed, query = (x.reshape(rows, tokens * heads, -1) for x in (absorbed, query))
    options = {"heads": heads, "rank": rank, "scale": scale}
    mixed = attend_pages(absorbed, query, pool, page_table, start, length, page_scale, **options)
    return einsum("bwhr,hvr->bwhv", mixed.reshape(rows, tokens, heads, rank), value_up)


def attend_pages(
    absorbed: Float[Array, "B Q R"],
    shared: Float[Array, "B Q C"],
    pool: Float[Array, "pages page L"],
    page_table: Int32[Array, "B P"],
    start: Int32[Array, " B"],
    length: Int32[Array, " B"],
    page_scale: Float32[Array, " pages"] | None = None,
    *,
    heads: int,
    rank: int,
    scale: float,
    settings: mosaic_plan.Settings = mosaic_plan.DEFAULT,
    interpret: Any = None,
) -> Float[Array, "B Q R"]:
    """Attention of absorbed queries over the latents themselves; query r is head r % heads of token r // heads.

    The last channels of `shared`, as many as the latents have beyond `rank`, meet the key that heads share.
    """
    return mosaic_decode.attend(
        absorbed,
        shared,
        pool,
        page_table,
        start,
        length,
        page_scale,
        heads=heads,
        rank=rank,
        scale=scale,
        settings=settings,
        interpret=interpret,
    )


def prefill(*args: Array, scale: float) -> Float[Array, "B T H V"]:
    """`api.prefill`, arguments as of `expanded`."""
    require_capability("mla mosaic prefill", HOPPER, BLACKWELL)
    return differentiable_prefill(*args, scale)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def differentiable_prefill(*args: Any) -> Float[Array, "B T H V"]:
    """The kernel's values, with the gradients of the portable form, recomputed."""
    return expanded(*args)


def expanded(
    query: Float[Array, "B T H Q"],
    latents: Float[Array, "B S L"],
    key_up: Float[Array, "H K R"],
    value_up: Float[Array, "H V R"],
    start: Int32[Array, " B"],
    length: Int32[Array, " B"],
    scale: float,
) -> Float[Array, "B T H V"]:
    """Lifts keys and values of every head, then attends; tokens are padded to the kernel's multiple of 8."""
    rank, tokens = key_up.shape[-1], query.shape[1]
    query, latents = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8)) + ((0, 0),) * (x.ndim - 2)) for x in (query, latents))
    latents = xla.clean(latents, length)
    own = einsum("bsr,hkr->bshk", latents[..., :rank], key_up)
    value = einsum("bsr,hvr->bshv", latents[..., :rank], value_up)
    return mosaic_prefill.attend(query, own, latents[..., rank:], value, start, scale=scale)[:, :tokens]


def _forward(*args: Any) -> tuple[Array, tuple]:
    return expanded(*args), args[:6]


def _backward(scale: float, saved: tuple, cotangent: Array) -> tuple:
    *floats, start, length = saved
    _, pull_back = jax.vjp(lambda *floats: xla.prefill(*floats, start, length, scale=scale), *floats)
    return (*pull_back(cotangent), None, None)


differentiable_prefill.defvjp(_forward, _backward)
