"""Trains a DSpark draft on text that its target wrote."""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from k3jax import params
from k3jax.cache import Rows
from k3jax.dspark.config import DSparkConfig
from k3jax.dspark.model import DSpark
from k3jax.dspark.tensors import draft_specs
from k3jax.runtime import Model
from k3jax.speculation.drafters import taps
from k3jax.step import Graph
from k3jax.train.draft_losses import DraftLosses, Text, losses
from k3jax.train.draft_optimizer import draft_optimizer
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
    anchors: int = 64
    """Blocks per sequence."""
    resident: bool = False
    """Runs the target once over all texts and keeps what the draft reads on the device: 3.5 kB a token for nano."""
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


@functools.partial(jax.jit, static_argnames=("config", "graph"), donate_argnames="state")
def train_step(
    config: DSparkConfig,
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
        result = losses(DSpark(config, arrays), text, anchors, embedding, head)
        return result.loss, result

    gradient, result = jax.grad(loss, has_aux=True)(state.masters)
    norm = jnp.sqrt(sum((jnp.sum(g * g) for g in jax.tree.leaves(gradient)), jnp.float32(0)))
    scale = jnp.minimum(1.0, CLIP / jnp.maximum(norm, 1e-9))
    gradient = jax.tree.map(lambda g: g * scale, gradient)
    direction, moments = draft_optimizer(config).update(gradient, state.optimizer, state.masters)
    masters = jax.tree.map(lambda master, d: master - rate * d, state.masters, direction)
    return DraftState(state.step + 1, masters, moments), result


def draw_anchors(rng: np.random.Generator, rows: int, size: int, count: int) -> Int32[np.ndarray, "B A"]:
    """Distinct positions of each row, ascending, that have a token behind them."""
    picks = [np.sort(rng.choice(size - 1, min(count, size - 1), replace=False)) for _ in range(rows)]
    return np.stack(picks).astype(np.int32)


def _read(model: Model, config: DSparkConfig, texts: Int32[np.ndarray, "B S"]) -> Text:
    return read(model.graph, model.leaves, config, jnp.asarray(texts, jnp.int32))


def remember(model: Model, config: DSparkConfig, texts: Int32[np.ndarray, "N S"], rows: int) -> Text:
    """What `read` gives for all texts, computed `rows` at a time."""
    padded = np.concatenate([texts, texts[: -len(texts) % rows]])
    parts = [_read(model, config, padded[i : i + rows]) for i in range(0, len(padded), rows)]
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays)[: len(texts)], *parts)


@jax.jit
def _select(memory: Text, chosen: Int32[Array, " B"]) -> Text:
    return jax.tree.map(lambda array: array[chosen], memory)


def train(
    model: Model, config: DSparkConfig, state: DraftState, texts: Int32[np.ndarray, "N S"], recipe: Recipe, rows: int
) -> Iterator[tuple[DraftState, DraftLosses]]:
    """Steps from `state` to `recipe.steps`; what a step draws depends on its number alone, so a run may resume."""
    begin = time.monotonic()
    memory = jax.block_until_ready(remember(model, config, texts, rows)) if recipe.resident else None
    ready = time.monotonic()
    left = None if recipe.seconds is None else max(1e-3, recipe.seconds - (ready - begin))
    for step in range(int(state.step), recipe.steps):
        share = (time.monotonic() - ready) / left if left else 0.0
        place = max(step, int(share * recipe.steps))
        if place >= recipe.steps:
            return
        rng = np.random.default_rng((recipe.seed, step))
        chosen = rng.integers(0, len(texts), rows)
        text = _select(memory, jnp.asarray(chosen, jnp.int32)) if memory else _read(model, config, texts[chosen])
        anchors = jnp.asarray(draw_anchors(rng, rows, texts.shape[1], recipe.anchors))
        rate = jnp.float32(learning_rate(place, recipe.steps, recipe.peak))
        state, result = train_step(config, model.graph, model.leaves, state, text, anchors, rate)
        yield state, result
