"""The routed experts of few tokens: two streaming kernels, gate and up with SiTU, then down.

One token takes both products in one kernel (`mosaic_token`) where there are warpgroup products.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas import dispatch
from pallas.moe import mosaic_arrange, mosaic_token
from pallas.moe.mosaic_expand import DEPTH, ROWS, blocks_of_box
from pallas.moe.mosaic_pair import COLUMNS, E4M3, TOKENS, Pairs, split
from pallas.moe.mosaic_stream import Settings, Work, situ, stream
from pallas.moe.mxfp4 import GROUP
from pallas.moe.types import PackedExperts
from pallas.moe.xla import combine

MOST_TOKENS = 128
SHARED_MEMORY = 230_000
"""Bytes for buffers; barriers and alignment take the rest."""


class Plan(NamedTuple):
    """Blocks of one expert and up to four of its tokens, and which (token, slot) pair each column is."""

    expert: Int32[Array, " U"]
    used: Int32[Array, "1"]
    pair: Int32[Array, "U 4"]
    """Flat pair of a column, -1 where there is none."""


def plan(ids: Int32[Array, "N k"], num_experts: int) -> Plan:
    """Blocks in the order of their first pair. Up to four tokens have a column each, the same in every block."""
    tokens, k = ids.shape
    flat = ids.reshape(-1)
    pairs = flat.shape[0]
    column = jnp.arange(TOKENS, dtype=jnp.int32)[None]
    number = jnp.arange(pairs, dtype=jnp.int32)
    if tokens == 1:  # a slot without an expert computes for nothing, and nothing is to be planned
        return Plan(flat, jnp.full(1, k, jnp.int32), jnp.where(column == 0, number[:, None], -1))
    blocks = most_blocks(ids, num_experts)
    earlier = number[None] < number[:, None]
    same = (flat[:, None] == flat[None]) & (flat >= 0)[:, None]
    rank = jnp.sum(same & earlier, axis=1, dtype=jnp.int32)
    leader = (rank % TOKENS == 0) & (flat >= 0)
    begun = jnp.sum(leader[None] & earlier, axis=1, dtype=jnp.int32)
    led = same & leader[None] & (rank[None] // TOKENS == rank[:, None] // TOKENS)
    block = jnp.sum(jnp.where(led, begun[None], 0), axis=1, dtype=jnp.int32)
    place = block * TOKENS + (number // k if tokens <= TOKENS else rank % TOKENS)
    place = jnp.where(flat >= 0, place, -1)
    pair = jnp.max(jnp.where(place[None] == jnp.arange(blocks * TOKENS)[:, None], number[None], -1), axis=1)
    pair = pair.reshape(blocks, TOKENS)
    return Plan(flat[jnp.maximum(jnp.max(pair, axis=1), 0)], jnp.sum(leader, dtype=jnp.int32).reshape(1), pair)


def arrange(pairs: Pairs, order: Plan, k: int) -> Pairs:
    """The activations of every block's columns."""
    token = jnp.maximum(order.pair, 0) // k
    rows = pairs.rows.reshape(-1, 2, pairs.rows.shape[1])[token]
    return Pairs(rows.reshape(-1, rows.shape[-1]), pairs.unit[token])


def require_supported(x: jax.Array, experts: Any) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernels do not serve."""
    if not isinstance(experts, PackedExperts):
        raise NotImplementedError("moe mosaic kernels serve packed MXFP4 experts, got dense ones")
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"moe mosaic kernels serve bfloat16 activations, got {x.dtype}")
    latent, inner = x.shape[1], experts.gate_up_packed.shape[2]
    if latent % DEPTH or inner % DEPTH:
        raise NotImplementedError(f"moe mosaic kernels serve widths in multiples of {DEPTH}, got {latent} and {inner}")


def settings_for(depth: int, planes: int, shared: bool, most: int = 6) -> Settings:
    """The cut of a kernel: as many buffers as fit, at most `most`; tiles of little depth are not shared.

    `shared` says that all blocks have the same activations.
    """
    box = blocks_of_box(depth)
    split = 4 if depth // (DEPTH * box) >= 4 else 1
    buffer = box * DEPTH * (planes * ROWS // 2 + (0 if shared else COLUMNS))
    used = 2 * 4 * planes * ROWS * TOKENS * 4 + (COLUMNS * depth if shared else 0)
    return Settings(
        split=split,
        stages=min(most, (SHARED_MEMORY - used) // (4 * buffer)),
        blocks=dispatch.multiprocessors(),
        warps=dispatch.warps_multiply(),
    )


def experts(
    x: Float[Array, "N L"],
    ids: Int32[Array, "N k"],
    weights: Float32[Array, "N k"],
    experts: PackedExperts,
    beta: float,
    linear_beta: float,
    dtype: jnp.dtype | None = None,
    interpret: Any = None,
    cuts: tuple[Settings, Settings] | None = None,
) -> Float[Array, "N L"]:
    """`api.experts` for at most `MOST_TOKENS` tokens."""
    require_supported(x, experts)
    tokens, latent = x.shape
    if tokens > MOST_TOKENS:
        raise NotImplementedError(f"the moe decode kernel serves up to {MOST_TOKENS} tokens, got {tokens}")
    if tokens == 1 and cuts is None and not dispatch.warps_multiply():
        return mosaic_token.experts(x, ids, weights, experts, beta, linear_beta, dtype, interpret)
    num_experts, _, inner = experts.gate_up_packed.shape[:3]
    order, activations = prepared(x, ids, num_experts, interpret is not None)
    blocks, shared = order.expert.shape[0], not isinstance(activations, Pairs)
    # With one token the start counts: every buffer has a barrier that must be prepared.
    cuts = cuts or (settings_for(latent, 2, shared), settings_for(inner, 1, False, most=2 if tokens == 1 else 6))
    spec = jax.ShapeDtypeStruct
    own = COLUMNS * jnp.arange(blocks, dtype=jnp.int32)
    hidden = stream(
        activations,
        experts.gate_up_packed,
        experts.gate_up_scale,
        Work(order.expert, jnp.zeros_like(own) if shared else own, order.used, None),
        Pairs(spec((blocks * COLUMNS, inner), E4M3), spec((blocks, TOKENS, inner // GROUP), jnp.float32)),
        lambda gate, up: situ(gate, up, beta, linear_beta),
        cuts[0],
        "moe_up",
        interpret,
    )
    outputs = stream(
        Pairs(*hidden),
        experts.down_packed[:, None],
        experts.down_scale[:, None],
        Work(order.expert, own, order.used, order.pair),
        spec((ids.size, latent), jnp.float32),
        lambda value: value,
        cuts[1],
        "moe_down",
        interpret,
    )
    return combine(outputs.reshape(*ids.shape, latent), ids, weights, dtype or x.dtype)


def prepared(
    x: Float[Array, "N L"], ids: Int32[Array, "N k"], num_experts: int, interpreted: bool
) -> tuple[Plan, Float[Array, "N L"] | Pairs]:
    """The blocks of work and their activations: in one launch, or none for one token."""
    tokens, k = ids.shape
    if 1 < tokens <= mosaic_arrange.MOST_TOKENS and k <= mosaic_arrange.MOST_CHOSEN and not interpreted:
        *order, pairs = mosaic_arrange.arrange(x, ids, num_experts, most_blocks(ids, num_experts))
        return Plan(*order), pairs
    order = plan(ids, num_experts)
    return order, x if tokens <= TOKENS else arrange(split(x, tokens), order, k)


def most_blocks(ids: Int32[Array, "N k"], num_experts: int) -> int:
    """As many as there can be: each expert may leave one block unfilled."""
    return min(ids.size, num_experts + ids.size // TOKENS)
