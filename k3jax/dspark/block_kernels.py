"""A draft's layers over the block of one sequence, as products that finish what stands between them.

A layer is nine launches: its norms, rotations, residuals and activations are done by the products beside them, by
`pallas.gemv.finish`, or by the one kernel that stores latents. Serves matrices of 8 bits, MLA, one row of a batch.
A norm's result is not rounded before its weights act, nor a product before the residual is added; all else is that of
the layers one by one.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from k3jax.cache import Rows
from k3jax.dspark.config import DraftMla
from k3jax.layers.draft_attention import MlaDraftAttention, Pool, Pools, first_and_length
from k3jax.layers.rope import angles
from pallas import gemv
from pallas.dispatch import BLACKWELL, HOPPER, require_capability
from pallas.draft import latents
from pallas.gemv import finish, finished
from pallas.gemv.widen import to_half
from pallas.mla import mosaic as attention
from pallas.mla import mosaic_plan

SHORT = 2048
"""Tokens that a page table of a short context has room for."""


def require_supported(draft: Any, x: Float[Array, "B G D"], pool: Pool) -> None:
    """Raises `NotImplementedError` with the reason for a draft or a block that the kernels do not serve."""
    require_capability("draft mosaic", HOPPER, BLACKWELL)
    sizes, layer = draft.config.attention, draft.layers[0]
    if not isinstance(sizes, DraftMla) or not draft.config.rope.interleaved:
        raise NotImplementedError("draft mosaic serves MLA with rotated neighbours")
    if not isinstance(layer.gate_up[...], gemv.Int8Matrix):
        raise NotImplementedError("draft mosaic serves matrices of 8 bits")
    if x.dtype != jnp.bfloat16 or pool.dtype != jnp.bfloat16 or x.shape[:2] != (1, finish.TOKENS):
        raise NotImplementedError(
            f"draft mosaic serves {finish.TOKENS} tokens of one row in bfloat16, got {x.dtype} {x.shape[:2]} and rows "
            f"of {pool.dtype}"
        )
    ranks = sizes.q_lora_rank, sizes.kv_lora_rank, sizes.qk_nope_head_dim
    if any(rank % 128 for rank in ranks) or sizes.qk_rope_head_dim != 64:
        raise NotImplementedError(
            f"draft mosaic serves ranks in multiples of 128 and 64 rotated channels, got {ranks} and "
            f"{sizes.qk_rope_head_dim}"
        )
    mosaic_plan.require_supported(jax.ShapeDtypeStruct((), x.dtype), pool, sizes.kv_lora_rank)


def run(
    draft: Any,
    x: Float[Array, "B G D"],
    position: Int32[Array, "B G"],
    pools: Pools,
    block: Rows,
    head: gemv.Int8Matrix | None,
) -> tuple[Float[Array, "B G D"], Float[Array, "B G V"] | None, Pools]:
    """The layers over a block of tokens: what its logits are made of, these if there is a `head`, the pools."""
    require_supported(draft, x, pools[0])
    eps, after = draft.config.norm_eps, []
    given = Given(
        jnp.concatenate(angles(position, draft.config.rope, draft.config.attention.qk_rope_head_dim), axis=1)[0],
        latents.Places(block.page_table[0], block.length, block.query_length),
        *first_and_length(block, pools[0], causal=draft.config.causal),
    )
    wide = x[0].astype(jnp.float32)
    half = to_half(wide * draft.layers[0].attention_norm.weight[...].astype(jnp.float32)[None])
    state = State(x[0], half, jnp.sum(jnp.square(wide), axis=-1)[None])
    norms = [layer.attention_norm for layer in draft.layers[1:]] + [draft.norm]
    for layer, pool, norm in zip(draft.layers, pools, norms, strict=True):
        attended, pool = _attend(layer.attention, state, pool, given, eps)
        after.append(pool)
        state = _feed_forward(attended, layer, state.stream, norm, eps)
    logits = None
    if head is not None:
        logits = finished.finished(state.half, head, finish.Normed(eps), (state.squares,))[0][None]
    return draft.norm(state.stream[None]), logits, tuple(after)


class Given(NamedTuple):
    """What all layers share."""

    angles: Float[Array, "16 half"]
    places: latents.Places
    start: Int32[Array, " 1"]
    length: Int32[Array, " 1"]


class State(NamedTuple):
    """What stands between two layers."""

    stream: Float[Array, "8 D"]
    half: Float[Array, "8 D"]
    """In float16, times the weights of the norm that follows."""
    squares: Float[Array, "_ 8"]
    """Sums of squares of the stream's tiles."""


def _attend(
    layer: MlaDraftAttention, state: State, pool: Pool, given: Given, eps: float
) -> tuple[Float[Array, "8 K"], Pool]:
    """All heads' values side by side, in float16, and the pool with the block's rows."""
    sizes, channels = layer.sizes, state.stream.shape[1]
    heads, rank, own = sizes.num_heads, sizes.kv_lora_rank, sizes.qk_nope_head_dim
    width = own + sizes.qk_rope_head_dim
    query, latent = finished.slices(state.half, (layer.q_down[...], layer.kv_down[...]))
    norms = latents.Norms(layer.q_norm.weight[...], layer.kv_norm.weight[...])
    compressed, pool = latents.store(
        query, latent, state.squares, channels, norms, given.angles, pool, given.places, eps
    )
    (query,) = finished.finished(compressed, _flat(layer.q_up[...]), finish.Rotated(own, width), (given.angles,))
    absorbed = finished.by_head(query, layer.lift[...], jnp.bfloat16)
    queries = absorbed.reshape(1, -1, rank), query.reshape(1, -1, width)
    table = given.places.page_table[None]
    options = {"heads": heads, "rank": rank, "scale": layer.scale}
    return _values(*queries, pool, table, given.start, given.length, layer.value_up[...], **options), pool


@partial(jax.jit, static_argnames=("heads", "rank", "scale"))
def _values(
    absorbed: Float[Array, "1 Q R"],
    query: Float[Array, "1 Q C"],
    pool: Pool,
    page_table: Int32[Array, "1 P"],
    start: Int32[Array, " 1"],
    length: Int32[Array, " 1"],
    value_up: Float[Array, "H V R"],
    **options: Any,
) -> Float[Array, "8 K"]:
    """All heads' values, from queries of latents and of the shared key."""
    # Groups of few queries finish a tile sooner; long contexts would be cut into too few parts with them.
    short = page_table.shape[1] * pool.shape[1] <= SHORT
    cut = mosaic_plan.Settings(queries=24) if short else mosaic_plan.DEFAULT
    mixed = attention.attend_pages(absorbed, query, pool, page_table, start, length, settings=cut, **options)
    return finished.by_head(mixed.reshape(finish.TOKENS, -1), value_up, jnp.float16)


def _feed_forward(
    attended: Float[Array, "8 K"], layer: Any, stream: Float[Array, "8 D"], norm: Any, eps: float
) -> State:
    """From the heads' values to the end of the layer; `norm` follows it."""
    operands = stream, layer.mlp_norm.weight[...]
    stream, half, squares = finished.finished(attended, _flat(layer.attention.out[...]), finish.Residual(), operands)
    (activation,) = finished.finished(half, _flat(layer.gate_up[...]), finish.Gated(eps), (squares,))
    return State(*finished.finished(activation, layer.down[...], finish.Residual(), (stream, norm.weight[...])))


def _flat(matrix: gemv.Int8Matrix) -> gemv.Int8Matrix:
    """With all outputs on one axis."""
    return gemv.Int8Matrix(matrix.codes.reshape(matrix.scale.size, -1), matrix.scale.reshape(-1))
