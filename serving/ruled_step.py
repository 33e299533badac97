"""A step with drafts in three programs, for batches in which a grammar rules: `propose`, `verify`, `settle`.

The host reads the drafts while the target verifies them, and follows each grammar along them, so that `settle` knows
what is allowed at every place of the block. That changes the target's distributions and nothing else: the rules of
`k3jax.speculation.acceptance` stay exact. Batches without a grammar take `device.speculate`, the same in one program.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from k3jax.cache import K3Cache, KdaCache, KdaSpeculative
from k3jax.model import LayerTrace
from k3jax.speculation import parts
from k3jax.speculation.acceptance import Rule
from k3jax.speculation.drafters import Context, DSparkDrafter, Proposal
from k3jax.speculation.widths import Widths
from k3jax.step import Graph
from serving.device import Decoded, DeviceState, Drafter, after_block, before_block

NO_CACHE = K3Cache(())
"""Stands in a state whose pools travel beside it."""


class Drafts(NamedTuple):
    """What is proposed, and how many of each row's drafts take part."""

    token: Int32[Array, "B G"]
    probability: Float32[Array, "B G V"]
    limit: Int32[Array, " B"]


@functools.partial(jax.jit, static_argnames=("graph", "drafter", "widths"), donate_argnames="context")
def propose(
    graph: Graph,
    leaves: tuple[Array, ...],
    context: Context,
    state: DeviceState,
    packed: Int32[Array, "B C"],
    draft_leaves: tuple[Array, ...],
    forced: Int32[Array, "B G"],
    *,
    drafter: Drafter,
    widths: Widths | None = None,
) -> tuple[Context, Drafts]:
    """Drafts of each row that is active and alive. `packed` as in `device.speculate`.

    `forced`: what the grammars leave no choice about, filled with -1; it replaces what the drafter would say. Donates
    the drafter's context, which is not in `state`.
    """
    before = before_block(state, packed, drafter)
    target = graph.merge(leaves)
    proposal = drafter.propose(draft_leaves, context, target, before.token, before.rows, state.params)
    context = context if proposal.context is None else proposal.context
    if widths is not None:
        proposal = proposal.first(widths.sizes[-1] - 1)
    batch, count = proposal.token.shape
    limit = jnp.full(batch, count, jnp.int32)
    if widths is not None:
        assert proposal.confidence is not None
        limit = widths.limits(proposal.confidence)
    given = forced[:, :count] >= 0
    token = jnp.where(given, forced[:, :count], proposal.token)
    law = proposal.distributions(state.params)
    certain = jax.nn.one_hot(token, law.shape[2], dtype=jnp.float32)
    law = jnp.where(given[:, :, None], certain, law)
    # How many are forced is known before any of them is drawn, so the limit still follows from the drafts before it.
    return context, Drafts(token, law, jnp.maximum(limit, jnp.sum(given, axis=1, dtype=jnp.int32)))


class Pass(NamedTuple):
    """The target's view of a block."""

    ids: Int32[Array, "B W"]
    logits: Float[Array, "B W V"]
    pending: tuple[Any, ...]
    """What the block would change in each layer; None for layers that store rows by position."""
    trace: tuple[LayerTrace, ...]
    """Of the layers that the draft reads; empty arrays stand for the others, which would only fill memory."""


@functools.partial(jax.jit, static_argnames=("graph", "drafter"), donate_argnames="cache")
def verify(
    graph: Graph,
    leaves: tuple[Array, ...],
    cache: K3Cache,
    state: DeviceState,
    packed: Int32[Array, "B C"],
    token: Int32[Array, "B G"],
    *,
    drafter: Drafter,
) -> tuple[K3Cache, Pass]:
    """One pass of the target over the anchors and the drafts. Donates the cache, which is not in `state`."""
    before = before_block(dataclasses.replace(state, cache=cache), packed, drafter)
    seen = parts.verify(graph, leaves, before, token)
    layers = seen.cache.layers
    pools = (KdaCache(e.state, e.window) if isinstance(e, KdaSpeculative) else e for e in layers)
    stored = graph.place(K3Cache(tuple(pools)))
    assert stored is not None
    pending = tuple(e.pending if isinstance(e, KdaSpeculative) else None for e in layers)
    return stored, Pass(seen.ids, seen.logits, pending, _read(seen.trace, drafter))


def _read(trace: tuple[LayerTrace, ...], drafter: Drafter) -> tuple[LayerTrace, ...]:
    """The layers that the draft taps, without their routing, and nothing of the others."""
    tapped = drafter.config.target_layer_ids if isinstance(drafter, DSparkDrafter) else ()
    tokens = [entry.mixed.shape[0] if layer in tapped else 0 for layer, entry in enumerate(trace)]
    return tuple(
        LayerTrace(prefix=entry.prefix[:kept], routing=None, mixed=entry.mixed[:kept])
        for kept, entry in zip(tokens, trace, strict=True)
    )


class BlockMasks(NamedTuple):
    """What the grammars allow at each place of a block; counts for rows under a grammar alone."""

    allowed: Int32[Array, "B W M"]
    limit: Int32[Array, " B"]
    """Drafts that may take part."""


def empty_masks(batch: int, width: int, words: int) -> BlockMasks:
    """Masks that allow everything, for blocks of `width` tokens."""
    return BlockMasks(jnp.full((batch, width, words), -1, jnp.int32), jnp.zeros(batch, jnp.int32))


@functools.partial(jax.jit, donate_argnames="masks")
def set_block_masks(masks: BlockMasks, packed: Int32[Array, "G C"]) -> BlockMasks:
    """Sets the masks of some rows. Columns: row (past the end: nothing), limit, words of each place. Donates them."""
    row, _, width, words = packed[:, 0], *masks.allowed.shape
    allowed = masks.allowed.at[row].set(packed[:, 2:].reshape(-1, width, words), mode="drop")
    return BlockMasks(allowed, masks.limit.at[row].set(packed[:, 1], mode="drop"))


@functools.partial(jax.jit, static_argnames=("graph", "drafter", "rule", "top"), donate_argnames=("state", "cache"))
def settle(
    graph: Graph,
    state: DeviceState,
    cache: K3Cache,
    packed: Int32[Array, "B C"],
    draft_leaves: tuple[Array, ...],
    drafts: Drafts,
    seen: Pass,
    masks: BlockMasks,
    *,
    drafter: Drafter,
    rule: Rule,
    top: int = 0,
) -> tuple[DeviceState, Decoded]:
    """Accepts and commits what stands of each row's block. Donates the state and the cache, which is not in `state`."""
    layers = (
        KdaSpeculative(entry.state, entry.window, pending) if isinstance(entry, KdaCache) else entry
        for entry, pending in zip(cache.layers, seen.pending, strict=True)
    )
    before = before_block(dataclasses.replace(state, cache=cache), packed, drafter)
    limit = jnp.where(state.rules.constrained, jnp.minimum(drafts.limit, masks.limit), drafts.limit)
    given = parts.Given(state.params, state.stop_ids, state.rules, state.wants_top, masks.allowed)
    proposal = Proposal(drafts.token, drafts.probability)
    judged = parts.judge(seen.logits, proposal, before, given, parts.Options(rule, None, top), limit)
    verified = parts.Verified(seen.ids, seen.logits, K3Cache(tuple(layers)), seen.trace)
    after = parts.commit(graph, drafter, draft_leaves, before, verified, judged)
    return after_block(state, packed, after, judged.block, drafter)
