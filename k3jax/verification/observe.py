"""Runs one sequence through the cache and collects its states."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from k3jax import step
from k3jax.cache import K3Cache, Rows
from k3jax.generation import buckets
from k3jax.runtime import Model
from k3jax.states import States, as_float, conv_states, kda_states, latents
from k3jax.verification.forced_routing import Forced, extend_forced


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """One sequence in slot 1 and pages 1, 2, ..., fed in calls of any length."""

    model: Model
    cache: K3Cache
    rows: Rows

    @classmethod
    def start(cls, model: Model, tokens: int) -> "Progress":
        """An empty sequence with room for `tokens`."""
        width = -(-tokens // buckets.PAGE_SIZE)
        rows = Rows(*(np.asarray(v, np.int32) for v in ([1], [range(1, width + 1)], [0], [0])))
        return cls(model, model.new_cache(1, width), rows)

    def feed(self, ids: Sequence[int], size: int, *, trace: bool = False) -> tuple[step.Forward, "Progress"]:
        """Runs `ids`, padded to `size` tokens. Donates the cache."""
        output = step.extend(self.model.graph, self.model.leaves, self.cache, *self._inputs(ids, size), trace=trace)
        return output, self._after(output, len(ids))

    def feed_forced(
        self, ids: Sequence[int], size: int, experts: Int[np.ndarray, "moe_layers T k"]
    ) -> tuple[Forced, "Progress"]:
        """`feed` with every token routed to the given experts. Donates the cache."""
        padded = np.tile(np.arange(experts.shape[2], dtype=np.int32), (experts.shape[0], size, 1))
        padded[:, : len(ids)] = experts
        choices = self.model.place(tuple(padded))
        output = extend_forced(self.model.graph, self.model.leaves, self.cache, *self._inputs(ids, size), choices)
        return output, self._after(output.forward, len(ids))

    def _inputs(self, ids: Sequence[int], size: int) -> tuple[Rows, Any]:
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(ids)] = ids
        rows = dataclasses.replace(self.rows, query_length=np.asarray([len(ids)], np.int32))
        return self.model.place((rows, padded))

    def _after(self, output: step.Forward, tokens: int) -> "Progress":
        assert output.cache is not None
        return Progress(self.model, output.cache, dataclasses.replace(self.rows, length=self.rows.length + tokens))


def observe(
    model: Model, ids: Sequence[int], decode_ids: Sequence[int] = (), *, size: int = 0, room: int = 0
) -> States:
    """Runs `ids` in one call and then `decode_ids` one at a time; the ids must have been checked.

    `size` and `room` are the padded length and the tokens of cache, so that several prompts share one program.
    """
    size = size or buckets.power_of_two(len(ids), buckets.CHUNKS[0])
    output, progress = Progress.start(model, max(room, len(ids) + len(decode_ids))).feed(ids, size, trace=True)
    return _collect(output, progress, len(ids), decode_ids)


def observe_forced(
    model: Model,
    ids: Sequence[int],
    experts: Int[np.ndarray, "moe_layers T k"],
    decode_ids: Sequence[int] = (),
    *,
    size: int,
    room: int,
) -> tuple[States, Float[np.ndarray, "moe_layers T E"]]:
    """`observe` with the prompt routed to `experts`, and the scores by which each router would have chosen."""
    progress = Progress.start(model, room)
    output, progress = progress.feed_forced(ids, size, experts)
    scores = np.stack([np.asarray(layer)[: len(ids)] for layer in output.scores])
    return _collect(output.forward, progress, len(ids), decode_ids), scores


def _collect(output: step.Forward, progress: Progress, tokens: int, decode_ids: Sequence[int]) -> States:
    prompt = _prompt_states(output, progress.cache, tokens)
    logits, cache = feed_each(progress, decode_ids)
    return States(
        **prompt,
        decode_logits=logits,
        kda_state_after_decode=kda_states(cache),
        conv_state_after_decode=conv_states(cache),
    )


def in_chunks(
    model: Model,
    ids: Sequence[int],
    chunk: int,
    *,
    size: int,
    room: int,
    experts: Int[np.ndarray, "moe_layers T k"] | None = None,
) -> tuple[Float[np.ndarray, "T V"], K3Cache]:
    """Logits of all positions and the cache when `ids` go through it in pieces of at most `chunk` tokens.

    A prompt that one piece would hold goes in two. The pieces are padded to `size`, so that they run through the
    program of the whole prompt. `experts` forces the routing.
    """
    piece = max(1, min(chunk, (len(ids) + 1) // 2))
    progress, logits = Progress.start(model, room), []
    for start in range(0, len(ids), piece):
        part = ids[start : start + piece]
        if experts is None:
            output, progress = progress.feed(part, size, trace=True)
        else:
            forced, progress = progress.feed_forced(part, size, experts[:, start : start + piece])
            output = forced.forward
        logits.append(np.asarray(output.logits)[0, : len(part)])
    return np.concatenate(logits), progress.cache


def feed_each(progress: Progress, ids: Sequence[int]) -> tuple[Float[np.ndarray, "N V"], K3Cache]:
    """Logits after each of `ids`, fed one at a time, and the cache after the last."""
    rows: list[np.ndarray] = []
    for token in ids:
        output, progress = progress.feed([token], 1)
        rows.append(np.asarray(output.logits)[0, 0])
    vocab = progress.model.config.vocab_size
    return np.stack(rows) if rows else np.zeros((0, vocab), np.float32), progress.cache


def _prompt_states(output: step.Forward, cache: K3Cache, tokens: int) -> dict[str, Any]:
    routings = [layer.routing for layer in output.trace if layer.routing is not None]

    def routed(pick: Callable[[Any], Any], dtype: type) -> np.ndarray:
        layers = [np.asarray(pick(routing))[:tokens] for routing in routings]
        return np.stack(layers) if layers else np.zeros((0, tokens, 0), dtype)

    return {
        "logits": np.asarray(output.logits)[0, :tokens],
        "layer_prefix": np.stack([as_float(layer.prefix)[0, :tokens] for layer in output.trace]),
        "router_ids": routed(lambda routing: routing.ids, np.int32),
        "router_weights": routed(lambda routing: routing.weights, np.float32),
        "kda_state": kda_states(cache),
        "conv_state": conv_states(cache),
        "latent": latents(cache, tokens),
    }
