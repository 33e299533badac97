"""One speculative step as one program: draft, verify, accept, commit. Nothing but the anchor crosses steps.

Between steps `rows.length` tokens are committed and the anchor has been emitted but not run through the
target. Rows that are done are inert. Noise is keyed by the step's anchor position: it never repeats, and a
row's draws do not depend on its neighbours or on the batch size.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from k3jax import acceptance, sampling
from k3jax.acceptance import Rule
from k3jax.cache import K3Cache, Leaf, Rows
from k3jax.dspark import DSpark, Pools
from k3jax.dspark_config import DSparkConfig
from k3jax.model import K3, LayerTrace
from k3jax.step import Graph

DRAFT, ACCEPT, FOLLOW = range(3)
"""Independent streams of noise within a step."""


@dataclasses.dataclass(frozen=True, eq=False)
class DraftGraph:
    """The static half of a draft. Compared by identity."""

    definition: nnx.GraphDef[DSpark]
    structure: Any
    config: DSparkConfig

    def merge(self, leaves: tuple[Array, ...]) -> DSpark:
        """The draft with these arrays."""
        return nnx.merge(self.definition, jax.tree.unflatten(self.structure, leaves))


def split_draft(draft: DSpark) -> tuple[DraftGraph, tuple[Array, ...]]:
    """The static graph of `draft` and its arrays."""
    definition, state = nnx.split(draft)
    leaves, structure = jax.tree.flatten(state)
    return DraftGraph(definition, structure, draft.config), tuple(leaves)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class SpeculativeState:
    """Everything that changes from step to step."""

    cache: K3Cache
    pools: Pools
    """Context rows of the draft, on the pages of `rows`."""
    rows: Rows
    """`query_length` is 1 for running rows and 0 for rows that are done or empty."""
    token: Leaf
    """int32 [B]: the anchor."""
    remaining: Leaf
    """int32 [B]: tokens that may still be emitted."""
    history: sampling.History


class Block(NamedTuple):
    """What one step emitted: the first `count` tokens of each row."""

    token: Int32[Array, "B W"]
    logprob: Float32[Array, "B W"]
    count: Int32[Array, " B"]
    accepted: Int32[Array, " B"]
    """Drafts that stood, before stops and limits."""
    finite: Bool[Array, " B"]


def uniforms(seed: UInt32[Array, " B"], position: Int32[Array, " B"], purpose: int, size: int) -> Float32[Array, "B G"]:
    """Uniforms in [0, 1) of each row's own stream."""
    return jax.vmap(lambda key: jax.random.uniform(key, (size,)))(_keys(seed, position, purpose))


def _keys(seed: UInt32[Array, " B"], position: Int32[Array, " B"], *purpose: int) -> Array:
    def key(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return functools.reduce(jax.random.fold_in, purpose, key)

    return jax.vmap(key)(seed, position)


def draw(probability: Float32[Array, "B V"], keys: Array) -> Int32[Array, " B"]:
    """One token of each row's distribution; of a one-hot one, its token."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, probability.shape[1:]))(keys)
    return jnp.argmax(jnp.log(probability) + noise, axis=-1).astype(jnp.int32)


def distribution(logits: Float[Array, "B V"], params: sampling.Sampling) -> Float32[Array, "B V"]:
    """What a request draws from: temperature and filters applied, one-hot for greedy rows."""
    scaled = logits / jnp.maximum(params.temperature, sampling.GREEDY_BELOW)[:, None]
    random = jax.nn.softmax(sampling.keep_likely(scaled, params), axis=-1)
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    return jnp.where((params.temperature >= sampling.GREEDY_BELOW)[:, None], random, best)


def taps(trace: tuple[LayerTrace, ...], config: DSparkConfig) -> Float[Array, "B T F"]:
    """The target's features: concatenated streams after the tapped layers (0-based, completed)."""
    chosen = [trace[layer] for layer in config.target_layer_ids]
    parts = [entry.prefix if config.tap_stream == "prefix" else entry.mixed for entry in chosen]
    return jnp.concatenate(parts, axis=-1)


class _Proposal(NamedTuple):
    token: Int32[Array, "B G"]
    probability: Float32[Array, "B G V"]


def _propose(target: K3, draft: DSpark, state: SpeculativeState, params: sampling.Sampling) -> _Proposal:
    position, chosen = state.rows.length, []

    def choose(k: int, logits: Float[Array, "B V"]) -> Int32[Array, " B"]:
        chosen.append(distribution(logits, params))
        return draw(chosen[-1], _keys(params.seed, position, DRAFT, k))

    block = draft.draft(state.pools, state.token, state.rows, target.embedding[...], target.head[...])
    return _Proposal(draft.sample(block, state.token, choose).token, jnp.stack(chosen, axis=1))


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


@functools.partial(jax.jit, static_argnames=("graph", "draft_graph", "rule"), donate_argnames="state")
def speculate(
    graph: Graph,
    leaves: tuple[Array, ...],
    draft_graph: DraftGraph,
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
    target, draft = graph.merge(leaves), draft_graph.merge(draft_leaves)
    running, position = state.rows.query_length > 0, state.rows.length
    proposal = _propose(target, draft, state, params)
    width = proposal.token.shape[1] + 1

    verified = dataclasses.replace(state.rows, query_length=jnp.where(running, width, 0).astype(jnp.int32))
    ids = jnp.concatenate([state.token[:, None], proposal.token], axis=1)
    output = target(ids, verified, state.cache.speculative(), trace=True)
    logits = target.logits(output.hidden)

    probability = _target_distributions(logits, proposal.token, state, params)
    chance = uniforms(params.seed, position, ACCEPT, width - 1)
    accepted = acceptance.accept(rule, probability, proposal.probability, proposal.token, chance)
    following = draw(accepted.following, _keys(params.seed, position, FOLLOW))

    block, count, goes_on = _emit(state, proposal.token, accepted, following, stop_ids)
    committed = dataclasses.replace(state.rows, query_length=count)
    assert output.cache is not None
    new = SpeculativeState(
        cache=output.cache.commit(committed, count),
        pools=draft.extend(state.pools, taps(output.trace, draft_graph.config), committed),
        rows=dataclasses.replace(committed.advance(), query_length=goes_on.astype(jnp.int32)),
        token=jnp.take_along_axis(block, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0],
        remaining=state.remaining - count,
        history=_append(state.history, block, count),
    )
    logprob = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), block[..., None], axis=-1)[..., 0]
    finite = jnp.all(jnp.isfinite(logits), axis=(1, 2)) | ~running
    return new, Block(block, logprob, count, jnp.where(running, accepted.count, 0), finite)


def _append(history: sampling.History, block: Int32[Array, "B W"], count: Int32[Array, " B"]) -> sampling.History:
    for k in range(block.shape[1]):
        history = history.append(block[:, k], k < count)
    return history


class Prefilled(NamedTuple):
    """Result of `prefill`."""

    logits: Float32[Array, "B V"]
    cache: K3Cache
    pools: Pools


@functools.partial(jax.jit, static_argnames=("graph", "draft_graph"), donate_argnames=("cache", "pools"))
def prefill(
    graph: Graph,
    leaves: tuple[Array, ...],
    draft_graph: DraftGraph,
    draft_leaves: tuple[Array, ...],
    cache: K3Cache,
    pools: Pools,
    rows: Rows,
    ids: Int32[Array, "B T"],
) -> Prefilled:
    """One chunk of each row's prompt through the target, its taps into the draft's context. Donates both caches."""
    target, draft = graph.merge(leaves), draft_graph.merge(draft_leaves)
    output = target(ids, rows, cache, trace=True)
    pools = draft.extend(pools, taps(output.trace, draft_graph.config), rows)
    last = jnp.maximum(rows.query_length - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(output.hidden, jnp.broadcast_to(last, (*last.shape[:2], output.hidden.shape[2])), 1)
    assert output.cache is not None
    return Prefilled(target.logits(hidden[:, 0]), output.cache, pools)


def create_pools(config: DSparkConfig, *, pages: int, page_size: int, dtype: Any) -> Pools:
    """Zeroed context rows for every draft layer, on the same pages as the target's latents."""
    return tuple(jnp.zeros((pages, page_size, config.attention.row_width), dtype) for _ in range(config.num_layers))
