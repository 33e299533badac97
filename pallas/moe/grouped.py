"""MoE over dense experts for training: rows sorted by expert into blocks, one batched product per matrix.

Every movement of data is a gather in both directions: a row knows its token and a token knows its rows,
so the transpose of each gather is written as the other one. No floating-point scatter remains, and the
gradient is the same bit for bit on every run.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from pallas.activation import situ
from pallas.moe.types import DenseExperts
from pallas.precision import einsum

SMALLEST_BLOCK, LARGEST_BLOCK = 16, 512


class Plan(NamedTuple):
    """Where each (token, expert) pair goes when every expert's pairs are padded to whole blocks."""

    row: Int32[Array, "N k"]
    """Row of each pair."""
    pair: Int32[Array, " rows"]
    """Flat pair of each row; meaningless in padding rows."""
    filled: Bool[Array, " rows"]
    expert: Int32[Array, " blocks"]


def block_size(pairs: int, num_experts: int) -> int:
    """Rows per block: a power of two, about a sixteenth of an expert's share, so that little is padding."""
    size = SMALLEST_BLOCK
    while size < LARGEST_BLOCK and size * 2 * 16 * num_experts <= pairs:
        size *= 2
    return size


def plan(ids: Int32[Array, "N k"], num_experts: int, block: int) -> Plan:
    """The padded order of the pairs; its size is static, `pairs // block + num_experts` blocks."""
    expert_of_pair = ids.reshape(-1)
    pairs = expert_of_pair.shape[0]
    blocks = pairs // block + min(num_experts, pairs)
    count = jnp.bincount(expert_of_pair, length=num_experts).astype(jnp.int32)
    first_sorted = jnp.cumsum(count).astype(jnp.int32) - count
    blocks_of = (count + block - 1) // block
    end_block = jnp.cumsum(blocks_of).astype(jnp.int32)
    first_row = (end_block - blocks_of) * block
    order = jnp.argsort(expert_of_pair, stable=True).astype(jnp.int32)
    place = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    row = first_row[expert_of_pair] + place - first_sorted[expert_of_pair]
    # Without a loop, which would cut the graph of a step in two.
    number = jnp.arange(blocks, dtype=jnp.int32)
    expert = jnp.searchsorted(end_block, number, side="right", method="compare_all").astype(jnp.int32)
    expert = jnp.minimum(expert, num_experts - 1)
    expert_of_row = jnp.repeat(expert, block)
    rank = jnp.arange(blocks * block, dtype=jnp.int32) - first_row[expert_of_row]
    filled = rank < count[expert_of_row]
    sorted_place = jnp.where(filled, first_sorted[expert_of_row] + rank, 0)
    return Plan(row.reshape(ids.shape), order[sorted_place], filled, expert)


def plan_used(ids: Int32[Array, "N k"], num_experts: int, size: int) -> tuple[Plan, Int32[Array, "1"]]:
    """(plan in blocks of `size`, blocks that hold any row); slots without an expert (-1) are not run."""
    # They form a last group.
    order = plan(jnp.where(ids < 0, num_experts, ids), num_experts + 1, size)
    used = jnp.sum(order.filled.reshape(-1, size)[:, 0] & (order.expert < num_experts)).astype(jnp.int32)
    return order, used.reshape(1)


@jax.custom_vjp
def dispatch(x: Shaped[Array, "N L"], plan: Plan) -> Shaped[Array, "rows L"]:
    """The input of every row; zeros in padding rows."""
    k = plan.row.shape[1]
    return jnp.where(plan.filled[:, None], x[plan.pair // k], jnp.zeros((), x.dtype))


def _dispatch_forward(x: Array, plan: Plan) -> tuple[Array, Plan]:
    return dispatch(x, plan), plan


def _dispatch_backward(plan: Plan, gradient: Array) -> tuple[Array, None]:
    rows = gradient[plan.row].astype(jnp.float32)
    return jnp.sum(rows, axis=1).astype(gradient.dtype), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def collect(rows: Float[Array, "rows L"], plan: Plan) -> Float[Array, "N k L"]:
    """The output of every pair."""
    return rows[plan.row]


def _collect_forward(rows: Array, plan: Plan) -> tuple[Array, Plan]:
    return collect(rows, plan), plan


def _collect_backward(plan: Plan, gradient: Array) -> tuple[Array, None]:
    pairs = gradient.reshape(-1, gradient.shape[-1])
    return jnp.where(plan.filled[:, None], pairs[plan.pair], jnp.zeros((), gradient.dtype)), None


collect.defvjp(_collect_forward, _collect_backward)


@jax.custom_vjp
def take_rows(table: Float[Array, "E *matrix"], index: Int32[Array, " n"]) -> Float[Array, "n *matrix"]:
    """table[index]; the gradient adds equal indices by a product with a 0/1 matrix, so in a fixed order."""
    return table[index]


def _take_forward(table: Array, index: Array) -> tuple[Array, Array]:
    return table[index], jnp.arange(table.shape[0], dtype=jnp.int32)[:, None] == index[None, :]


def _take_backward(chosen: Array, gradient: Array) -> tuple[Array, None]:
    flat = gradient.reshape(gradient.shape[0], -1)
    total = einsum("en,nx->ex", chosen.astype(gradient.dtype), flat)
    return total.reshape(chosen.shape[0], *gradient.shape[1:]), None


take_rows.defvjp(_take_forward, _take_backward)


def experts(
    x: Float[Array, "N L"],
    ids: Int32[Array, "N k"],
    weights: Float[Array, "N k"],
    experts: DenseExperts,
    *,
    beta: float,
    linear_beta: float,
    dtype: jnp.dtype | None = None,
) -> Float[Array, "N L"]:
    """See `pallas.moe.experts`; differentiable in `x`, `weights` and `experts`."""
    num_experts, pairs = experts.gate_up.shape[0], ids.size
    order = plan(ids, num_experts, block := block_size(pairs, num_experts))
    rows = dispatch(x, order).reshape(-1, block, x.shape[1])
    hidden = einsum("bml,bifl->bimf", rows, take_rows(experts.gate_up, order.expert))
    activation = situ(hidden[:, 0], hidden[:, 1], beta=beta, linear_beta=linear_beta)
    outputs = einsum("bmf,blf->bml", activation, take_rows(experts.down, order.expert))
    by_pair = collect(outputs.reshape(-1, x.shape[1]), order)
    return jnp.sum(weights[..., None] * by_pair.astype(jnp.float32), axis=1).astype(dtype or x.dtype)
