"""What a draft gains: the same model without it, timed in the same run."""

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3jax.generation.prompt import Prompt
    from k3jax.generation.results import Statistics
    from k3jax.runtime import Model


def plain(model: "Model", prompt: "Prompt", tokens: int, **sampling: Any) -> "Statistics":
    """Statistics of decoding `tokens` tokens after `prompt` one at a time. What is said is dropped."""
    from k3jax import api

    assert model.draft is not None
    alone = dataclasses.replace(model, draft=model.draft._replace(idle=True))
    stream = api.generate(alone, prompt, max_tokens=tokens, ignore_eos=True, as_ids=True, **sampling)
    return stream.statistics


def ratio(drafted: "Statistics", alone: "Statistics") -> float | None:
    """How many times faster a token came with the draft; None where either run had no step to time."""
    if not (drafted.steps and alone.steps and drafted.decode_seconds > 0):
        return None
    return alone.milliseconds_per_token / drafted.milliseconds_per_token


def lines(drafted: "Statistics", alone: "Statistics") -> list[str]:
    """The draft's part of a table: acceptance length, survival by position, speed-up."""
    survival = " ".join(f"{chance:.0%}" for chance in drafted.survival) or "none stood"
    gain = ratio(drafted, alone)
    measured = "nothing to time" if gain is None else f"{gain:.2f} x plain decoding"
    return [
        f"acceptance   {drafted.acceptance_length:.2f} tokens per step unless something ends it",
        f"survival     {survival}, by position of the draft",
        f"speed-up     {measured} ({alone.milliseconds_per_token:.2f} ms/token for {alone.completion_tokens} tokens)",
    ]
