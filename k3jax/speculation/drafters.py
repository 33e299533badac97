"""What proposes tokens in a speculative step: the DSpark draft, or a search in the text so far.

A drafter is static; its arrays and its context (what it keeps between steps) are passed along. All of
them leave the output's distribution as it is; they differ in how many of their tokens stand.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from k3jax import sampling
from k3jax.cache import Rows
from k3jax.dspark.config import DSparkConfig
from k3jax.dspark.model import Draft as Block
from k3jax.dspark.model import DSpark, Pools, empty_pools
from k3jax.model import K3, LayerTrace
from k3jax.speculation.acceptance import Rule
from k3jax.speculation.randomness import DRAFT, ROUGH, admitted, block_noise, keys, laws, pick, random_rows
from k3jax.speculation.widths import Widths
from pallas.dispatch import select

Context = Any
"""What a drafter keeps between steps; a tree of arrays."""


class Proposal(NamedTuple):
    """Drafted tokens and the distributions that they were drawn from."""

    token: Int32[Array, "B G"]
    probability: Float32[Array, "B G V"] | None
    """None: those of `scores`."""
    confidence: Float[Array, "B G"] | None = None
    """Logits of the chance that each token stands once those before it do; None where nothing is known."""
    context: Context | None = None
    """The drafter's context, where proposing has changed it; None: it is as it was."""
    scores: Float32[Array, "B G V"] | None = None
    """What a softmax makes the distributions of; greedy rows drafted the largest. None: they are given as they are."""

    def distributions(self, params: sampling.Sampling) -> Float32[Array, "B G V"]:
        """What each token was drawn from."""
        if self.scores is None:
            assert self.probability is not None
            return self.probability
        return laws(self.scores, self.scores, params)

    def first(self, count: int) -> "Proposal":
        """The first `count` tokens alone."""
        some = lambda array: None if array is None else array[:, :count]  # noqa: E731
        return Proposal(
            self.token[:, :count], *map(some, (self.probability, self.confidence)), scores=some(self.scores)
        )


class Step(NamedTuple):
    """Tokens that the target ran, and what it left behind."""

    ids: Int32[Array, "B T"]
    trace: tuple[LayerTrace, ...]


@runtime_checkable
class Drafter(Protocol):
    """Proposes a block and learns from what was committed. Hashable: it is a static argument."""

    def propose(
        self,
        leaves: tuple[Array, ...],
        context: Context,
        target: K3,
        anchor: Int32[Array, " B"],
        rows: Rows,
        params: sampling.Sampling,
        filters: sampling.Filters | None = None,
    ) -> Proposal:
        """A block after `anchor`, which stands at position `rows.length`. Donates the context if it gives one back."""
        ...

    def extend(self, leaves: tuple[Array, ...], context: Context, step: Step, rows: Rows) -> Context:
        """The context after the valid tokens of a step have been committed. Donates the context."""
        ...


def taps(trace: tuple[LayerTrace, ...], config: DSparkConfig) -> Float[Array, "B T F"]:
    """The target's features: concatenated streams after the tapped layers (0-based, completed)."""
    chosen = [trace[layer] for layer in config.target_layer_ids]
    parts = [entry.prefix if config.tap_stream == "prefix" else entry.mixed for entry in chosen]
    return jnp.concatenate(parts, axis=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class DSparkDrafter:
    """The static half of a DSpark draft; its context is the paged rows of its layers. Compared by identity."""

    definition: nnx.GraphDef[DSpark]
    structure: Any
    config: DSparkConfig

    @classmethod
    def of(cls, draft: DSpark) -> tuple["DSparkDrafter", tuple[Array, ...]]:
        """The drafter of `draft` and its arrays."""
        definition, state = nnx.split(draft)
        leaves, structure = jax.tree.flatten(state)
        return cls(definition, structure, draft.config), tuple(leaves)

    def merge(self, leaves: tuple[Array, ...]) -> DSpark:
        """The draft with these arrays."""
        return nnx.merge(self.definition, jax.tree.unflatten(self.structure, leaves))

    def create(self, *, pages: int, page_size: int, dtype: Any) -> Pools:
        """Zeroed context rows for every draft layer, on the same pages as the target's latents."""
        return empty_pools(self.config, pages=pages, page_size=page_size, dtype=dtype)

    def propose(
        self,
        leaves: tuple[Array, ...],
        context: Pools,
        target: K3,
        anchor: Int32[Array, " B"],
        rows: Rows,
        params: sampling.Sampling,
        filters: sampling.Filters | None = None,
    ) -> Proposal:
        """See `Drafter`; the draft's distributions get the request's temperature and filters too."""

        def run(leaves: tuple[Array, ...], *given: Any) -> Block:
            return self.merge(leaves).draft(*given, vocab_axis=target.vocab_axis)

        if target.placement is not None:  # every device drafts by itself; it has a part of the target's tables
            whole, tables = PartitionSpec(), PartitionSpec(target.vocab_axis)
            run = target.placement.layout.on_devices(run, (whole, whole, whole, whole, tables, tables), whole)
        block = run(leaves, context, anchor, rows, target.embedding[...], target.head[...])
        return self.choose(leaves, block, anchor, rows, params, filters)._replace(context=block.pools)

    def choose(
        self,
        leaves: tuple[Array, ...],
        block: Block,
        anchor: Int32[Array, " B"],
        rows: Rows,
        params: sampling.Sampling,
        filters: sampling.Filters | None = None,
    ) -> Proposal:
        """The sequential half of `propose`: tokens of a block, left to right."""
        ways = select(None, mosaic=_in_one_launch, xla=_one_by_one)
        return ways(self.merge(leaves), block, anchor, rows, params, filters)

    def extend(self, leaves: tuple[Array, ...], context: Pools, step: Step, rows: Rows) -> Pools:
        """See `Drafter`."""
        return self.merge(leaves).extend(context, taps(step.trace, self.config), rows)


def _in_one_launch(
    draft: DSpark,
    block: Block,
    anchor: Int32[Array, " B"],
    rows: Rows,
    params: sampling.Sampling,
    filters: sampling.Filters | None,
) -> Proposal:
    """Drafts of one row, refusing where filters may be at work."""
    if filters != sampling.NO_FILTERS:
        raise NotImplementedError("the walk serves requests without filters")
    if anchor.shape[0] != 1:
        raise NotImplementedError(f"the walk serves one row, got {anchor.shape[0]}")
    shape = block.hidden.shape[1], block.padded.shape[2]
    noise, scale = block_noise(params, rows.length, shape)
    drafted = draft.walk(block, anchor, noise, scale)
    return Proposal(drafted.token, None, drafted.confidence, scores=drafted.logits)


def _one_by_one(
    draft: DSpark,
    block: Block,
    anchor: Int32[Array, " B"],
    rows: Rows,
    params: sampling.Sampling,
    filters: sampling.Filters | None,
) -> Proposal:
    """The same for every kind of draft and request."""
    kept = []
    places = jnp.arange(draft.config.block_size, dtype=jnp.int32)
    noise = jax.vmap(lambda place: keys(params.seed, rows.length, DRAFT, place))(places)

    def choose(k: int, logits: Float[Array, "B V"]) -> Int32[Array, " B"]:
        kept.append(admitted(logits, params, filters, ROUGH))
        return pick(logits, kept[-1], params, noise[k])

    drafted = draft.sample(block, anchor, choose)
    admissible = jnp.stack(kept, axis=1)
    if filters == sampling.NO_FILTERS and not draft.reduced:
        scores = jnp.where(random_rows(params)[:, None], admissible, drafted.logits)
        return Proposal(drafted.token, None, drafted.confidence, scores=scores)
    # Of all tokens at once: the next token's choice does not wait for this one's sum.
    probability = draft.over_target_ids(laws(drafted.logits, admissible, params))
    return Proposal(drafted.token, probability, drafted.confidence)


@dataclasses.dataclass(frozen=True)
class NgramDrafter:
    """Prompt lookup: proposes what followed the latest earlier occurrence of the last `order` tokens.

    Its context is the text itself, int32 [B, capacity]; unknown positions hold -1.
    """

    block_size: int
    order: int = 2

    def create(self, batch: int, capacity: int) -> Int32[Array, "B L"]:
        """An empty text."""
        return jnp.full((batch, capacity), -1, jnp.int32)

    def propose(
        self,
        leaves: tuple[Array, ...],
        context: Int32[Array, "B L"],
        target: K3,
        anchor: Int32[Array, " B"],
        rows: Rows,
        params: sampling.Sampling,
        filters: sampling.Filters | None = None,
    ) -> Proposal:
        """See `Drafter`; where nothing matches it repeats the anchor."""
        del leaves, params, filters
        vocab = target.head.shape[0]
        token = jax.vmap(self._continue)(context, rows.length, anchor)
        return Proposal(token, jax.nn.one_hot(token, vocab, dtype=jnp.float32))

    def _continue(
        self, text: Int32[Array, " L"], length: Int32[Array, ""], anchor: Int32[Array, ""]
    ) -> Int32[Array, " G"]:
        text = text.at[length].set(anchor, mode="drop")
        size = text.shape[0]
        index = jnp.arange(size, dtype=jnp.int32)
        match = (index >= self.order - 1) & (index < length)
        for back in range(self.order):
            wanted = text[jnp.maximum(length - back, 0)]
            match &= jnp.roll(text, back) == wanted
        found = jnp.max(jnp.where(match, index, -1))
        after = found + 1 + jnp.arange(self.block_size, dtype=jnp.int32)
        proposed = text.at[after].get(mode="fill", fill_value=-1)
        return jnp.where((found >= 0) & (after <= length) & (proposed >= 0), proposed, anchor)

    def extend(
        self, leaves: tuple[Array, ...], context: Int32[Array, "B L"], step: Step, rows: Rows
    ) -> Int32[Array, "B L"]:
        """See `Drafter`."""
        del leaves
        tokens = step.ids.shape[1]
        position = rows.length[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
        column = jnp.where(rows.valid(tokens), position, context.shape[1])
        row = jnp.broadcast_to(jnp.arange(context.shape[0], dtype=jnp.int32)[:, None], column.shape)
        return context.at[row, column].set(step.ids, mode="drop")


class Draft(NamedTuple):
    """What proposes tokens for a model, and how they are accepted."""

    drafter: Drafter
    leaves: tuple[Array, ...]
    rule: Rule = "block"
    widths: Widths | None = None
    """Passes that the confidence may choose from; None verifies every draft."""
    idle: bool = False
    """It reads the prompt and then rests: decoding goes token by token, through the same prefill program."""
