"""The programs of the engine. Each takes one small array of numbers and gives one back.

What a row is and does lives on the device: its last token, its settings, what it has said, and whether it goes on. The
host runs a step ahead and may order a token for a row that has just stopped; such a row is inert.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from k3jax import sampling
from k3jax.cache import K3Cache, KdaCache, LayerCache, Leaf, MlaCache, Rows
from k3jax.speculation.acceptance import Rule
from k3jax.speculation.drafters import DSparkDrafter, Step
from k3jax.speculation.step import SpeculativeState
from k3jax.speculation.step import speculate as speculative_step
from k3jax.step import Graph, last_hidden

SETTINGS = tuple(field.name for field in dataclasses.fields(sampling.Sampling))
SCALARS = 9
"""Fields of `PrefillInput` with one column."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class DeviceState:
    """Everything that changes from step to step; B rows."""

    cache: K3Cache
    token: Leaf
    """int32 [B]: sampled last, not yet in the cache."""
    alive: Leaf
    """bool [B]: rows that have neither stopped nor failed."""
    params: sampling.Sampling
    history: sampling.History
    stop_ids: Leaf
    """int32 [B, S]: filled with -1."""
    length: Leaf
    """int32 [B]: tokens in the cache; the host does not know it while drafts are in flight."""
    remaining: Leaf
    """int32 [B]: tokens that may still be sampled."""
    context: tuple[Leaf, ...] = ()
    """Rows of each draft layer, on the pages of the latents; empty without a draft."""


class Layout(NamedTuple):
    """Static sizes of an uploaded array."""

    rows: int
    tokens: int
    pages: int
    captures: int
    stops: int


class PrefillInput(NamedTuple):
    """The columns of a prefill upload, one row per chunk. A padding row has `count` 0."""

    row: Int32[Array, " R"]
    slot: Int32[Array, " R"]
    source: Int32[Array, " R"]
    start: Int32[Array, " R"]
    count: Int32[Array, " R"]
    final: Int32[Array, " R"]
    """1 where a token is sampled after the chunk."""
    copy_from: Int32[Array, " R"]
    copy_to: Int32[Array, " R"]
    remaining: Int32[Array, " R"]
    """Tokens that the row may still sample, this one included."""
    settings: Int32[Array, "R 8"]
    """Bits of the sampling settings in the order of `SETTINGS`."""
    boundary: Int32[Array, "R N"]
    boundary_slot: Int32[Array, "R N"]
    stop_ids: Int32[Array, "R S"]
    page_table: Int32[Array, "R P"]
    ids: Int32[Array, "R T"]

    @staticmethod
    def widths(layout: Layout) -> tuple[int, ...]:
        """Columns of each field."""
        return (
            *(1,) * SCALARS,
            len(SETTINGS),
            layout.captures,
            layout.captures,
            layout.stops,
            layout.pages,
            layout.tokens,
        )

    @classmethod
    def split(cls, packed: Int32[Array, "R C"], layout: Layout) -> "PrefillInput":
        """The fields of an uploaded array."""
        widths = cls.widths(layout)
        ends = [sum(widths[: n + 1]) for n in range(len(widths))]
        parts = [packed[:, end - width : end] for end, width in zip(ends, widths)]
        return cls(*(part[:, 0] if n < SCALARS else part for n, part in enumerate(parts)))

    def sampling(self) -> sampling.Sampling:
        """The settings as numbers."""

        def number(name: str, bits: Array) -> Array:
            integers = {"top_k": jnp.int32, "seed": jnp.uint32}
            return jax.lax.bitcast_convert_type(bits, integers.get(name, jnp.float32))

        return sampling.Sampling(**{name: number(name, self.settings[:, n]) for n, name in enumerate(SETTINGS)})


class Answer(NamedTuple):
    """What a program says about each row; travels as one int32 array [R, 4 + captures]."""

    token: Int32[Array, " R"]
    logprob: Float32[Array, " R"]
    valid: Bool[Array, " R"]
    finite: Bool[Array, " R"]

    def pack(self, captures: Bool[Array, "R N"] | None = None) -> Int32[Array, "R C"]:
        """One array of int32."""
        bits = jax.lax.bitcast_convert_type(self.logprob, jnp.int32)
        flags = (self.token, bits, self.valid.astype(jnp.int32), self.finite.astype(jnp.int32))
        columns = jnp.stack(flags, axis=1)
        return columns if captures is None else jnp.concatenate([columns, captures.astype(jnp.int32)], axis=1)


def _sample(
    logits: Float32[Array, "R V"],
    params: sampling.Sampling,
    history: sampling.History,
    stop_ids: Int32[Array, "R S"],
    running: Bool[Array, " R"],
) -> tuple[Answer, sampling.History, Bool[Array, " R"]]:
    """Answers, histories after them, and which rows go on."""
    sampled = sampling.sample(logits, params, history, running)
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    stopped = jnp.any(sampled.token[:, None] == stop_ids, axis=1) | ~finite
    return Answer(sampled.token, sampled.logprob, running, finite), sampled.history, running & ~stopped


@functools.partial(jax.jit, static_argnames=("graph", "layout", "drafter"), donate_argnames="state")
def prefill(
    graph: Graph,
    leaves: tuple[Array, ...],
    state: DeviceState,
    packed: Int32[Array, "R C"],
    draft_leaves: tuple[Array, ...] = (),
    *,
    layout: Layout,
    drafter: DSparkDrafter | None = None,
) -> tuple[DeviceState, Int32[Array, "R A"]]:
    """One chunk for each of R rows; final ones sample a token. A draft learns the chunk too. Donates the state."""
    given = PrefillInput.split(packed, layout)
    rows = Rows(
        given.slot,
        given.page_table,
        given.start,
        given.count,
        source=given.source,
        boundary=given.boundary,
        boundary_slot=given.boundary_slot,
    )
    model = graph.merge(leaves)
    state = copy_pages(state, given.copy_from, given.copy_to)
    output = model(given.ids, rows, state.cache, trace=drafter is not None)
    cache = graph.place(output.cache)
    assert cache is not None
    context = state.context
    if drafter is not None:
        context = drafter.extend(draft_leaves, context, Step(given.ids, output.trace), rows)
    logits = graph.replicate(model.logits(last_hidden(output.hidden, rows)))
    params, own = given.sampling(), _histories(state.history, given)
    answer, history, goes_on = _sample(logits, params, own, given.stop_ids, given.final > 0)
    # Padding rows have no row: their index is past the end, where a scatter drops it.
    target = jnp.where(given.count > 0, given.row, state.token.shape[0])

    def put(old: Array, new: Array) -> Array:
        return old.at[target].set(new, mode="drop")

    state = DeviceState(
        cache,
        put(state.token, answer.token),
        put(state.alive, goes_on),
        jax.tree.map(put, state.params, params),
        jax.tree.map(put, state.history, history),
        put(state.stop_ids, given.stop_ids),
        put(state.length, given.start + given.count),
        put(state.remaining, given.remaining - given.final),
        context,
    )
    return state, answer.pack(finite_slots(cache, given.boundary_slot))


def _histories(history: sampling.History, given: PrefillInput) -> sampling.History:
    """What each row has seen and said. Without penalties that does not matter, with them `remember` has set it."""
    return sampling.History(history.prompt[given.row], history.count[given.row], given.start + given.count)


@functools.partial(jax.jit, static_argnames=("graph",), donate_argnames="state")
def decode(
    graph: Graph, leaves: tuple[Array, ...], state: DeviceState, packed: Int32[Array, "B C"]
) -> tuple[DeviceState, Int32[Array, "B 4"]]:
    """The next token of each row that is active and alive. Donates the state.

    Columns: active, slot, length, page table.
    """
    running = (packed[:, 0] > 0) & state.alive
    rows = Rows(packed[:, 1], packed[:, 3:], packed[:, 2], running.astype(jnp.int32))
    model = graph.merge(leaves)
    output = model(state.token[:, None], rows, state.cache)
    cache = graph.place(output.cache)
    assert cache is not None
    logits = graph.replicate(model.logits(output.hidden[:, 0]))
    answer, history, goes_on = _sample(logits, state.params, state.history, state.stop_ids, running)
    state = dataclasses.replace(
        state,
        cache=cache,
        token=jnp.where(running, answer.token, state.token),
        alive=jnp.where(running, goes_on, state.alive),
        history=history,
    )
    return state, answer.pack()


@functools.partial(jax.jit, static_argnames=("graph", "drafter", "rule"), donate_argnames="state")
def speculate(
    graph: Graph,
    leaves: tuple[Array, ...],
    state: DeviceState,
    packed: Int32[Array, "B C"],
    draft_leaves: tuple[Array, ...],
    *,
    drafter: DSparkDrafter,
    rule: Rule,
) -> tuple[DeviceState, Int32[Array, "B C2"]]:
    """A block of tokens for each row that is active and alive, some of them drafted. Donates the state.

    Columns as in `decode`; the length is the device's own. Answers: count, finite, tokens, bits of log-probabilities.
    """
    running = (packed[:, 0] > 0) & state.alive
    rows = Rows(packed[:, 1], packed[:, 3:], state.length, running.astype(jnp.int32))
    before = SpeculativeState(state.cache, state.context, rows, state.token, state.remaining, state.history)
    args = (graph, leaves, drafter, draft_leaves, before, state.params, state.stop_ids)
    after, block = speculative_step(*args, rule=rule)
    goes_on = after.rows.query_length > 0
    state = dataclasses.replace(
        state,
        cache=after.cache,
        context=after.context,
        token=jnp.where(running, after.token, state.token),
        alive=jnp.where(running, goes_on, state.alive),
        length=jnp.where(running, after.rows.length, state.length),
        remaining=jnp.where(running, after.remaining, state.remaining),
        history=after.history,
    )
    count = jnp.where(running, block.count, 0)
    flags = jnp.stack([count, block.finite.astype(jnp.int32)], axis=1)
    bits = jax.lax.bitcast_convert_type(block.logprob, jnp.int32)
    return state, jnp.concatenate([flags, block.token, bits], axis=1)


@functools.partial(jax.jit, donate_argnames="state")
def remember(state: DeviceState, row: Int32[Array, ""], words: Int32[Array, " V"]) -> DeviceState:
    """Sets what a row has seen and said; needed where penalties are. Donates the state.

    `words`: twice the occurrences in the output, plus 1 for tokens of the prompt.
    """
    history = state.history
    prompt = history.prompt.at[row].set(words % 2 == 1)
    return dataclasses.replace(
        state, history=dataclasses.replace(history, prompt=prompt, count=history.count.at[row].set(words // 2))
    )


def _change_pools(state: DeviceState, change: Callable[[Array], Array]) -> DeviceState:
    """The state with every paged pool changed: latents and draft rows."""
    layers = (MlaCache(change(e.latent)) if isinstance(e, MlaCache) else e for e in state.cache.layers)
    return dataclasses.replace(state, cache=K3Cache(tuple(layers)), context=tuple(map(change, state.context)))


def copy_pages(state: DeviceState, source: Int32[Array, " R"], target: Int32[Array, " R"]) -> DeviceState:
    """Copies pages in every layer; target 0 copies nothing."""

    def copy(pool: Array) -> Array:
        place = jnp.where(target > 0, target, pool.shape[0])
        return pool.at[place].set(pool[source], mode="drop")

    return _change_pools(state, copy)


def finite_slots(cache: K3Cache, slot: Int32[Array, "R N"]) -> Bool[Array, "R N"]:
    """Whether state and window of each slot are finite in every KDA layer."""
    finite = jnp.ones(slot.shape, bool)
    for entry in cache.layers:
        if isinstance(entry, KdaCache):
            for pool in (entry.state, entry.window):
                finite &= jnp.isfinite(pool[slot]).all(axis=tuple(range(2, pool.ndim + 1)))
    return finite


class Piece(NamedTuple):
    """Some pages and the state of a prefix, without batch."""

    latents: tuple[Leaf, ...]
    """[P, page, L] of each MLA layer, then the rows of each draft layer."""
    states: tuple[Leaf, ...]
    """[H, D, D] of each KDA layer."""
    windows: tuple[Leaf, ...]


@jax.jit
def read_prefix(cache: K3Cache, context: tuple[Array, ...], pages: Int32[Array, " P"], slot: Int32[Array, ""]) -> Piece:
    """Pages, in order, and state of a prefix."""
    pools = [*(entry.latent for entry in cache.layers if isinstance(entry, MlaCache)), *context]
    kda = [entry for entry in cache.layers if isinstance(entry, KdaCache)]
    return Piece(
        tuple(pool[pages] for pool in pools),
        tuple(entry.state[slot] for entry in kda),
        tuple(entry.window[slot] for entry in kda),
    )


@functools.partial(jax.jit, donate_argnames="state")
def write_prefix(state: DeviceState, piece: Piece, pages: Int32[Array, " P"], slot: Int32[Array, ""]) -> DeviceState:
    """Stores what `read_prefix` gave into `pages` (0: nothing) and `slot` (0: nothing). Donates the state."""

    def put(pool: Array, index: Array, values: Array) -> Array:
        return pool.at[jnp.where(index > 0, index, pool.shape[0])].set(values, mode="drop")

    latents, kda = iter(piece.latents), iter(zip(piece.states, piece.windows, strict=True))

    def write(entry: LayerCache) -> LayerCache:
        if isinstance(entry, MlaCache):
            return MlaCache(put(entry.latent, pages, next(latents)))
        new_state, window = next(kda)
        return KdaCache(put(entry.state, slot, new_state), put(entry.window, slot, window))

    cache = K3Cache(tuple(map(write, state.cache.layers)))
    return dataclasses.replace(
        state, cache=cache, context=tuple(put(pool, pages, next(latents)) for pool in state.context)
    )
