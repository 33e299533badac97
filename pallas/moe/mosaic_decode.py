"""The routed experts of a few tokens: two streaming kernels, gate and up with SiTU, then down."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas.moe.mosaic_expand import DEPTH, ROWS, blocks_of_box, interleave
from pallas.moe.mosaic_stream import Settings, Work, situ, stream
from pallas.moe.types import PackedExperts
from pallas.moe.xla import combine

MOST_TOKENS = 16
SHARED_MEMORY = 230_000
"""Bytes for buffers; barriers and alignment take the rest."""


class Plan(NamedTuple):
    """Distinct experts of a call, and which (token, slot) pair each (expert, token) is."""

    expert: Int32[Array, " U"]
    used: Int32[Array, "1"]
    pair: Int32[Array, "U N"]
    """Flat pair of token n in block u, -1 where the token did not choose the expert."""


def plan(ids: Int32[Array, "N k"], columns: int, num_experts: int) -> Plan:
    """Blocks of distinct experts in the order of their first pair."""
    tokens, k = ids.shape
    flat = ids.reshape(-1)
    pairs = flat.shape[0]
    if (
        tokens == 1
    ):  # every slot is a block; a slot without an expert computes for nothing, and nothing is to be planned
        pair = jnp.where(jnp.arange(columns)[None] == 0, jnp.arange(k)[:, None], -1).astype(jnp.int32)
        return Plan(flat, jnp.full(1, k, jnp.int32), pair)
    blocks = min(pairs, num_experts)
    number = jnp.arange(pairs, dtype=jnp.int32)
    same = flat[:, None] == flat[None]
    first = jnp.min(jnp.where(same, number[None], pairs), axis=1)
    leader = (first == number) & (flat >= 0)
    rank = jnp.sum(leader[None] & (number[None] < first[:, None]), axis=1).astype(jnp.int32)
    mine = (rank[None] == jnp.arange(blocks, dtype=jnp.int32)[:, None]) & (flat >= 0)[None]
    expert = jnp.sum(jnp.where(mine & leader[None], flat[None], 0), axis=1).astype(jnp.int32)
    by_token = mine.reshape(blocks, tokens, k)
    pair = jnp.max(jnp.where(by_token, number.reshape(tokens, k)[None], -1), axis=2)
    pair = jnp.pad(pair, ((0, 0), (0, columns - tokens)), constant_values=-1)
    return Plan(expert, jnp.sum(leader).astype(jnp.int32).reshape(1), pair)


def require_supported(x: jax.Array, experts: Any) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernels do not serve."""
    if not isinstance(experts, PackedExperts):
        raise NotImplementedError("moe mosaic kernels serve packed MXFP4 experts, got dense ones")
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"moe mosaic kernels serve bfloat16 activations, got {x.dtype}")
    latent, inner = x.shape[1], experts.gate_up_packed.shape[2]
    if latent % DEPTH or inner % DEPTH:
        raise NotImplementedError(f"moe mosaic kernels serve widths in multiples of {DEPTH}, got {latent} and {inner}")


def settings_for(depth: int, planes: int, columns: int) -> Settings:
    """The cut of a kernel: as many buffers as fit; tiles of little depth are not shared."""
    box = blocks_of_box(depth)
    split = 4 if depth // (DEPTH * box) >= 4 else 1
    resident = planes == 2 and columns == 8
    buffer = box * DEPTH * (planes * ROWS // 2 + (0 if resident else 2 * columns))
    used = 4 * planes * ROWS * columns * 4 + (2 * columns * depth if resident else 0)
    return Settings(split=split, stages=min(6, (SHARED_MEMORY - used) // (4 * buffer)))


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
    columns = 8 if tokens <= 8 else 16
    inner = experts.gate_up_packed.shape[2]
    cuts = cuts or (settings_for(latent, 2, columns), settings_for(inner, 1, columns))
    order = plan(ids, columns, experts.gate_up_packed.shape[0])
    blocks = order.expert.shape[0]
    rows = jnp.pad(interleave(x), ((0, columns - tokens), (0, 0)))
    zeros = jnp.zeros_like(order.expert)
    hidden = stream(
        rows,
        experts.gate_up_packed,
        experts.gate_up_scale,
        Work(order.expert, zeros, order.used, None),
        jax.ShapeDtypeStruct((blocks * columns, inner), jnp.bfloat16),
        lambda gate, up: situ(gate, up, beta, linear_beta),
        columns,
        cuts[0],
        "moe_up",
        interpret,
    )
    first = columns * jnp.arange(blocks, dtype=jnp.int32)
    outputs = stream(
        hidden,
        experts.down_packed[:, None],
        experts.down_scale[:, None],
        Work(order.expert, first, order.used, order.pair),
        jax.ShapeDtypeStruct((ids.size, latent), jnp.float32),
        lambda value: value,
        columns,
        cuts[1],
        "moe_down",
        interpret,
    )
    return combine(outputs.reshape(*ids.shape, latent), ids, weights, dtype or x.dtype)
