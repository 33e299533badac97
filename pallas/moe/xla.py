"""Portable MoE: a gather of the chosen experts for a few tokens, expert blocks for many.

`lax.ragged_dot` multiplies every row by every expert on the CPU and reaches 12 TFLOP/s on an H200, so
many tokens are sorted by expert into blocks of rows that share one expert, and each block is one
dense product. Blocks of unused capacity are skipped.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas.activation import situ
from pallas.moe import grouped
from pallas.moe.mxfp4 import dequantize
from pallas.moe.mxfp8 import Activations, rounded
from pallas.moe.types import DenseExperts, Experts, Routing
from pallas.precision import einsum

FEW_PAIRS = 64
"""Up to this many (token, expert) pairs each pair gathers its own weights."""

BLOCK = 32
"""Rows per expert block."""

FEW_TOKENS = 8
"""Up to this many tokens the best experts are found by counting."""


def choose(logits: Float32[Array, "N E"], correction_bias: Float32[Array, " E"], *, k: int, scaling: float) -> Routing:
    """See `pallas.moe.choose`."""
    biased = jax.nn.sigmoid(logits) + correction_bias[None]
    ids = _top_few(biased, k) if logits.shape[0] <= FEW_TOKENS else jax.lax.top_k(biased, k)[1]
    return Routing(ids, weights_of(logits, ids, scaling))


def weights_of(logits: Float32[Array, "N E"], ids: Int32[Array, "N k"], scaling: float) -> Float32[Array, "N k"]:
    """The chosen experts' scores over their sum, times `scaling`."""
    chosen = jnp.take_along_axis(jax.nn.sigmoid(logits), ids, axis=-1)
    return chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + 1e-20) * scaling


def _top_few(values: Float32[Array, "N E"], k: int) -> Int32[Array, "N k"]:
    """`jax.lax.top_k` by counting: the rank of a value is how many come before it. Two reductions instead of a sort.

    Values are compared as integers of the same order, so that even NaNs have one order and ranks are a permutation.
    """
    bits = jax.lax.bitcast_convert_type(values + 0.0, jnp.int32)
    key = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    index = jnp.arange(values.shape[1], dtype=jnp.int32)
    mine, other = key[:, :, None], key[:, None, :]
    before = (other > mine) | ((other == mine) & (index[None, None, :] < index[None, :, None]))
    rank = jnp.sum(before, axis=2, dtype=jnp.int32)
    found = rank[:, None, :] == jnp.arange(k, dtype=jnp.int32)[None, :, None]
    return jnp.sum(jnp.where(found, index[None, None, :], 0), axis=2, dtype=jnp.int32)


def _take(experts: Experts, index: Int32[Array, "*blocks"], dtype: jnp.dtype) -> DenseExperts:
    """The weights of the experts named by `index`, decoded."""
    chosen = jax.tree.map(lambda array: array[index], experts)
    if isinstance(chosen, DenseExperts):
        return chosen
    return DenseExperts(
        dequantize(chosen.gate_up_packed, chosen.gate_up_scale, dtype),
        dequantize(chosen.down_packed, chosen.down_scale, dtype),
    )


Keep = Callable[[Array], Array]
"""What is left of the inputs of a product."""


def _all_of_it(x: Array) -> Array:
    return x


def _expert_mlp(
    x: Float[Array, "*blocks M L"], weights: DenseExperts, beta: float, linear_beta: float, keep: Keep
) -> Float[Array, "*blocks M L"]:
    hidden = einsum("...ml,...ifl->...imf", x, weights.gate_up)
    activation = situ(hidden[..., 0, :, :], hidden[..., 1, :, :], beta=beta, linear_beta=linear_beta)
    return einsum("...mf,...lf->...ml", keep(activation), weights.down)


class _Blocks(NamedTuple):
    """Where each (token, expert) pair goes when every expert's pairs are padded to whole blocks."""

    row: Int32[Array, " pairs"]
    expert: Int32[Array, " blocks"]
    used: Int32[Array, ""]


def _blocks(pair_expert: Int32[Array, " pairs"], num_experts: int, block: int) -> _Blocks:
    pairs, groups = pair_expert.shape[0], num_experts + 1
    pair_expert = jnp.where(pair_expert < 0, num_experts, pair_expert)
    count = jnp.bincount(pair_expert, length=groups).astype(jnp.int32)
    block_end = jnp.cumsum((count + block - 1) // block)
    block_start = jnp.concatenate([jnp.zeros(1, jnp.int32), block_end[:-1].astype(jnp.int32)])
    order = jnp.argsort(pair_expert, stable=True).astype(jnp.int32)
    sorted_expert = pair_expert[order]
    rank = jnp.arange(pairs, dtype=jnp.int32) - (jnp.cumsum(count) - count)[sorted_expert].astype(jnp.int32)
    row = jnp.zeros(pairs, jnp.int32).at[order].set(block_start[sorted_expert] * block + rank)
    capacity = min(-(-pairs // block) + groups, pairs)
    expert = jnp.searchsorted(block_end, jnp.arange(capacity, dtype=jnp.int32), side="right")
    return _Blocks(row, jnp.minimum(expert, num_experts - 1).astype(jnp.int32), block_end[-2].astype(jnp.int32))


def _by_block(
    x: Float[Array, "N L"], ids: Int32[Array, "N k"], experts: Experts, beta: float, linear_beta: float, keep: Keep
) -> Float[Array, "N k L"]:
    tokens, k = ids.shape
    blocks = _blocks(ids.reshape(-1), experts[0].shape[0], BLOCK)  # slots without an expert come last, unused
    capacity = blocks.expert.shape[0]
    rows = jnp.zeros((capacity * BLOCK, x.shape[1]), x.dtype).at[blocks.row].set(jnp.repeat(x, k, axis=0))
    rows = rows.reshape(capacity, BLOCK, -1)

    def one(_: None, item: tuple[Array, Array, Array]) -> tuple[None, Array]:
        index, expert, block_rows = item

        def compute() -> Array:
            return _expert_mlp(block_rows, _take(experts, expert, x.dtype), beta, linear_beta, keep)

        return None, jax.lax.cond(index < blocks.used, compute, lambda: jnp.zeros_like(block_rows))

    _, outputs = jax.lax.scan(one, None, (jnp.arange(capacity, dtype=jnp.int32), blocks.expert, rows))
    return outputs.reshape(capacity * BLOCK, -1)[blocks.row].reshape(tokens, k, -1)


def experts(
    x: Float[Array, "N L"],
    ids: Int32[Array, "N k"],
    weights: Float[Array, "N k"],
    experts: Experts,
    *,
    beta: float,
    linear_beta: float,
    dtype: jnp.dtype | None = None,
    activations: Activations = None,
) -> Float[Array, "N L"]:
    """See `pallas.moe.experts`."""
    tokens, k = ids.shape
    dtype = dtype or x.dtype
    if activations is not None and isinstance(experts, DenseExperts):
        raise NotImplementedError(f"activations {activations!r} go with packed experts, got dense ones")
    keep = _all_of_it if activations is None else rounded
    x = keep(x)
    if tokens * k <= FEW_PAIRS:
        rows = jnp.repeat(x, k, axis=0)[:, None]
        chosen = _take(experts, jnp.maximum(ids.reshape(-1), 0), x.dtype)
        outputs = _expert_mlp(rows, chosen, beta, linear_beta, keep).reshape(tokens, k, -1)
    elif isinstance(experts, DenseExperts):
        return grouped.experts(x, ids, weights, experts, beta=beta, linear_beta=linear_beta, dtype=dtype)
    else:
        outputs = _by_block(x, ids, experts, beta, linear_beta, keep)
    return combine(outputs, ids, weights, dtype)


def combine(
    outputs: Float[Array, "N k L"], ids: Int32[Array, "N k"], weights: Float[Array, "N k"], dtype: jnp.dtype
) -> Float[Array, "N L"]:
    """Sum of the outputs times their weights in float32; what stands in slots without an expert does not count."""
    weighted = weights[..., None] * outputs.astype(jnp.float32)
    return jnp.sum(jnp.where(ids[..., None] < 0, 0.0, weighted), axis=1).astype(dtype)
