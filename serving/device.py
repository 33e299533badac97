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

from k3jax import logprobs, sampling
from k3jax.cache import K3Cache, KdaCache, Leaf, MlaCache, Rows
from k3jax.logit_rules import LogitRules
from k3jax.speculation.acceptance import Rule
from k3jax.speculation.drafters import DSparkDrafter, NgramDrafter, Step
from k3jax.speculation.state import Block, SpeculativeState
from k3jax.speculation.step import speculate as speculative_step
from k3jax.speculation.widths import Widths
from k3jax.step import Graph, last_hidden

Drafter = DSparkDrafter | NgramDrafter
"""Drafters that can be told of a cached prefix: by its pages, or by its text."""

SETTINGS = tuple(field.name for field in dataclasses.fields(sampling.Sampling))
SCALARS = 12
"""Fields of `PrefillInput` with one column."""
BIASED, CONSTRAINED, TOP, PROMPT = 1, 2, 4, 8
"""Bits of `PrefillInput.wants`."""


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
    rules: LogitRules
    wants_top: Leaf
    """bool [B]: rows that want alternatives."""
    length: Leaf
    """int32 [B]: tokens in the cache; the host does not know it while drafts are in flight."""
    remaining: Leaf
    """int32 [B]: tokens that may still be sampled."""
    context: tuple[Leaf, ...] = ()
    """Rows of each draft layer, on the pages of the latents; empty without a draft."""
    text: Leaf = None
    """int32 [B, L]: what each row has read and said, for a drafter that searches it."""


class Layout(NamedTuple):
    """Static sizes of an uploaded array."""

    rows: int
    tokens: int
    pages: int
    captures: int
    stops: int
    top: int = 0
    """Alternatives in answers; no column of the upload."""


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
    min_length: Int32[Array, " R"]
    wants: Int32[Array, " R"]
    following: Int32[Array, " R"]
    """The prompt's next token after the chunk, where the prompt's log-probabilities are wanted."""
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

    def flag(self, bit: int) -> Bool[Array, " R"]:
        """Rows that want something."""
        return self.wants & bit > 0

    def rules(self, known: LogitRules) -> LogitRules:
        """The rules of these rows; biases and masks are on the device already, if there are any."""
        own = jax.tree.map(lambda array: array[self.row], known)
        flags = {"biased": self.flag(BIASED), "constrained": self.flag(CONSTRAINED)}
        return dataclasses.replace(own, min_length=self.min_length, **flags)

    def next_ids(self) -> Int32[Array, "R T"]:
        """The token that follows each token of a chunk."""
        tokens = self.ids.shape[1]
        shifted = jnp.concatenate([self.ids[:, 1:], self.ids[:, :1]], axis=1)
        last = jnp.arange(tokens, dtype=jnp.int32)[None] == self.count[:, None] - 1
        return jnp.where(last, self.following[:, None], shifted)

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
    rules: LogitRules,
    running: Bool[Array, " R"],
) -> tuple[Answer, sampling.History, Bool[Array, " R"]]:
    """Answers, histories after them, and which rows go on."""
    ruled = rules.apply(logits, history.position, stop_ids, running)
    sampled = sampling.sample(ruled, params, history, running)
    # The model's own, whatever the rules did.
    logprob = jnp.take_along_axis(jax.nn.log_softmax(logits), sampled.token[:, None], axis=-1)[:, 0]
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    stopped = jnp.any(sampled.token[:, None] == stop_ids, axis=1) | ~finite
    return Answer(sampled.token, logprob, running, finite), sampled.history, running & ~stopped


class Prefilled(NamedTuple):
    """What `prefill` sends to the host; the last two only where somebody wants them."""

    answer: Int32[Array, "R A"]
    top: Int32[Array, "R C"]
    """`logprobs.alternatives` of the sampled tokens."""
    prompt: Int32[Array, "R T E"]
    """`logprobs.of_prompt` of the chunks."""


@functools.partial(jax.jit, static_argnames=("graph", "layout", "drafter"), donate_argnames="state")
def prefill(
    graph: Graph,
    leaves: tuple[Array, ...],
    state: DeviceState,
    packed: Int32[Array, "R C"],
    draft_leaves: tuple[Array, ...] = (),
    *,
    layout: Layout,
    drafter: Drafter | None = None,
) -> tuple[DeviceState, Prefilled]:
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
    output = model(given.ids, rows, state.cache, trace=isinstance(drafter, DSparkDrafter))
    cache = graph.place(output.cache)
    assert cache is not None

    def logits(hidden: Array) -> Array:
        return graph.replicate(model.logits(hidden))

    last = logits(last_hidden(output.hidden, rows))
    params, own, rules = given.sampling(), _histories(state.history, given), given.rules(state.rules)
    answer, history, goes_on = _sample(last, params, own, given.stop_ids, rules, given.final > 0)
    # Padding rows have no row: their index is past the end, where a scatter drops it.
    target = jnp.where(given.count > 0, given.row, state.token.shape[0])

    def put(old: Array, new: Array) -> Array:
        return old.at[target].set(new, mode="drop")

    state = dataclasses.replace(
        _learn(state, drafter, draft_leaves, Step(given.ids, output.trace), rows, given.row, put),
        cache=cache,
        token=put(state.token, answer.token),
        alive=put(state.alive, goes_on),
        params=jax.tree.map(put, state.params, params),
        history=jax.tree.map(put, state.history, history),
        stop_ids=put(state.stop_ids, given.stop_ids),
        rules=jax.tree.map(put, state.rules, rules),
        wants_top=put(state.wants_top, given.flag(TOP)),
        length=put(state.length, given.start + given.count),
        remaining=put(state.remaining, given.remaining - given.final),
    )
    top = logprobs.alternatives(last, given.flag(TOP) & (given.final > 0), layout.top)
    prompt = logprobs.of_prompt(logits, output.hidden, given.next_ids(), given.flag(PROMPT), layout.top)
    return state, Prefilled(answer.pack(finite_slots(cache, given.boundary_slot)), top, prompt)


def _learn(
    state: DeviceState,
    drafter: Drafter | None,
    leaves: tuple[Array, ...],
    step: Step,
    rows: Rows,
    row: Int32[Array, " R"],
    put: Callable[[Array, Array], Array],
) -> DeviceState:
    """The state after the drafter has seen a chunk."""
    if isinstance(drafter, DSparkDrafter):
        return dataclasses.replace(state, context=drafter.extend(leaves, state.context, step, rows))
    if isinstance(drafter, NgramDrafter):
        return dataclasses.replace(state, text=put(state.text, drafter.extend(leaves, state.text[row], step, rows)))
    return state


def _histories(history: sampling.History, given: PrefillInput) -> sampling.History:
    """What each row has seen and said. Without penalties that does not matter, with them `remember` has set it."""
    return sampling.History(history.prompt[given.row], history.count[given.row], given.start + given.count)


class Decoded(NamedTuple):
    """What `decode` and `speculate` send to the host."""

    answer: Int32[Array, "B A"]
    top: Int32[Array, "B *C"]
    """`logprobs.alternatives` of the tokens, where somebody wants them."""


@functools.partial(jax.jit, static_argnames=("graph", "top"), donate_argnames="state")
def decode(
    graph: Graph, leaves: tuple[Array, ...], state: DeviceState, packed: Int32[Array, "B C"], *, top: int = 0
) -> tuple[DeviceState, Decoded]:
    """The next token of each row that is active and alive, with `top` alternatives. Donates the state.

    Columns: active, slot, length, page table.
    """
    running = (packed[:, 0] > 0) & state.alive
    rows = Rows(packed[:, 1], packed[:, 3:], packed[:, 2], running.astype(jnp.int32))
    model = graph.merge(leaves)
    output = model(state.token[:, None], rows, state.cache)
    cache = graph.place(output.cache)
    assert cache is not None
    logits = graph.replicate(model.logits(output.hidden[:, 0]))
    args = (state.params, state.history, state.stop_ids, state.rules)
    answer, history, goes_on = _sample(logits, *args, running)
    best = logprobs.alternatives(logits, state.wants_top & running, top)
    state = dataclasses.replace(
        state,
        cache=cache,
        token=jnp.where(running, answer.token, state.token),
        alive=jnp.where(running, goes_on, state.alive),
        history=history,
    )
    return state, Decoded(answer.pack(), best)


@functools.partial(jax.jit, static_argnames=("graph", "drafter", "rule", "top", "widths"), donate_argnames="state")
def speculate(
    graph: Graph,
    leaves: tuple[Array, ...],
    state: DeviceState,
    packed: Int32[Array, "B C"],
    draft_leaves: tuple[Array, ...],
    *,
    drafter: Drafter,
    rule: Rule,
    widths: Widths | None = None,
    top: int = 0,
) -> tuple[DeviceState, Decoded]:
    """A block of tokens for each row that is active and alive, some of them drafted. Donates the state.

    Columns as in `decode`; the length is the device's own. Answers: count, finite, tokens, bits of log-probabilities.
    """
    before = before_block(state, packed, drafter)
    args = (graph, leaves, drafter, draft_leaves, before, state.params, state.stop_ids)
    options = {"rule": rule, "widths": widths, "top": top}
    after, block = speculative_step(*args, **options, rules=state.rules, wants_top=state.wants_top)
    return after_block(state, packed, after, block, drafter)


def before_block(state: DeviceState, packed: Int32[Array, "B C"], drafter: Drafter) -> SpeculativeState:
    """What a step with drafts starts from, given the columns of `speculate`."""
    running = (packed[:, 0] > 0) & state.alive
    rows = Rows(packed[:, 1], packed[:, 3:], state.length, running.astype(jnp.int32))
    context = state.context if isinstance(drafter, DSparkDrafter) else state.text
    return SpeculativeState(state.cache, context, rows, state.token, state.remaining, state.history)


def after_block(
    state: DeviceState, packed: Int32[Array, "B C"], after: SpeculativeState, block: Block, drafter: Drafter
) -> tuple[DeviceState, Decoded]:
    """The state after a step with drafts, and what the host is told of it."""
    assert block.top is not None
    running, paged = (packed[:, 0] > 0) & state.alive, isinstance(drafter, DSparkDrafter)
    goes_on = after.rows.query_length > 0
    state = dataclasses.replace(
        state,
        cache=after.cache,
        context=after.context if paged else state.context,
        text=state.text if paged else after.context,
        token=jnp.where(running, after.token, state.token),
        alive=jnp.where(running, goes_on, state.alive),
        length=jnp.where(running, after.rows.length, state.length),
        remaining=jnp.where(running, after.remaining, state.remaining),
        history=after.history,
    )
    count = jnp.where(running, block.count, 0)
    flags = jnp.stack([count, block.finite.astype(jnp.int32)], axis=1)
    bits = jax.lax.bitcast_convert_type(block.logprob, jnp.int32)
    return state, Decoded(jnp.concatenate([flags, block.token, bits], axis=1), block.top)


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


@functools.partial(jax.jit, donate_argnames="state")
def set_bias(state: DeviceState, packed: Int32[Array, " C"]) -> DeviceState:
    """Sets a row's biases. Columns: row, ids, bits of the values. Donates the state."""
    rules, row = state.rules, packed[0]
    ids, bits = jnp.split(packed[1:], 2)
    values = jax.lax.bitcast_convert_type(bits, jnp.float32)
    rules = dataclasses.replace(rules, bias_ids=rules.bias_ids.at[row].set(ids), bias=rules.bias.at[row].set(values))
    return dataclasses.replace(state, rules=rules)


@functools.partial(jax.jit, donate_argnames="state")
def set_masks(state: DeviceState, packed: Int32[Array, "G C"]) -> DeviceState:
    """Sets the masks of some rows. Columns: row (past the end: nothing), words. Donates the state."""
    allowed = state.rules.allowed.at[packed[:, 0]].set(packed[:, 1:], mode="drop")
    return dataclasses.replace(state, rules=dataclasses.replace(state.rules, allowed=allowed))


@functools.partial(jax.jit, donate_argnames="state")
def set_text(state: DeviceState, row: Int32[Array, ""], ids: Int32[Array, " L"]) -> DeviceState:
    """Tells a drafter that searches the text what a row takes from the prefix cache. Donates the state."""
    return dataclasses.replace(state, text=state.text.at[row].set(ids))


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
