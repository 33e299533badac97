"""What the target draws from: logits under a request's penalties and temperature, inside a kernel."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas.acceptance.tile import Tiles
from pallas.random_bits import GREEDY_BELOW


class Arguments(NamedTuple):
    """References that each kernel gets, as in `api.judge`; rows of `target` and `draft` follow one another."""

    width: int
    """Rows of the target for each row of the batch."""
    target: Any
    draft: Any
    token: Any
    temperature: Any
    repetition: Any
    frequency: Any
    presence: Any
    seeds: Any
    stop_ids: Any
    prompt: Any
    count: Any
    positions: Any
    running: Any
    remaining: Any
    limit: Any


class Scores:
    """One row of the batch; built inside a kernel."""

    def __init__(self, tiles: Tiles, arguments: Arguments) -> None:
        self.tiles, self.arguments = tiles, arguments
        self.row, self.width = lax.axis_index("row"), arguments.width
        self.drafts, self.vocabulary = arguments.width - 1, arguments.target.shape[-1]
        self.temperature = arguments.temperature[self.row]
        self.random = self.temperature >= GREEDY_BELOW
        self.seed = arguments.seeds[self.row]
        self.position = arguments.positions[self.row].astype(jnp.uint32)

    def target(self, row: jax.Array, place: jax.Array) -> jax.Array:
        """The target's logits; rows behind the last one repeat it."""
        return self.tiles.load(self.arguments.target, self.row * self.width + jnp.minimum(row, self.width - 1), place)

    def draft(self, row: jax.Array, place: jax.Array) -> jax.Array:
        """The draft's, likewise."""
        return self.tiles.load(self.arguments.draft, self.row * self.drafts + jnp.minimum(row, self.drafts - 1), place)

    def drafted(self) -> jax.Array:
        """The draft of each tile row."""
        row = self.tiles.row()
        return self.tiles.load(self.arguments.token, jnp.zeros_like(row) + self.row, jnp.minimum(row, self.drafts - 1))

    def score(self, target: jax.Array, row: jax.Array, place: jax.Array) -> jax.Array:
        """Logits that a softmax makes the target's distribution of; greedy rows have them as they are."""
        repetition, frequency, presence = (
            x[self.row] for x in (self.arguments.repetition, self.arguments.frequency, self.arguments.presence)
        )

        def penalised() -> jax.Array:
            own = jnp.zeros_like(place) + self.row
            said = self.tiles.load(self.arguments.count, own, place)
            for k in range(self.drafts):
                hit = (place == self.arguments.token[self.row, k]) & (row > k)
                said = said + jnp.where(hit, 1, 0)
            seen = (self.tiles.load(self.arguments.prompt, own, place).astype(jnp.int32) > 0) | (said > 0)
            repeated = target * jnp.where(target > 0, 1.0 / repetition, repetition)
            logits = jnp.where(seen, repeated, target) - frequency * said.astype(jnp.float32)
            return logits - jnp.where(said > 0, presence, 0.0)

        active = (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)
        logits = lax.cond(active, penalised, lambda: target)
        return logits * jnp.where(self.random, 1.0 / jnp.maximum(self.temperature, GREEDY_BELOW), 1.0)
