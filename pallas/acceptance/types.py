"""What acceptance takes and gives."""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

Rule = Literal["standard", "block"]


class Requests(NamedTuple):
    """What each row of a batch asks for."""

    temperature: Float32[Array, " B"]
    repetition: Float32[Array, " B"]
    frequency: Float32[Array, " B"]
    presence: Float32[Array, " B"]
    seed: UInt32[Array, " B"]
    stop_ids: Int32[Array, "B S"]
    """Filled with -1."""


class Seen(NamedTuple):
    """What each row has seen, and how far it is."""

    prompt: Bool[Array, "B V"]
    """Tokens of the prompt."""
    count: Int32[Array, "B V"]
    """Occurrences in the output."""
    position: Int32[Array, " B"]
    """Of the anchor: with the seed, what all noise is keyed by."""
    running: Int32[Array, " B"]
    """1 for rows that run."""
    remaining: Int32[Array, " B"]
    """Tokens that may still be emitted."""
    limit: Int32[Array, " B"]
    """Drafts that may stand."""


class Stands(NamedTuple):
    """What is emitted."""

    token: Int32[Array, "B W"]
    """The drafts, but for the token that follows those that stand."""
    logprob: Float32[Array, "B W"]
    """Of each token, under the model itself."""
    count: Int32[Array, " B"]
    """Tokens emitted."""
    accepted: Int32[Array, " B"]
    """Drafts that stand, before stops and limits."""
    finite: Bool[Array, " B"]
    """False where a running row's logits are not all finite."""
    verified: Int32[Array, " B"]
    """Drafts that could have stood."""
    goes_on: Bool[Array, " B"]
    """Rows that run on."""
    running: Int32[Array, " B"]
    """The same as 1 and 0."""
    position: Int32[Array, " B"]
    """Of the next anchor."""
    remaining: Int32[Array, " B"]
    """Tokens that may still be emitted afterwards."""
    anchor: Int32[Array, " B"]
    """The last token that is emitted, the next anchor."""


def shapes(batch: int, width: int) -> Stands:
    """What `judge` gives."""
    row = functools.partial(jax.ShapeDtypeStruct, (batch,))
    block = functools.partial(jax.ShapeDtypeStruct, (batch, width))
    return Stands(
        token=block(jnp.int32),
        logprob=block(jnp.float32),
        count=row(jnp.int32),
        accepted=row(jnp.int32),
        finite=row(jnp.bool_),
        verified=row(jnp.int32),
        goes_on=row(jnp.bool_),
        running=row(jnp.int32),
        position=row(jnp.int32),
        remaining=row(jnp.int32),
        anchor=row(jnp.int32),
    )
