"""The pure step functions. Each compiles once per batch size, token bucket and page-table width.

`decode` compiles once for each kind of filters (top-k, top-p, min-p) as well, if it is told which there are.
A model is split once into a static graph and a flat tuple of arrays; passing thousands of leaves
through `nnx.jit` would cost tens of milliseconds a call.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from k3jax import sampling
from k3jax.cache import K3Cache, KdaCache, KdaSpeculative, Leaf, Rows
from k3jax.model import K3, LayerTrace
from k3jax.sharding import Layout


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """The static half of a model. Compared by identity, so that a call hashes nothing large."""

    definition: nnx.GraphDef[K3]
    structure: Any
    layout: Layout | None = None
    """Where caches live when the model is spread over a mesh."""

    def merge(self, leaves: tuple[Array, ...]) -> K3:
        """The model with these arrays."""
        return nnx.merge(self.definition, jax.tree.unflatten(self.structure, leaves))

    def place(self, cache: K3Cache | None) -> K3Cache | None:
        """Keeps a new cache where the old one was: donation needs it, and the next step compiles for it."""
        if self.layout is None or cache is None:
            return cache
        return jax.lax.with_sharding_constraint(cache, self.layout.cache(cache))

    def commit(self, cache: K3Cache, rows: Rows, accepted: Int32[Array, " B"]) -> K3Cache:
        """`K3Cache.commit`, on every device for its own heads. Donates the pools."""
        if self.layout is None:
            return cache.commit(rows, accepted)
        before, whole = self.layout.cache_partitions(cache, pending=True), PartitionSpec()
        pools = (KdaCache(e.state, e.window) if isinstance(e, KdaSpeculative) else e for e in before.layers)
        run = self.layout.on_devices(K3Cache.commit, (before, whole, whole), K3Cache(tuple(pools)))
        return run(cache, rows, accepted)

    def replicate(self, values: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """A whole copy on every device, so that all of them sample the same token."""
        return values if self.layout is None else jax.lax.with_sharding_constraint(values, self.layout.replicated)


def split(model: K3, layout: Layout | None = None) -> tuple[Graph, tuple[Array, ...]]:
    """The static graph of `model` and its arrays."""
    definition, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    return Graph(definition, structure, layout), tuple(leaves)


class Forward(NamedTuple):
    """Result of `forward` and `extend`."""

    logits: Float[Array, "B T V"]
    cache: K3Cache | None
    trace: tuple[LayerTrace, ...]


@functools.partial(jax.jit, static_argnames=("graph", "trace"))
def forward(
    graph: Graph, leaves: tuple[Array, ...], rows: Rows, ids: Int32[Array, "B T"], *, trace: bool = False
) -> Forward:
    """Logits of every position of whole sequences, without a cache."""
    model = graph.merge(leaves)
    output = model(ids, rows, trace=trace)
    return Forward(model.logits(output.hidden), None, output.trace)


@functools.partial(jax.jit, static_argnames=("graph", "trace"), donate_argnames="cache")
def extend(
    graph: Graph,
    leaves: tuple[Array, ...],
    cache: K3Cache,
    rows: Rows,
    ids: Int32[Array, "B T"],
    *,
    trace: bool = False,
) -> Forward:
    """Logits of every position of a continuation. Donates the cache."""
    model = graph.merge(leaves)
    output = model(ids, rows, cache, trace=trace)
    return Forward(model.logits(output.hidden), graph.place(output.cache), output.trace)


class Prefill(NamedTuple):
    """Result of `prefill`."""

    logits: Float[Array, "B V"]
    cache: K3Cache


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="cache")
def prefill(graph: Graph, leaves: tuple[Array, ...], cache: K3Cache, rows: Rows, ids: Int32[Array, "B T"]) -> Prefill:
    """Stores one chunk of each row; logits follow its last valid token. Donates the cache."""
    model = graph.merge(leaves)
    output = model(ids, rows, cache)
    stored = graph.place(output.cache)
    assert stored is not None
    return Prefill(graph.replicate(model.logits(last_hidden(output.hidden, rows))), stored)


def last_hidden(hidden: Float[Array, "B T D"], rows: Rows) -> Float[Array, "B D"]:
    """The hidden state of each row's last valid token."""
    last = jnp.maximum(rows.query_length - 1, 0)[:, None, None]
    return jnp.take_along_axis(hidden, jnp.broadcast_to(last, (*last.shape[:2], hidden.shape[2])), axis=1)[:, 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class DecodeState:
    """Everything that changes from step to step; one array per field, so that nothing recompiles."""

    cache: K3Cache
    rows: Rows
    """`query_length` is 1 for running rows and 0 for rows that are done or empty."""
    token: Leaf
    """int32 [B]: sampled last, not yet in the cache."""
    remaining: Leaf
    """int32 [B]: tokens that may still be sampled."""
    history: sampling.History


class Emitted(NamedTuple):
    """What one step produced."""

    token: Int32[Array, " B"]
    logprob: Float[Array, " B"]
    valid: Bool[Array, " B"]
    """Rows that were running."""
    finite: Bool[Array, " B"]
    """False where a running row's logits held a NaN or an infinity."""


def accept(
    state: DecodeState,
    logits: Float[Array, "B V"],
    params: sampling.Sampling,
    stop_ids: Int32[Array, "B S"],
    filters: sampling.Filters | None = None,
) -> tuple[DecodeState, Emitted]:
    """Samples the next token of each running row and retires rows that stop or whose logits are not finite.

    `stop_ids` is padded with -1. `state.rows` describes the rows that `logits` belong to, already advanced. `filters`
    as in `sampling.sample`.
    """
    running = state.rows.query_length > 0
    sampled = sampling.sample(logits, params, state.history, running, filters)
    remaining = jnp.where(running, state.remaining - 1, state.remaining)
    finite = jnp.all(jnp.isfinite(logits), axis=-1) | ~running
    stopped = jnp.any(sampled.token[:, None] == stop_ids, axis=1) | (remaining <= 0) | ~finite
    query_length = jnp.where(running & ~stopped, 1, 0).astype(jnp.int32)
    rows = dataclasses.replace(state.rows, query_length=query_length)
    emitted = Emitted(sampled.token, sampled.logprob, running, finite)
    return DecodeState(state.cache, rows, sampled.token, remaining, sampled.history), emitted


@functools.partial(jax.jit, static_argnames=("graph", "filters"), donate_argnames="state")
def decode(
    graph: Graph,
    leaves: tuple[Array, ...],
    state: DecodeState,
    params: sampling.Sampling,
    stop_ids: Int32[Array, "B S"],
    *,
    filters: sampling.Filters | None = None,
) -> tuple[DecodeState, Emitted]:
    """Feeds each running row's last token and samples the next one. Donates the state.

    `filters` says what any row has of top-k, top-p and min-p; None: that may change from step to step.
    """
    model = graph.merge(leaves)
    output = model(state.token[:, None], state.rows, state.cache)
    stored = graph.place(output.cache)
    assert stored is not None
    logits = graph.replicate(model.logits(output.hidden[:, 0]))
    state = dataclasses.replace(state, cache=stored, rows=state.rows.advance())
    return accept(state, logits, params, stop_ids, filters)


@functools.partial(jax.jit, donate_argnames="state")
def start(
    state: DecodeState, logits: Float[Array, "B V"], params: sampling.Sampling, stop_ids: Int32[Array, "B S"]
) -> tuple[DecodeState, Emitted]:
    """Samples the first token of each row from its prefill logits. Donates the state."""
    return accept(state, logits, params, stop_ids)


@functools.partial(jax.jit, donate_argnames="state")
def retire(state: Any, keep: Bool[Array, " B"]) -> Any:
    """Ends the rows that are not kept, whatever they have left to say. Donates the state (of any kind of decoding)."""
    query_length = jnp.where(keep, state.rows.query_length, 0)
    return dataclasses.replace(state, rows=dataclasses.replace(state.rows, query_length=query_length))
