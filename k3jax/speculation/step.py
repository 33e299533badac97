"""One speculative step as one program: draft, verify, accept, commit. Nothing but the anchor crosses steps.

Between steps `rows.length` tokens are committed and the anchor has been emitted but not run through the
target. Rows that are done are inert. Noise is keyed by the step's anchor position: it never repeats, and a
row's draws do not depend on its neighbours or on the batch size.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from k3jax import sampling
from k3jax.cache import K3Cache, Leaf, Rows
from k3jax.speculation import acceptance
from k3jax.speculation.acceptance import Rule
from k3jax.speculation.drafters import Context, Drafter, Step
from k3jax.speculation.randomness import ACCEPT, FOLLOW, distribution, draw, keys, uniforms
from k3jax.step import Graph, last_hidden


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class SpeculativeState:
    """Everything that changes from step to step."""

    cache: K3Cache
    context: Context
    """The drafter's."""
    rows: Rows
    """`query_length` is 1 for running rows and 0 for rows that are done or empty."""
    token: Leaf
    """int32 [B]: the anchor."""
    remaining: Leaf
    """int32 [B]: tokens that may still be emitted."""
    history: sampling.History


class Written(NamedTuple):
    """Tokens of a whole generation, collected on the device."""

    token: Int32[Array, "B L"]
    count: Int32[Array, " B"]
    accepted: Int32[Array, " B"]
    """Drafts that stood."""
    steps: Int32[Array, ""]

    def append(self, block: "Block") -> "Written":
        """With one more block; tokens beyond the end are dropped."""
        width = block.token.shape[1]
        column = jnp.arange(width, dtype=jnp.int32)[None]
        target = jnp.where(column < block.count[:, None], self.count[:, None] + column, self.token.shape[1])
        row = jnp.broadcast_to(jnp.arange(block.token.shape[0], dtype=jnp.int32)[:, None], target.shape)
        token = self.token.at[row, target].set(block.token, mode="drop")
        return Written(token, self.count + block.count, self.accepted + block.accepted, self.steps + 1)


class Block(NamedTuple):
    """What one step emitted: the first `count` tokens of each row."""

    token: Int32[Array, "B W"]
    logprob: Float32[Array, "B W"]
    count: Int32[Array, " B"]
    accepted: Int32[Array, " B"]
    """Drafts that stood, before stops and limits."""
    finite: Bool[Array, " B"]
    """False where a running row's logits held a NaN or an infinity; such a row ends with one meaningless token."""


def _target_distributions(
    logits: Float32[Array, "B W V"], token: Int32[Array, "B G"], state: SpeculativeState, params: sampling.Sampling
) -> Float32[Array, "B W V"]:
    """Each position under the penalties of the drafts before it."""
    history, running = state.history, state.rows.query_length > 0
    rows = []
    for k in range(logits.shape[1]):
        rows.append(distribution(sampling.penalize(logits[:, k], params, history), params))
        if k < token.shape[1]:
            history = history.append(token[:, k], running)
    return jnp.stack(rows, axis=1)


def _emit(
    state: SpeculativeState,
    token: Int32[Array, "B G"],
    accepted: acceptance.Accepted,
    following: Int32[Array, " B"],
    stop_ids: Int32[Array, "B S"],
) -> tuple[Int32[Array, "B W"], Int32[Array, " B"], Bool[Array, " B"]]:
    """Tokens of the block, how many of them count, and whether the row goes on.

    A row ends with its first stop token, even inside the block, or when `remaining` is used up.
    """
    padded = jnp.concatenate([token, jnp.zeros_like(token[:, :1])], axis=1)
    column = jnp.arange(padded.shape[1], dtype=jnp.int32)[None]
    block = jnp.where(column == accepted.count[:, None], following[:, None], padded)
    running = state.rows.query_length > 0
    limit = jnp.minimum(accepted.count + 1, state.remaining)
    stops = jnp.any(block[:, :, None] == stop_ids[:, None, :], axis=-1) & (column < limit[:, None])
    first = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, limit)
    count = jnp.where(running, first, 0)
    goes_on = running & ~jnp.any(stops, axis=1) & (count < state.remaining)
    return block, count, goes_on


@functools.partial(jax.jit, static_argnames=("graph", "drafter", "rule"), donate_argnames="state")
def speculate(
    graph: Graph,
    leaves: tuple[Array, ...],
    drafter: Drafter,
    draft_leaves: tuple[Array, ...],
    state: SpeculativeState,
    params: sampling.Sampling,
    stop_ids: Int32[Array, "B S"],
    *,
    rule: Rule = "block",
) -> tuple[SpeculativeState, Block]:
    """Drafts a block, verifies it in one pass of the target, and commits what stands. Donates the state.

    `stop_ids` is padded with -1. The emitted tokens follow the target's own distribution, whatever the draft.
    """
    target = graph.merge(leaves)
    running, position = state.rows.query_length > 0, state.rows.length
    proposal = drafter.propose(draft_leaves, state.context, target, state.token, state.rows, params)
    width = proposal.token.shape[1] + 1

    verified = dataclasses.replace(state.rows, query_length=jnp.where(running, width, 0).astype(jnp.int32))
    ids = jnp.concatenate([state.token[:, None], proposal.token], axis=1)
    output = target(ids, verified, state.cache.speculative(), trace=True)
    logits = target.logits(output.hidden)

    probability = _target_distributions(logits, proposal.token, state, params)
    chance = uniforms(params.seed, position, ACCEPT, width - 1)
    accepted = acceptance.accept(rule, probability, proposal.probability, proposal.token, chance)
    following = draw(accepted.following, keys(params.seed, position, FOLLOW))

    finite = jnp.all(jnp.isfinite(logits), axis=(1, 2)) | ~running
    block, count, goes_on = _emit(state, proposal.token, accepted, following, stop_ids)
    count, goes_on = jnp.where(finite, count, 1), goes_on & finite
    committed = dataclasses.replace(state.rows, query_length=count)
    assert output.cache is not None
    cache = graph.place(output.cache.commit(committed, count))
    assert cache is not None
    new = SpeculativeState(
        cache=cache,
        context=drafter.extend(draft_leaves, state.context, Step(ids, output.trace), committed),
        rows=dataclasses.replace(committed.advance(), query_length=goes_on.astype(jnp.int32)),
        token=jnp.take_along_axis(block, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0],
        remaining=state.remaining - count,
        history=_append(state.history, block, count),
    )
    logprob = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), block[..., None], axis=-1)[..., 0]
    return new, Block(block, logprob, count, jnp.where(running, accepted.count, 0), finite)


def _append(history: sampling.History, block: Int32[Array, "B W"], count: Int32[Array, " B"]) -> sampling.History:
    for k in range(block.shape[1]):
        history = history.append(block[:, k], k < count)
    return history


class Prefilled(NamedTuple):
    """Result of `prefill`."""

    logits: Float32[Array, "B V"]
    cache: K3Cache
    context: Context


@functools.partial(jax.jit, static_argnames=("graph", "drafter"), donate_argnames=("cache", "context"))
def prefill(
    graph: Graph,
    leaves: tuple[Array, ...],
    drafter: Drafter,
    draft_leaves: tuple[Array, ...],
    cache: K3Cache,
    context: Context,
    rows: Rows,
    ids: Int32[Array, "B T"],
) -> Prefilled:
    """One chunk of each row's prompt through the target and into the draft's context. Donates cache and context."""
    target = graph.merge(leaves)
    output = target(ids, rows, cache, trace=True)
    context = drafter.extend(draft_leaves, context, Step(ids, output.trace), rows)
    stored = graph.place(output.cache)
    assert stored is not None
    return Prefilled(graph.replicate(target.logits(last_hidden(output.hidden, rows))), stored, context)


@functools.partial(jax.jit, static_argnames=("graph", "drafter", "rule", "limit"), donate_argnames="state")
def speculate_all(
    graph: Graph,
    leaves: tuple[Array, ...],
    drafter: Drafter,
    draft_leaves: tuple[Array, ...],
    state: SpeculativeState,
    params: sampling.Sampling,
    stop_ids: Int32[Array, "B S"],
    *,
    limit: int,
    rule: Rule = "block",
) -> tuple[SpeculativeState, Written]:
    """Runs `speculate` on the device until every row is done or has `limit` tokens. Donates the state."""

    def more(carry: tuple[SpeculativeState, Written]) -> Array:
        return jnp.any(carry[0].rows.query_length > 0) & (carry[1].steps < limit)

    def body(carry: tuple[SpeculativeState, Written]) -> tuple[SpeculativeState, Written]:
        state, written = carry
        state, block = speculate(graph, leaves, drafter, draft_leaves, state, params, stop_ids, rule=rule)
        return state, written.append(block)

    batch = state.token.shape[0]
    zero = jnp.zeros(batch, jnp.int32)
    empty = Written(jnp.zeros((batch, limit), jnp.int32), zero, zero, jnp.zeros((), jnp.int32))
    return jax.lax.while_loop(more, body, (state, empty))
