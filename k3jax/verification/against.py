"""A model in a narrow dtype against the portable float32 forms of the same checkpoint.

What rounding alone costs depends on the weights, so no fixed tolerance means much in bfloat16. Here the portable forms
run in the narrow dtype as well, and the model may be at most `RATIO` times as far from float32 as they are. All three
follow the experts that float32 chooses, so that one near tie does not decide the outcome.

A few tokens are far off in any narrow run, and others in each, so that one token decides a root mean square of many: of
twelve prompts on random weights of K3's width it put the ratio of one and the same model between 0.8 and 4.3 (median
1.1). Compared are therefore geometric means of the errors of all tokens, for states of all heads, over several prompts.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Float, Int

from k3jax.generation import buckets
from k3jax.runtime import Model
from k3jax.states import as_float, kda_states
from k3jax.verification.compare import Comparison, relative_rms
from k3jax.verification.observe import Progress

RATIO = 1.5
"""How much further from float32 than the portable forms in the same dtype."""
PROMPTS = 12
TOKENS, CUT, DECODED = 150, 83, 24
"""Tokens in all calls of many, how many are in the first, and tokens fed one at a time; nothing falls on a chunk."""

Choices = Int[np.ndarray, "moe_layers _ k"]
Vectors = Float[np.ndarray, "n width"]
"""What is compared as one: the logits of a token, the state of a head."""


def run(model: Model, portable: Model, reference: Model) -> Iterator[Comparison]:
    """One comparison per quantity; `portable` has the model's dtype, `reference` is float32."""
    rng = np.random.default_rng(0)
    seen = [
        _three(model, portable, reference, rng.integers(0, model.config.vocab_size, TOKENS + DECODED).tolist())
        for _ in range(PROMPTS)
    ]
    for name in seen[0][0]:
        yield judge(name, *(np.concatenate([prompt[of][name] for prompt in seen]) for of in range(3)))


def _three(model: Model, portable: Model, reference: Model, ids: list[int]) -> list[dict[str, Vectors]]:
    """What the model, the portable forms and the reference make of a prompt."""
    theirs, choices = follow(reference, ids, None)
    with ThreadPoolExecutor(2) as pool:  # most of the time goes into compiling
        (ours, _), (least, _) = pool.map(lambda narrow: follow(narrow, ids, choices), (model, portable))
    return [ours, least, theirs]


def judge(name: str, ours: Vectors, least: Vectors, theirs: Vectors) -> Comparison:
    """`ours` passes when its error is at most `RATIO` times that of `least`."""
    error, bound = mean_error(ours, theirs), mean_error(least, theirs)
    rms = relative_rms(ours, theirs) / max(relative_rms(least, theirs), 1e-12)
    detail = f"portable {bound:.2e}, ratio {error / max(bound, 1e-12):.2f} (of all {len(ours)} together {rms:.2f})"
    return Comparison(name, error, detail, bool(np.isfinite(bound) and error <= RATIO * bound))


def mean_error(ours: Vectors, theirs: Vectors) -> float:
    """Geometric mean of the vectors' relative RMS; infinite when any of them holds a NaN or an infinity."""
    errors = [relative_rms(one, other) for one, other in zip(ours, theirs, strict=True)]
    return float(np.exp(np.mean(np.log(np.maximum(errors, 1e-12)))))


def follow(model: Model, ids: Sequence[int], choices: list[Choices] | None) -> tuple[dict[str, Vectors], list[Choices]]:
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
    states = {
        f"kda_state.{layer}": state.reshape(len(state), -1) for layer, state in kda_states(progress.cache).items()
    }
    return {"logits": many, "decode_logits": few, **states}, choices or used
