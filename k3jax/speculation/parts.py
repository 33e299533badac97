"""The parts of a speculative step after the draft: verify, judge, commit. `step.speculate` puts them together."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from k3jax import logprobs, sampling
from k3jax.cache import K3Cache
from k3jax.logit_rules import LogitRules
from k3jax.model import LayerTrace
from k3jax.speculation import acceptance
from k3jax.speculation.acceptance import Rule
from k3jax.speculation.drafters import Drafter, Proposal, Step
from k3jax.speculation.randomness import ACCEPT, FOLLOW, distribution, draw, keys, uniforms
from k3jax.speculation.state import Block, SpeculativeState
from k3jax.step import Graph
from pallas import acceptance as kernels
from pallas.dispatch import select


class Verified(NamedTuple):
    """The target's view of a block."""

    ids: Int32[Array, "B W"]
    """The anchor and the drafts."""
    logits: Float32[Array, "B W V"]
    cache: K3Cache
    """What the block would change waits in it."""
    trace: tuple[LayerTrace, ...]


def verify(graph: Graph, leaves: tuple[Array, ...], state: SpeculativeState, drafts: Int32[Array, "B G"]) -> Verified:
    """One pass of the target over the anchor and the drafts; no state is written."""
    target, width = graph.merge(leaves), drafts.shape[1] + 1
    running = state.rows.query_length > 0
    rows = dataclasses.replace(state.rows, query_length=jnp.where(running, width, 0).astype(jnp.int32))
    ids = jnp.concatenate([state.token[:, None], drafts], axis=1)
    output = target(ids, rows, state.cache.speculative(), trace=True)
    assert output.cache is not None
    return Verified(ids, graph.replicate(target.logits(output.hidden)), output.cache, output.trace)


@dataclasses.dataclass(frozen=True)
class Options:
    """What a step does beside its arrays. Hashable."""

    rule: Rule = "block"
    filters: sampling.Filters | None = None
    """What any row has of top-k, top-p and min-p; None: that may change from step to step."""
    top: int = 0
    """Alternatives reported with each token."""


class Given(NamedTuple):
    """What the requests of a batch ask for."""

    params: sampling.Sampling
    stop_ids: Int32[Array, "B S"]
    """Filled with -1."""
    rules: LogitRules | None = None
    wants_top: Bool[Array, " B"] | None = None
    """Rows that want alternatives; None: nobody does."""
    masks: Int32[Array, "B W M"] | None = None
    """What the rules allow at each place of the block; None: `rules.allowed` holds for the next token alone."""


class Judged(NamedTuple):
    """What stands of a block, and which rows go on after it."""

    block: Block
    goes_on: Bool[Array, " B"]
    after: "After | None" = None
    """None: what follows from the two."""


class After(NamedTuple):
    """The numbers of each row after a block."""

    length: Int32[Array, " B"]
    running: Int32[Array, " B"]
    """1 for rows that go on."""
    anchor: Int32[Array, " B"]
    remaining: Int32[Array, " B"]

    @classmethod
    def of(cls, state: SpeculativeState, judged: Judged) -> "After":
        """From what stands."""
        count = judged.block.count
        anchor = jnp.take_along_axis(judged.block.token, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        return cls(state.rows.length + count, judged.goes_on.astype(jnp.int32), anchor, state.remaining - count)


def judge(
    logits: Float32[Array, "B W V"],
    proposal: Proposal,
    state: SpeculativeState,
    given: Given,
    options: Options,
    limit: Int32[Array, " B"] | None = None,
) -> Judged:
    """Accepts drafts and draws the token that follows them. Of each row the first `limit` drafts take part."""
    ways = select(None, mosaic=by_kernels, xla=portable)
    return ways(logits, proposal, state, given, options, _limit(given, limit, state.rows.length, logits.shape[1] - 1))


def by_kernels(
    logits: Float32[Array, "B W V"],
    proposal: Proposal,
    state: SpeculativeState,
    given: Given,
    options: Options,
    limit: Int32[Array, " B"],
    *,
    judge: Callable[..., kernels.Stands] | None = None,
) -> Judged:
    """`judge` in three launches, refusing where more than penalties and temperature may be at work.

    `judge` stands for `pallas.acceptance.judge`, interpreted for example.
    """
    if options.filters != sampling.NO_FILTERS or given.rules is not None or proposal.scores is None:
        raise NotImplementedError("acceptance by kernels serves drafts of known scores, without filters and rules")
    params, history = given.params, state.history
    stands = (judge or kernels.judge)(
        options.rule,
        logits,
        proposal.scores,
        proposal.token,
        kernels.Requests(
            temperature=params.temperature,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            seed=params.seed,
            stop_ids=given.stop_ids,
        ),
        kernels.Seen(
            prompt=history.prompt,
            count=history.count,
            position=state.rows.length,
            running=state.rows.query_length,
            remaining=state.remaining,
            limit=limit,
        ),
        (ACCEPT, FOLLOW),
    )
    top = _top(logits, given, options.top)
    block = Block(stands.token, stands.logprob, stands.count, stands.accepted, stands.finite, stands.verified, top)
    after = After(stands.position, stands.running, stands.anchor, stands.remaining)
    return Judged(block, stands.goes_on, after)


def portable(
    logits: Float32[Array, "B W V"],
    proposal: Proposal,
    state: SpeculativeState,
    given: Given,
    options: Options,
    limit: Int32[Array, " B"],
) -> Judged:
    """`judge` for every kind of draft and request."""
    running, position, width = state.rows.query_length > 0, state.rows.length, logits.shape[1]
    seed, drafted = given.params.seed, proposal.distributions(given.params)
    probability = target_distributions(logits, proposal.token, state, given, options.filters)
    chance = uniforms(seed, position, ACCEPT, width - 1)
    accepted = acceptance.accept(options.rule, probability, drafted, proposal.token, chance, limit)
    following = draw(accepted.following, keys(seed, position, FOLLOW))
    # Token by token first, which is the shape of the other passes over the logits.
    finite = jnp.all(jnp.all(jnp.isfinite(logits), axis=2), axis=1) | ~running
    token, count, goes_on = _emit(state, proposal.token, accepted, following, given.stop_ids)
    logprob = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), token[..., None], axis=-1)[..., 0]
    stood, seen = (jnp.where(running, drafts, 0) for drafts in (accepted.count, limit))
    block = Block(token, logprob, jnp.where(finite, count, 1), stood, finite, seen, _top(logits, given, options.top))
    return Judged(block, goes_on & finite)


def _limit(
    given: Given, limit: Int32[Array, " B"] | None, position: Int32[Array, " B"], drafts: int
) -> Int32[Array, " B"]:
    """Drafts of each row that take part: none where a mask holds for the next token alone."""
    limit = jnp.full(position.shape, drafts, jnp.int32) if limit is None else limit
    if given.rules is None or given.masks is not None:
        return limit
    return jnp.where(given.rules.constrained, 0, limit)


def _top(logits: Float32[Array, "B W V"], given: Given, count: int) -> Int32[Array, "B W C"] | None:
    """The alternatives of each token, for the rows that want them."""
    if given.wants_top is None:
        return None
    width = logits.shape[1]
    flat = logprobs.alternatives(logits.reshape(-1, logits.shape[2]), jnp.repeat(given.wants_top, width), count)
    return flat.reshape(-1, width, flat.shape[1])


def target_distributions(
    logits: Float32[Array, "B W V"],
    token: Int32[Array, "B G"],
    state: SpeculativeState,
    given: Given,
    filters: sampling.Filters | None = None,
) -> Float32[Array, "B W V"]:
    """What the target draws from at each position, under the rules, and the penalties of the drafts before it."""
    history, (batch, width, vocab) = state.history, logits.shape

    def each(tree: Any) -> Any:
        """Every row once per position."""
        return jax.tree.map(lambda column: jnp.repeat(column, width, axis=0), tree)

    # Term by term, not from row to row: one elementwise expression, of which nothing needs to be stored.
    row, ids = (jnp.arange(size, dtype=jnp.int32) for size in (width, vocab))
    said = jnp.broadcast_to(history.count[:, None], logits.shape)
    for k in range(width - 1):
        said += ((row > k)[None, :, None] & (ids[None] == token[:, k, None])[:, None]).astype(jnp.int32)
    position = history.position[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    said = sampling.History(each(history.prompt), said.reshape(-1, vocab), position.reshape(-1))
    flat, params = logits.reshape(-1, vocab), each(given.params)
    if given.rules is not None:
        running = each(state.rows.query_length > 0)
        rules = each(given.rules)
        if given.masks is not None:
            rules = dataclasses.replace(rules, allowed=given.masks.reshape(batch * width, -1))
        flat = rules.apply(flat, said.position, each(given.stop_ids), running)
    law = distribution(sampling.penalize(flat, params, said), params, filters)
    return law.reshape(batch, width, vocab)


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
    padded = jnp.concatenate([token, jnp.zeros_like(following[:, None])], axis=1)
    column = jnp.arange(padded.shape[1], dtype=jnp.int32)[None]
    block = jnp.where(column == accepted.count[:, None], following[:, None], padded)
    running = state.rows.query_length > 0
    limit = jnp.minimum(accepted.count + 1, state.remaining)
    stops = jnp.any(block[:, :, None] == stop_ids[:, None, :], axis=-1) & (column < limit[:, None])
    first = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, limit)
    count = jnp.where(running, first, 0)
    goes_on = running & ~jnp.any(stops, axis=1) & (count < state.remaining)
    return block, count, goes_on


def commit(
    graph: Graph,
    drafter: Drafter,
    draft_leaves: tuple[Array, ...],
    state: SpeculativeState,
    verified: Verified,
    judged: Judged,
) -> SpeculativeState:
    """The state after what stands of a block: target and draft have seen it, its last token is the next anchor."""
    block, count = judged.block, judged.block.count
    committed = dataclasses.replace(state.rows, query_length=count)
    cache = graph.place(graph.commit(verified.cache, committed, count))
    assert cache is not None
    after = After.of(state, judged) if judged.after is None else judged.after
    return SpeculativeState(
        cache=cache,
        context=drafter.extend(draft_leaves, state.context, Step(verified.ids, verified.trace), committed),
        rows=dataclasses.replace(committed, length=after.length, query_length=after.running),
        token=after.anchor,
        remaining=after.remaining,
        history=_append(state.history, block),
    )


def _append(history: sampling.History, block: Block) -> sampling.History:
    """After the block's tokens have been said."""
    said = history.count
    for k in range(block.token.shape[1]):
        counts = (k < block.count).astype(jnp.int32)[:, None]
        said = said + counts * jax.nn.one_hot(block.token[:, k], said.shape[1], dtype=jnp.int32)
    return dataclasses.replace(history, count=said, position=history.position + block.count)
