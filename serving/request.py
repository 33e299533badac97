"""What is asked of the engine, and what comes back."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from serving.hashing import ImageSpan
from serving.retention import Retention

FinishReason = Literal["stop", "length", "error", "abort", "deadline"]


class RequestError(ValueError):
    """A request that can never be served; the message names what is wrong with it."""


class QueueFull(RuntimeError):
    """The engine has as much waiting work as it accepts; try again later."""


@runtime_checkable
class Constraint(Protocol):
    """What one request may say, token by token: a grammar and where in it the request stands.

    The engine calls it in its own thread and keeps the order: `mask`, a step on the device, `advance`. A request with
    a constraint is not planned a step ahead. Where others are drafted several tokens a step it gets one, unless it is a
    `DraftedConstraint`.
    """

    @property
    def ended(self) -> bool:
        """Whether nothing may follow; the request then ends as if by a stop token."""
        ...

    def mask(self) -> np.ndarray | None:
        """What may come next, as bits: int32 or uint32 [ceil(V / 32)], token t is bit t % 32 of word t // 32.

        None allows everything. A mask without any bit ends the request with an error. The array may be used again by
        the next call.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> int:
        """The request has said `tokens`; returns how many of them the grammar takes. Fewer than all end the request."""
        ...


@runtime_checkable
class DraftedConstraint(Constraint, Protocol):
    """A constraint that can look ahead along drafted tokens, and stays where it is."""

    def draft_masks(self, tokens: Sequence[int]) -> np.ndarray:
        """The mask before each token and after the last: [len(tokens) + 1, words], as from `mask`.

        What stands behind the first token that is not allowed does not matter.
        """
        ...

    def forced_tokens(self, limit: int) -> list[int]:
        """What may come next where there is no choice, at most `limit` tokens."""
        ...


class StopMatch(NamedTuple):
    """Where a text ends."""

    tokens: int
    """How many of the tokens just fed belong to the answer."""
    text: str
    """The stop string."""


@runtime_checkable
class StopChecker(Protocol):
    """Finds stop strings in what a request says. The engine calls it in its own thread, each token once."""

    def feed(self, tokens: Sequence[int]) -> StopMatch | None:
        """Takes the next tokens; tells where the text has ended, if it has."""
        ...


class Alternatives(NamedTuple):
    """The most likely tokens at a position, best first."""

    tokens: list[int]
    logprobs: list[float]


class PromptLogprobs(NamedTuple):
    """How likely the prompt was; entry 0 stands for the first token, which nothing precedes."""

    logprobs: list[float | None]
    top: list[Alternatives | None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Request:
    """One sequence to continue. Token ids are checked when it is submitted."""

    id: str
    tokens: Sequence[int]
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the answer, whatever `ignore_eos` says."""
    eos_ids: tuple[int, ...] = ()
    """The model's own ends of a message; they end the answer unless `ignore_eos`."""
    ignore_eos: bool = False
    min_tokens: int = 0
    """No stop token is sampled before so many tokens have been said."""
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of `k3jax.sampling.Sampling`, one value each: temperature, top_k, top_p, min_p, the penalties, seed."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Added to the logits of these tokens."""
    logprobs: int | None = None
    """How many alternatives are reported with each token; the token's own log-probability always is."""
    prompt_logprobs: int | None = None
    """The same for the prompt, which is then computed as a whole: nothing is taken from the prefix cache."""
    constraint: Constraint | None = None
    stop_checker: StopChecker | None = None
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
    session: str | None = None
    """A conversation; with `pin_seconds`, the states that it leaves replace those that it pinned before."""
    pin_seconds: int | float = 0.0
    """For how long the states that the request leaves are evicted after all others."""

    def __repr__(self) -> str:
        """What differs from the defaults, short enough to be logged however long the prompt is."""
        texts = [f"id={self.id!r}", f"tokens=<{len(self.tokens)}>"]
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            if value not in (field.default, None, (), {}):
                texts.append(f"{field.name}={value!r:.40}")
        return f"Request({', '.join(texts)})"

    @property
    def stops(self) -> tuple[int, ...]:
        """All tokens that end the answer."""
        return self.stop_ids if self.ignore_eos else tuple(dict.fromkeys((*self.stop_ids, *self.eos_ids)))

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
    matched: int | str | None = None
    """The stop token or stop string that ended the answer."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Drafted tokens that stood."""


class Output(NamedTuple):
    """News of one request: tokens in order, without gaps; the last one carries the final record."""

    id: str
    tokens: list[int]
    logprobs: list[float]
    final: Final | None = None
    top_logprobs: list[Alternatives] | None = None
    """One entry per token, where the request asked for them."""
    prompt_logprobs: PromptLogprobs | None = None
    """With the first token, where the request asked for them."""
