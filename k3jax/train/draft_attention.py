"""Attention of many blocks over one text at once: a block sees the context before its anchor and itself.

Scores between blocks, which no row sees, are left out but for a few: each row has S + 8 G keys, not S + A G.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from k3jax.layers.draft_attention import GqaDraftAttention
from k3jax.layers.rope import rotate
from pallas import gemv
from pallas.precision import einsum

TOGETHER = 8
"""Blocks whose scores among themselves are one product."""
TINY = 1e-30
LARGEST_SCORE = 80.0
"""Queries and keys are normed, so scores stay far below; no maximum has to be taken off before the exponential."""


@jax.custom_jvp
def exponential(scores: Float[Array, "..."]) -> Float[Array, "..."]:
    """The exponential in float32, rounded to the scores' dtype; the derivative keeps only the rounded values.

    Half the memory of what autodiff would keep.
    """
    return jnp.exp(jnp.minimum(scores.astype(jnp.float32), LARGEST_SCORE)).astype(scores.dtype)


@exponential.defjvp
def _exponential_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    result = exponential(primals[0])
    return result, result * tangents[0]


def packed_attention(
    attention: GqaDraftAttention,
    x: Float[Array, "B A G D"],
    position: Int32[Array, "B A G"],
    context: Float[Array, "B S L"],
    before: Bool[Array, "B A S"],
    *,
    causal: bool,
) -> Float[Array, "B A G D"]:
    """What `attention` gives for every block alone; `before` says which context rows its anchor has behind it."""
    batch, count, width, size = x.shape
    kv_heads, dim = attention.sizes.num_kv_heads, attention.sizes.head_dim
    flat, place = x.reshape(batch, -1, size), position.reshape(batch, -1)
    (query,) = gemv.project(flat, attention.q[...])
    query = rotate(attention.q_norm(query), place, attention.rope) * jnp.asarray(dim**-0.5, x.dtype)
    query = query.reshape(batch, count * width, kv_heads, -1, dim)
    past = context.reshape(batch, -1, 2, kv_heads, dim)
    seen = exponential(einsum("bqkhc,bskc->bkhqs", query, past[:, :, 0]))
    seen = seen * jnp.repeat(before, width, axis=1)[:, None, None].astype(seen.dtype)
    mixed = einsum("bkhqs,bskc->bqkhc", seen, past[:, :, 1], out=jnp.dtype(jnp.float32))
    own = attention.rows(flat, place).reshape(batch, count * width, 2, kv_heads, dim)
    inner, total = _within_blocks(query, own, count, causal)
    total = total + _row_sum(seen).transpose(0, 3, 1, 2)
    result = ((mixed + inner) / jnp.maximum(total, TINY)[..., None]).astype(x.dtype)
    (output,) = gemv.project(result.reshape(batch, count * width, -1, dim), attention.out[...], contract=2)
    return output.reshape(x.shape)


def _within_blocks(
    query: Float[Array, "B Q k h c"], own: Float[Array, "B Q 2 k c"], count: int, causal: bool
) -> tuple[Float32[Array, "B Q k h c"], Float32[Array, "B Q k h"]]:
    """Values that `count` blocks see in themselves, summed with their weights, and the sums of the weights.

    A few blocks at a time, masked: products of single blocks are too small for the device.
    """
    batch, rows, kv_heads, heads, dim = query.shape
    together = math.gcd(count, TOGETHER)
    size = rows // count * together
    block = np.arange(size) // (size // together)
    mask = block[:, None] == block[None, :]
    mask = jnp.asarray(np.tril(mask) if causal else mask, query.dtype)
    query = query.reshape(batch, -1, size, kv_heads, heads, dim)
    own = own.reshape(batch, -1, size, 2, kv_heads, dim)
    weights = exponential(einsum("bnqkhc,bnfkc->bnkhqf", query, own[:, :, :, 0]))
    weights = weights * mask[None, None, None, None]
    mixed = einsum("bnkhqf,bnfkc->bnqkhc", weights, own[:, :, :, 1], out=jnp.dtype(jnp.float32))
    total = _row_sum(weights).transpose(0, 1, 4, 2, 3)
    return mixed.reshape(batch, rows, kv_heads, heads, dim), total.reshape(batch, rows, kv_heads, heads)


def _row_sum(weights: Float[Array, "*batch n"]) -> Float32[Array, "*batch"]:
    return jnp.sum(weights.astype(jnp.float32), axis=-1)
