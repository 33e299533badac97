"""The target writes what its draft is trained on: large batches, sampled on the device without a host in the loop."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from k3jax.cache import K3Cache, Rows
from k3jax.generation import buckets
from k3jax.runtime import Model
from k3jax.step import Graph, Prefill, prefill

STEPS = 32
"""Tokens of every row per call of the compiled program."""
PREFILLED = 1024
"""Rows whose prompts are read at a time."""


class Texts(NamedTuple):
    """Texts of one length; the target wrote them from position `begin` on."""

    ids: Int32[np.ndarray, "N S"]
    begin: Int32[np.ndarray, " N"]

    def take(self, chosen: Int[np.ndarray, " B"]) -> "Texts":
        """Some of them."""
        return Texts(self.ids[chosen], self.begin[chosen])


def join(parts: list[Texts]) -> Texts:
    """Texts of one length as one."""
    return Texts(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


@jax.jit
def draw(logits: Float[Array, "B V"], key: Array) -> Int32[Array, " B"]:
    """A token of each row at temperature 1."""
    return jax.random.categorical(key, logits).astype(jnp.int32)


class Writing(NamedTuple):
    """Rows that are being written."""

    cache: K3Cache
    rows: Rows
    token: Int32[Array, " B"]
    """Drawn last, not yet in the cache."""


@functools.partial(jax.jit, static_argnames=("graph", "steps"), donate_argnames="writing")
def go_on(
    graph: Graph, leaves: tuple[Array, ...], writing: Writing, key: Array, steps: int = STEPS
) -> tuple[Writing, Int32[Array, "steps B"]]:
    """The next `steps` tokens of each row at temperature 1. Donates `writing`."""
    model = graph.merge(leaves)

    def one(writing: Writing, key: Array) -> tuple[Writing, Array]:
        output = model(writing.token[:, None], writing.rows, writing.cache)
        token = draw(model.logits(output.hidden[:, 0]), key)
        assert output.cache is not None
        return Writing(output.cache, writing.rows.advance(), token), token

    return jax.lax.scan(one, writing, jax.random.split(key, steps))


def write(model: Model, prompts: Int32[np.ndarray, "N P"], length: int, seed: int) -> Texts:
    """Continues each prompt to `length` tokens, all of them at a time; ends of documents do not stop a text."""
    count, begin = prompts.shape
    width = -(-length // buckets.PAGE_SIZE)
    table = np.arange(1, count * width + 1, dtype=np.int32).reshape(count, width)
    slots = np.arange(1, count + 1, dtype=np.int32)
    cache, logits = model.new_cache(count, count * width), []
    for first in range(0, count, PREFILLED):
        part = slice(first, first + PREFILLED)
        new, cache = _prefill(model, cache, slots[part], table[part], prompts[part])
        logits.append(new)
    rows = model.place(Rows(slots, table, np.full(count, begin, np.int32), np.ones(count, np.int32)))
    key = jax.random.key(seed)
    writing = Writing(cache, rows, draw(jnp.concatenate(logits), key))
    written = [jnp.array(writing.token[None])]  # a copy: the writing is given away
    # The last call may go past the end: what it makes of positions behind `length` is dropped.
    for place in range(begin + 1, length, STEPS):
        writing, tokens = go_on(model.graph, model.leaves, writing, jax.random.fold_in(key, place))
        written.append(tokens)
    ids = np.concatenate([prompts, np.asarray(jnp.concatenate(written)).T], axis=1)[:, :length]
    return Texts(ids.astype(np.int32), np.full(count, begin, np.int32))


def _prefill(
    model: Model,
    cache: K3Cache,
    slots: Int32[np.ndarray, " B"],
    table: Int32[np.ndarray, "B W"],
    prompts: Int32[np.ndarray, "B P"],
) -> Prefill:
    """Logits after the prompts of some rows, chunk by chunk. Donates the cache."""
    size = buckets.CHUNKS[0]
    output = None
    for start in range(0, prompts.shape[1], size):
        piece = prompts[:, start : start + size]
        counts = np.full(len(piece), start, np.int32), np.full(len(piece), piece.shape[1], np.int32)
        ids = np.pad(piece, ((0, 0), (0, size - piece.shape[1])))
        rows, ids = model.place((Rows(slots, table, *counts), ids))
        output = prefill(model.graph, model.leaves, cache, rows, ids)
        cache = output.cache
    assert output is not None, "a prompt has at least one token"
    return output
