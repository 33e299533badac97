"""What is asked of the engine, and what comes back."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from serving.hashing import ImageSpan
from serving.retention import Retention

FinishReason = Literal["stop", "length", "error", "abort", "deadline"]


class RequestError(ValueError):
    """A request that can never be served; the message names what is wrong with it."""


class QueueFull(RuntimeError):
    """The engine has as much waiting work as it accepts; try again later."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to continue. Token ids are checked when it is submitted."""

    id: str
    tokens: Sequence[int]
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of `k3jax.sampling.Sampling`, one value each."""
    salt: str = ""
    """Prefixes are shared among requests of one salt only."""
    tenant: str | None = None
    """Whose turn it is in the queue; the salt when None."""
    priority: int = 0
    """Lower ones go first, and may push higher ones out of the batch."""
    deadline: int | float | None = None
    """When the answer is of no use any more, on the engine's clock (seconds)."""
    images: tuple[ImageSpan, ...] = ()
    retention: Retention | None = None
    """Overrides the engine's policy."""

    @property
    def turn(self) -> str:
        """The tenant that pays for the request."""
        return self.salt if self.tenant is None else self.tenant

    @property
    def longest(self) -> int:
        """Tokens that the cache may have to hold: the last one sampled is never stored."""
        return len(self.tokens) + self.max_tokens - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """How a request ended."""

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that were taken from the prefix cache when the request first ran."""
    preemptions: int
    queued_seconds: int | float
    """From submission to the first chunk."""
    first_token_seconds: int | float
    """From submission to the first token; the whole time when there was none."""
    total_seconds: int | float
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """News of one request: tokens in order, without gaps; the last one carries the final record."""

    id: str
    tokens: list[int]
    logprobs: list[float]
    final: Final | None = None
