"""Trains a DSpark draft on text that its target wrote."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from k3jax import params
from k3jax.cache import Rows
from k3jax.dspark.config import DSparkConfig
from k3jax.dspark.model import DSpark
from k3jax.dspark.tensors import draft_specs
from k3jax.runtime import Model
from k3jax.speculation.drafters import taps
from k3jax.step import Graph
from k3jax.train.draft_losses import DraftLosses, Objective, Text, losses
from k3jax.train.draft_optimizer import draft_optimizer
from k3jax.train.draft_texts import Texts
from k3jax.train.optimizer import learning_rate

CLIP = 1.0


class DraftState(NamedTuple):
    """Everything that a run needs to continue."""

    step: Int32[Array, ""]
    masters: params.Tree
    """float32 parameters."""
    optimizer: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a draft is trained: warm-up, cosine, clip 1, as DeepSpec does; Muon in place of AdamW for the matrices."""

    steps: int
    seconds: float | None = None
    """Time of this run at which the schedule is at its end, if that comes before `steps`."""
    peak: float = 2e-3
    rows: int = 16
    """Texts per step, if they have the greatest length; as many times more of shorter ones."""
    anchors: int = 64
    """Blocks per text of the greatest length; as many times fewer in shorter ones."""
    rounds: int = 1
    """Times that new texts take the place of the old ones, the first included, at even parts of the schedule."""
    resident: bool = False
    """Runs the target once over all texts and keeps what the draft reads on the device: 4 kB a token for nano."""
    objective: Objective = dataclasses.field(default_factory=Objective)
    seed: int = 0


def create(config: DSparkConfig, seed: int) -> DraftState:
    """Normal(0.02) matrices; the Markov head starts at zero, so that step 0 is a plain block draft."""
    rng = np.random.default_rng(seed)
    zero = draft_specs(config)["markov"]["head"].pieces[0].name

    def fill(spec: params.ParamSpec) -> Array:
        if spec.init == "ones":
            return jnp.ones(spec.shape, jnp.float32)
        if spec.init == "zeros" or spec.pieces[0].name == zero:
            return jnp.zeros(spec.shape, jnp.float32)
        return jnp.asarray(rng.standard_normal(spec.shape) * 0.02, jnp.float32)

    masters = params.map_tree(fill, draft_specs(config))
    return DraftState(jnp.zeros((), jnp.int32), masters, draft_optimizer(config).init(masters))


@functools.partial(jax.jit, static_argnames=("graph", "config"))
def read(graph: Graph, leaves: tuple[Array, ...], config: DSparkConfig, ids: Int32[Array, "B S"]) -> Text:
    """The target's taps and hidden states of whole sequences."""
    batch, size = ids.shape
    zero = jnp.zeros(batch, jnp.int32)
    rows = Rows(zero, zero[:, None], zero, jnp.full(batch, size, jnp.int32))
    output = graph.merge(leaves)(ids, rows, trace=True)
    return Text(ids, taps(output.trace, config), output.hidden)


@functools.partial(jax.jit, static_argnames=("config", "objective", "graph"), donate_argnames="state")
def train_step(
    config: DSparkConfig,
    objective: Objective,
    graph: Graph,
    leaves: tuple[Array, ...],
    state: DraftState,
    text: Text,
    anchors: Int32[Array, "B A"],
    rate: Float32[Array, ""],
) -> tuple[DraftState, DraftLosses]:
    """One step on one batch. Donates the state."""
    target = graph.merge(leaves)
    embedding, head = target.embedding[...], target.head[...]

    def loss(masters: params.Tree) -> tuple[Array, DraftLosses]:
        arrays = jax.tree.map(lambda master: master.astype(embedding.dtype), masters)
        result = losses(DSpark(config, arrays), text, anchors, embedding, head, objective)
        return result.loss, result

    gradient, result = jax.grad(loss, has_aux=True)(state.masters)
    norm = jnp.sqrt(sum((jnp.sum(g * g) for g in jax.tree.leaves(gradient)), jnp.float32(0)))
    scale = jnp.minimum(1.0, CLIP / jnp.maximum(norm, 1e-9))
    gradient = jax.tree.map(lambda g: g * scale, gradient)
    direction, moments = draft_optimizer(config).update(gradient, state.optimizer, state.masters)
    masters = jax.tree.map(lambda master, d: master - rate * d, state.masters, direction)
    return DraftState(state.step + 1, masters, moments), result


def draw_anchors(
    rng: np.random.Generator, begin: Int32[np.ndarray, " B"], size: int, count: int
) -> Int32[np.ndarray, "B A"]:
    """Distinct positions of each row, ascending, that have a token behind them.

    From the last of the prompt on, which ends at `begin`; from the prompt only where there are not enough of those.
    """
    place = np.arange(size - 1)[None]
    order = rng.random((len(begin), size - 1)) + (place < begin[:, None] - 1)
    return np.sort(np.argsort(order, axis=1)[:, :count], axis=1).astype(np.int32)


@jax.jit
def _select(memory: Text, chosen: Int32[Array, " B"]) -> Text:
    return jax.tree.map(lambda array: array[chosen], memory)


class Shelf:
    """Texts of one length, and what the target makes of them."""

    PARTS = 32
    """Calls of `read` whose results are kept together: a step takes its texts from one such chunk."""

    def __init__(self, model: Model, config: DSparkConfig, texts: Texts, recipe: Recipe, longest: int) -> None:
        self._model, self._config, self.texts = model, config, texts
        self._size = texts.ids.shape[1]
        self._rows = recipe.rows * longest // self._size
        self._anchors = max(1, recipe.anchors * self._size // longest)
        self._memory = [self._remember(i) for i in self._firsts] if recipe.resident else []

    @property
    def tokens(self) -> int:
        """Tokens that the target wrote."""
        return int((self._size - self.texts.begin).sum())

    @property
    def _firsts(self) -> range:
        return range(0, len(self.texts.ids), self._rows * self.PARTS)

    def _read(self, ids: Int32[np.ndarray, "B S"]) -> Text:
        return read(self._model.graph, self._model.leaves, self._config, jnp.asarray(ids, jnp.int32))

    def _remember(self, first: int) -> Text:
        """What `read` gives for the chunk at `first`; waits for it, so that only one is joined at a time."""
        ids = self.texts.ids[first : first + self._rows * self.PARTS]
        padded = np.concatenate([ids, np.zeros((-len(ids) % self._rows, self._size), np.int32)])
        parts = [self._read(padded[i : i + self._rows]) for i in range(0, len(padded), self._rows)]
        return jax.block_until_ready(jax.tree.map(lambda *a: jnp.concatenate(a)[: len(ids)], *parts))

    def batch(self, rng: np.random.Generator) -> tuple[Text, Int32[Array, "B A"]]:
        """Random texts and anchors of a step."""
        if self._memory:
            sizes = np.array([len(chunk.ids) for chunk in self._memory])
            chunk = int(rng.choice(len(sizes), p=sizes / sizes.sum()))
            chosen = rng.integers(0, sizes[chunk], self._rows)
            text = _select(self._memory[chunk], jnp.asarray(chosen, jnp.int32))
            begin = self.texts.begin[self._firsts[chunk] + chosen]
        else:
            ids, begin = self.texts.take(rng.integers(0, len(self.texts.ids), self._rows))
            text = self._read(ids)
        return text, jnp.asarray(draw_anchors(rng, begin, self._size, self._anchors))


def _shelves(
    model: Model, config: DSparkConfig, texts: Sequence[Texts], recipe: Recipe
) -> tuple[list[Shelf], Float[np.ndarray, " n"]]:
    """Texts by length, and how often a step is on each: as much of its tokens were written."""
    longest = max(part.ids.shape[1] for part in texts)
    shelves = [Shelf(model, config, part, recipe, longest) for part in texts]
    share = np.array([shelf.tokens for shelf in shelves], np.float64)
    return shelves, share / share.sum()


def train(
    model: Model,
    config: DSparkConfig,
    state: DraftState,
    texts: Callable[[int], Sequence[Texts]],
    recipe: Recipe,
) -> Iterator[tuple[DraftState, DraftLosses]]:
    """Steps from `state` to `recipe.steps`, each on texts of one length; `texts` gives those of a round, from 0 on.

    What a step draws depends on its number alone, so a run may resume.
    """
    begin, first = time.monotonic(), int(state.step)
    held = first * recipe.rounds // recipe.steps
    shelves, share = _shelves(model, config, texts(held), recipe)
    ready = time.monotonic()
    left = None if recipe.seconds is None else max(1e-3, recipe.seconds - (ready - begin))
    for step in range(first, recipe.steps):
        place = max(step, int((time.monotonic() - ready) / left * recipe.steps) if left else 0)
        if place >= recipe.steps:
            return
        if held != (held := place * recipe.rounds // recipe.steps):
            shelves = []  # makes room first
            shelves, share = _shelves(model, config, texts(held), recipe)
        rng = np.random.default_rng((recipe.seed, step))
        text, anchors = shelves[int(rng.choice(len(shelves), p=share))].batch(rng)
        rate = jnp.float32(learning_rate(place, recipe.steps, recipe.peak))
        state, result = train_step(config, recipe.objective, model.graph, model.leaves, state, text, anchors, rate)
        yield state, result
