"""A model in a narrow dtype against the portable float32 forms of the same checkpoint.

What rounding alone costs depends on the weights, so no fixed tolerance means much in bfloat16. Here the portable forms
run in the narrow dtype as well, and the model may be at most `RATIO` times as far from float32 as they are. All three
follow the experts that float32 chooses, so that one near tie does not decide the outcome.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Int

from k3jax.generation import buckets
from k3jax.runtime import Model
from k3jax.states import as_float, kda_states
from k3jax.verification.compare import Comparison, relative_rms
from k3jax.verification.observe import Progress

RATIO = 1.5
"""How much further from float32 than the portable forms in the same dtype."""
TOKENS, CUT, DECODED = 150, 83, 6
"""Tokens in all calls of many, how many are in the first, and tokens fed one at a time; nothing falls on a chunk."""

Choices = Int[np.ndarray, "moe_layers _ k"]


def run(model: Model, portable: Model, reference: Model) -> Iterator[Comparison]:
    """One comparison per quantity; `portable` has the model's dtype, `reference` is float32."""
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, TOKENS + DECODED).tolist()
    expected, choices = follow(reference, ids, None)
    with ThreadPoolExecutor(2) as pool:  # most of the time goes into compiling
        (least, _), (ours, _) = pool.map(lambda narrow: follow(narrow, ids, choices), (portable, model))
    for name, theirs in expected.items():
        yield judge(name, ours[name], least[name], theirs)


def judge(name: str, ours: np.ndarray, least: np.ndarray, theirs: np.ndarray) -> Comparison:
    """`ours` passes when its error is at most `RATIO` times that of `least`."""
    error, bound = relative_rms(ours, theirs), relative_rms(least, theirs)
    detail = f"portable {bound:.2e}, ratio {error / max(bound, 1e-12):.2f}"
    return Comparison(name, error, detail, bool(np.isfinite(bound) and error <= RATIO * bound))


def follow(
    model: Model, ids: Sequence[int], choices: list[Choices] | None
) -> tuple[dict[str, np.ndarray], list[Choices]]:
    """Logits of every call and the KDA states after the last, and the experts of every call.

    Two calls of many tokens, the second from where the first stopped, then one token at a time.
    """
    pieces = [ids[:CUT], ids[CUT:TOKENS], *([token] for token in ids[TOKENS:])]
    size = buckets.power_of_two(CUT, buckets.CHUNKS[0])
    progress, logits, used = Progress.start(model, len(ids)), [], []
    for index, piece in enumerate(pieces):
        width = size if len(piece) > 1 else 1
        if choices is None:
            output, progress = progress.feed(piece, width, trace=True)
            routings = [layer.routing for layer in output.trace if layer.routing is not None]
            rows = [np.asarray(routing.ids)[: len(piece)] for routing in routings]
            used.append(np.stack(rows) if rows else np.zeros((0, len(piece), 0), np.int32))
        else:
            forced, progress = progress.feed_forced(piece, width, choices[index])
            output = forced.forward
        logits.append(as_float(output.logits)[0, : len(piece)])
    many, few = np.concatenate(logits[:2]), np.concatenate(logits[2:])
    states = {f"kda_state.{layer}": state for layer, state in kda_states(progress.cache).items()}
    return {"logits": many, "decode_logits": few, **states}, choices or used
