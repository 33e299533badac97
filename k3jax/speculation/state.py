"""What a speculative step changes, and what it says."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from k3jax import sampling
from k3jax.cache import K3Cache, Leaf, Rows
from k3jax.speculation.drafters import Context


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class SpeculativeState:
    """Everything that changes from step to step."""

    cache: K3Cache
    context: Context
    """The drafter's."""
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
    """False where a running row's logits held a NaN or an infinity; such a row ends with one meaningless token."""
    verified: Int32[Array, " B"]
    """Drafts that could have stood: all of them, unless the width is chosen or a mask ends the row's block."""
    top: Int32[Array, "B W C"] | None = None
    """`logprobs.alternatives` of each token, where they were asked for."""


class Written(NamedTuple):
    """Tokens of a whole generation, collected on the device."""

    token: Int32[Array, "B L"]
    count: Int32[Array, " B"]
    accepted: Int32[Array, " B"]
    """Drafts that stood."""
    steps: Int32[Array, ""]

    def append(self, block: Block) -> "Written":
        """With one more block; tokens beyond the end are dropped."""
        width = block.token.shape[1]
        column = jnp.arange(width, dtype=jnp.int32)[None]
        target = jnp.where(column < block.count[:, None], self.count[:, None] + column, self.token.shape[1])
        row = jnp.broadcast_to(jnp.arange(block.token.shape[0], dtype=jnp.int32)[:, None], target.shape)
        token = self.token.at[row, target].set(block.token, mode="drop")
        return Written(token, self.count + block.count, self.accepted + block.accepted, self.steps + 1)
