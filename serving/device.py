"""The programs of the engine. Each takes one small array of numbers and gives one back.

What a row is and does lives on the device: its last token, its settings, what it has said, and whether it goes on. The host
runs a step ahead and may order a token for a row that has just stopped; such a row is inert.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from k3jax import sampling
from k3jax.cache import K3Cache, KdaCache, Leaf, MlaCache, Rows
from k3jax.step import Graph, last_hidden
from pallas.mla import write_pages

SETTINGS = tuple(field.name for field in dataclasses.fields(sampling.Sampling))
SCALARS = 8
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
        return (*(1,) * SCALARS, len(SETTINGS), layout.captures, layout.captures, layout.stops, layout.pages, layout.tokens)

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


@functools.partial(jax.jit, static_argnames=("graph", "layout"), donate_argnames="state")
def prefill(
    graph: Graph, leaves: tuple[Array, ...], state: DeviceState, packed: Int32[Array, "R C"], *, layout: Layout
) -> tuple[DeviceState, Int32[Array, "R A"]]:
    """One chunk for each of R rows; final ones sample a token. Donates the state."""
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
    ready = clear_padding(copy_pages(state.cache, given.copy_from, given.copy_to), rows, layout.tokens)
    output = model(given.ids, rows, ready)
    cache = graph.place(output.cache)
    assert cache is not None
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
    )
    return state, answer.pack(finite_slots(cache, given.boundary_slot))


def _histories(history: sampling.History, given: PrefillInput) -> sampling.History:
    """What each row has seen and said. Without penalties that does not matter, with them `remember` has set it."""
    return sampling.History(history.prompt[given.row], history.count[given.row], given.start + given.count)


@functools.partial(jax.jit, static_argnames=("graph",), donate_argnames="state")
def decode(
    graph: Graph, leaves: tuple[Array, ...], state: DeviceState, packed: Int32[Array, "B C"]
) -> tuple[DeviceState, Int32[Array, "B 4"]]:
    """The next token of each row that is active and alive. Columns: active, slot, length, page table. Donates the state."""
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


def copy_pages(cache: K3Cache, source: Int32[Array, " R"], target: Int32[Array, " R"]) -> K3Cache:
    """Copies latent pages in every MLA layer; target 0 copies nothing."""

    def copy(entry: MlaCache) -> MlaCache:
        place = jnp.where(target > 0, target, entry.latent.shape[0])
        return MlaCache(entry.latent.at[place].set(entry.latent[source], mode="drop"))

    return K3Cache(tuple(copy(entry) if isinstance(entry, MlaCache) else entry for entry in cache.layers))


def clear_padding(cache: K3Cache, rows: Rows, tokens: int) -> K3Cache:
    """Zeros where the padding of a chunk looks: a NaN that another request has left there would reach real tokens.

    Attention gives such positions the weight zero, and zero times NaN is NaN.
    """
    padding = ~rows.valid(tokens) & (rows.query_length > 0)[:, None]

    def clear(entry: MlaCache) -> MlaCache:
        zeros = jnp.zeros((*padding.shape, entry.latent.shape[-1]), entry.latent.dtype)
        return MlaCache(write_pages(entry.latent, zeros, rows.page_table, rows.length, padding))

    return K3Cache(tuple(clear(entry) if isinstance(entry, MlaCache) else entry for entry in cache.layers))


def finite_slots(cache: K3Cache, slot: Int32[Array, "R N"]) -> Bool[Array, "R N"]:
    """Whether state and window of each slot are finite in every KDA layer."""
    finite = jnp.ones(slot.shape, bool)
    for entry in cache.layers:
        if isinstance(entry, KdaCache):
            for pool in (entry.state, entry.window):
                finite &= jnp.isfinite(pool[slot]).all(axis=tuple(range(2, pool.ndim + 1)))
    return finite


@jax.jit
def read_prefix(cache: K3Cache, pages: Int32[Array, " P"], slot: Int32[Array, ""]) -> K3Cache:
    """Pages (in order) and state of a prefix, as a cache of their own without batch."""

    def read(entry: KdaCache | MlaCache) -> KdaCache | MlaCache:
        if isinstance(entry, MlaCache):
            return MlaCache(entry.latent[pages])
        return KdaCache(entry.state[slot], entry.window[slot])

    return K3Cache(tuple(map(read, cache.layers)))  # pyright: ignore[reportArgumentType]


@functools.partial(jax.jit, donate_argnames="state")
def write_prefix(state: DeviceState, prefix: K3Cache, pages: Int32[Array, " P"], slot: Int32[Array, ""]) -> DeviceState:
    """Stores what `read_prefix` gave into `pages` (0: nothing) and `slot` (0: nothing). Donates the state."""

    def put(pool: Array, index: Array, values: Array) -> Array:
        return pool.at[jnp.where(index > 0, index, pool.shape[0])].set(values, mode="drop")

    def write(entry: KdaCache | MlaCache, new: KdaCache | MlaCache) -> KdaCache | MlaCache:
        if isinstance(entry, MlaCache):
            return MlaCache(put(entry.latent, pages, new.latent))  # pyright: ignore[reportAttributeAccessIssue]
        return KdaCache(put(entry.state, slot, new.state), put(entry.window, slot, new.window))  # pyright: ignore[reportAttributeAccessIssue]

    layers = (write(entry, new) for entry, new in zip(state.cache.layers, prefix.layers, strict=True))  # pyright: ignore[reportArgumentType]
    return dataclasses.replace(state, cache=K3Cache(tuple(layers)))
