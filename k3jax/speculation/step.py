"""One speculative step as one program: draft, verify, accept, commit. Nothing but the anchor crosses steps.

Between steps `rows.length` tokens are committed and the anchor has been emitted but not run through the
target. Rows that are done are inert. Noise is keyed by the step's anchor position: it never repeats, and a
row's draws do not depend on its neighbours or on the batch size.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from k3jax import sampling
from k3jax.cache import K3Cache, Rows
from k3jax.logit_rules import LogitRules
from k3jax.speculation import parts
from k3jax.speculation.acceptance import Rule
from k3jax.speculation.drafters import Context, Drafter, Proposal, Step
from k3jax.speculation.state import Block, SpeculativeState, Written
from k3jax.speculation.widths import Widths
from k3jax.step import Graph, last_hidden

Settle = Callable[[int, SpeculativeState, Int32[Array, " B"] | None], tuple[SpeculativeState, Block]]
"""Verifies, accepts and commits so many tokens, at most `limit` drafts of each row: the state after, and the block."""


@functools.partial(
    jax.jit, static_argnames=("graph", "drafter", "rule", "widths", "filters", "top"), donate_argnames="state"
)
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
    widths: Widths | None = None,
    filters: sampling.Filters | None = None,
    rules: LogitRules | None = None,
    top: int = 0,
    wants_top: Bool[Array, " B"] | None = None,
) -> tuple[SpeculativeState, Block]:
    """Drafts a block, verifies it in one pass of the target, and commits what stands. Donates the state.

    `stop_ids` is padded with -1. The emitted tokens follow the target's own distribution, whatever the draft.
    `rules` change the target's logits; rows whose mask holds for one token take no drafts. Rows in `wants_top` get
    `top` alternatives with each token. `widths` offers narrower passes, of which the device takes one by the draft's
    confidence; without them all drafts are verified. `filters` says what any row has of top-k, top-p and min-p; None:
    that may change from step to step.
    """
    given = parts.Given(params, stop_ids, rules, wants_top)
    options = parts.Options(rule, filters, top)
    proposal = drafter.propose(
        draft_leaves, state.context, graph.merge(leaves), state.token, state.rows, params, filters
    )
    if proposal.context is not None:
        state = dataclasses.replace(state, context=proposal.context)

    def settle(width: int, state: SpeculativeState, limit: Int32[Array, " B"] | None) -> tuple[SpeculativeState, Block]:
        some = proposal.first(width - 1)
        verified = parts.verify(graph, leaves, state, some.token)
        judged = parts.judge(verified.logits, some, state, given, options, limit)
        return parts.commit(graph, drafter, draft_leaves, state, verified, judged), judged.block

    if widths is None:
        return settle(proposal.token.shape[1] + 1, state, None)
    return _chosen(settle, widths, proposal, state)


def _chosen(
    settle: Settle, widths: Widths, proposal: Proposal, state: SpeculativeState
) -> tuple[SpeculativeState, Block]:
    """`settle` at the width that the drafts' confidence asks for; blocks are padded to the widest."""
    if proposal.confidence is None:
        raise ValueError("widths are given but the draft has no confidence head; leave them out")
    widest = widths.sizes[-1]
    limit = widths.limits(proposal.confidence)

    def branch(width: int, state: SpeculativeState) -> tuple[SpeculativeState, Block]:
        after, block = settle(width, state, limit)
        pad = [(0, 0), (0, widest - width)]
        top = None if block.top is None else jnp.pad(block.top, [*pad, (0, 0)])
        return after, block._replace(token=jnp.pad(block.token, pad), logprob=jnp.pad(block.logprob, pad), top=top)

    index = widths.choose(limit, state.rows.query_length > 0)
    return jax.lax.switch(index, [functools.partial(branch, size) for size in widths.sizes], state)


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


@functools.partial(
    jax.jit, static_argnames=("graph", "drafter", "rule", "limit", "widths", "filters"), donate_argnames="state"
)
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
    widths: Widths | None = None,
    filters: sampling.Filters | None = None,
) -> tuple[SpeculativeState, Written]:
    """Runs `speculate` on the device until every row is done or has `limit` tokens. Donates the state."""
    options = {"rule": rule, "widths": widths, "filters": filters}

    def more(carry: tuple[SpeculativeState, Written]) -> Array:
        return jnp.any(carry[0].rows.query_length > 0) & (carry[1].steps < limit)

    def body(carry: tuple[SpeculativeState, Written]) -> tuple[SpeculativeState, Written]:
        state, written = carry
        state, block = speculate(graph, leaves, drafter, draft_leaves, state, params, stop_ids, **options)
        return state, written.append(block)

    batch = state.token.shape[0]
    zero = jnp.zeros(batch, jnp.int32)
    empty = Written(jnp.zeros((batch, limit), jnp.int32), zero, zero, jnp.zeros((), jnp.int32))
    return jax.lax.while_loop(more, body, (state, empty))
