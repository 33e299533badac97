"""What a generation leaves behind: what was said, why it ended, and how long it took."""

import dataclasses
from typing import Any, Literal

FinishReason = Literal["stop", "length", "error"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row's outcome."""

    prompt_tokens: int
    ids: list[int]
    """Every sampled token, the one that stopped it included."""
    logprobs: list[float]
    """Log-probability of each token under the model, before penalties and temperature."""
    text: str | None
    """None without a tokenizer. Ends before a stop string."""
    finish_reason: FinishReason
    """'stop': a stop id or stop string; 'length': max_tokens or the cache; 'error': see `error`."""
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Times of one `generate` call, in seconds, and sizes, in bytes. Compilation is counted on its own."""

    prompt_tokens: int
    completion_tokens: int
    first_tokens: int
    """Those of them that came from the prefill: one per row."""
    steps: int
    """Decode steps after the first token."""
    row_steps: int
    """The same, counted once for every row that was running."""
    accepted: tuple[int, ...]
    """How many of these ended with 0, 1, 2, ... drafts that stood, before stops and limits."""
    first_token_seconds: float
    """From the call to the first token on the host, compilation included."""
    prefill_seconds: float
    """The same without compilation."""
    decode_seconds: float
    compile_seconds: float
    compilations: int
    weight_bytes: int
    cache_bytes: int
    """KDA states, convolution windows and latent pages of all rows."""

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens of all rows per second of prefill."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def milliseconds_per_step(self) -> float:
        """Time of one decode step, which gives every running row a token, or several with a draft; 0 without steps."""
        return 1e3 * self.decode_seconds / self.steps if self.steps else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a running row got per step: 1 without a draft, its acceptance length with one."""
        rows = self.first_tokens
        return (self.completion_tokens - rows) / self.row_steps if self.row_steps else 1.0

    @property
    def milliseconds_per_token(self) -> float:
        """Time from one token of a row to its next."""
        return self.milliseconds_per_step / self.tokens_per_step

    @property
    def survival(self) -> tuple[float, ...]:
        """Chance that the first, second, ... draft of a step stands; up to the last one that ever did."""
        at_least = [sum(self.accepted[place:]) for place in range(1, len(self.accepted))]
        return tuple(count / self.row_steps for count in at_least)

    @property
    def acceptance_length(self) -> float:
        """Tokens that a step gives a row when nothing ends it: one more than the drafts that stand."""
        return 1.0 + sum(self.survival)

    def summary(self) -> dict[str, Any]:
        """All figures by name, rates included."""
        rates = {
            "prefill_tokens_per_second": round(self.prefill_tokens_per_second, 1),
            "milliseconds_per_token": round(self.milliseconds_per_token, 3),
            "tokens_per_step": round(self.tokens_per_step, 3),
            "acceptance_length": round(self.acceptance_length, 3),
            "survival": [round(chance, 4) for chance in self.survival],
        }
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()} | rates
