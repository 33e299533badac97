"""A request on its way through the engine."""

import dataclasses
import enum
from collections.abc import Sequence as Listing

import numpy as np

from serving.hashing import Path
from serving.prefix_cache import Hit
from serving.prefix_tree import Node
from serving.request import Alternatives, DraftedConstraint, Final, FinishReason, Output, PromptLogprobs, Request


class Phase(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
    """State of one request. What it holds on the device belongs to `Holdings`."""

    request: Request
    path: Path
    arrival: int | float
    order: int
    """Number of the submission; breaks ties."""
    kind: str
    """Name of its request class."""
    id: str = dataclasses.field(init=False)
    max_tokens: int = dataclasses.field(init=False)
    stops: frozenset[int] = dataclasses.field(init=False)
    """Tokens that end the answer."""
    followed: bool = dataclasses.field(init=False)
    """Whether something of the request's own looks at each token."""
    looks_ahead: bool = dataclasses.field(init=False)
    """Whether its constraint can follow drafts."""
    plain: bool = dataclasses.field(init=False)
    """Whether the request wants nothing but tokens."""
    outputs: list[int] = dataclasses.field(default_factory=list)
    """Every sampled token that the host knows."""
    phase: Phase = Phase.WAITING

    row: int = -1
    slot: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    hit: Hit | None = None
    """The cached prefix to start from, held until the first chunk is dispatched."""
    copy: tuple[int, int] = (0, 0)
    """Page to copy, and where, before the first chunk."""

    length: int = 0
    """Tokens that the dispatched steps put into the cache."""
    sampled: int = 0
    """Output tokens that the dispatched steps sample, known or not."""
    fresh: bool = False
    """Whether its row does not have its settings yet."""
    boundaries: list[int] = dataclasses.field(default_factory=list)
    """States to leave behind, in ascending order."""
    kept: list[int] = dataclasses.field(default_factory=list)
    """Boundaries at which it has left a state in the prefix cache, or found one."""
    nodes: list[Node] = dataclasses.field(default_factory=list)
    """The entries that it has made."""
    in_flight: int = 0
    """Dispatched steps that have not been collected."""

    source: Hit | None = None
    """The prefix that it started from; purged if the sequence turns out not to be finite."""
    mask: np.ndarray | None = None
    """What the constraint allows next, as int32 words; None allows everything."""
    fault: str | None = None
    """How the constraint failed while it followed drafts; ends the request with the step's answer."""
    prompt: list[tuple[float, Alternatives]] = dataclasses.field(default_factory=list)
    """How likely the prompt's tokens were, from the second one on, as far as it has been computed."""
    prompt_told: bool = False
    """Whether that has been handed on."""
    drafted: int = 0
    accepted: int = 0
    cached_tokens: int = -1
    preemptions: int = 0
    started: int | float = -1.0
    first_token: int | float = -1.0

    def __post_init__(self) -> None:
        """Looks up once what each token asks for."""
        self.stops = frozenset(self.request.stops)
        request = self.request
        self.id, self.max_tokens = request.id, request.max_tokens
        self.followed = request.constraint is not None or request.stop_checker is not None
        self.looks_ahead = isinstance(request.constraint, DraftedConstraint)
        self.plain = not self.followed and request.logprobs is None and request.prompt_logprobs is None

    @property
    def rank(self) -> tuple[int, float, int]:
        """The lower, the more important."""
        return self.request.priority, self.arrival, self.order

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the request's prompt."""
        return len(self.request.tokens)

    @property
    def known(self) -> int:
        """Tokens of prompt and output that the host knows."""
        return len(self.request.tokens) + len(self.outputs)

    @property
    def to_prefill(self) -> int:
        """Known tokens that are not in the cache."""
        return self.known - self.length

    @property
    def wants_decode(self) -> bool:
        """Whether another token is to be sampled now. A mask depends on the token before."""
        if self.phase is not Phase.DECODE or self.sampled >= self.max_tokens:
            return False
        return self.request.constraint is None or not self.in_flight

    @property
    def wants_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt are still to be computed."""
        return self.request.prompt_logprobs is not None and not self.prompt_told

    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Those of the prompt, once."""
        if not self.wants_prompt:
            return None
        self.prompt_told = True
        known = self.prompt[: self.prompt_tokens - 1]
        count = self.request.prompt_logprobs or 0
        top = [Alternatives(best.tokens[:count], best.logprobs[:count]) for _, best in known]
        return PromptLogprobs([None, *(value for value, _ in known)], [None, *top])

    def ids(self, start: int, end: int) -> Listing[int]:
        """Known tokens `start` to `end`."""
        prompt = self.prompt_tokens
        if end <= prompt:
            return self.request.tokens[start:end]
        return [*self.request.tokens[start:end], *self.outputs[max(start - prompt, 0) : max(end - prompt, 0)]]

    def final(
        self, reason: FinishReason, now: int | float, error: str | None = None, matched: int | str | None = None
    ) -> Final:
        """The closing record."""
        return Final(
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self.outputs),
            cached_tokens=max(self.cached_tokens, 0),
            preemptions=self.preemptions,
            queued_seconds=(self.started if self.started >= 0 else now) - self.arrival,
            first_token_seconds=(self.first_token if self.first_token >= 0 else now) - self.arrival,
            total_seconds=now - self.arrival,
            error=error,
            matched=matched,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
        )

    def ending(self, reason: FinishReason, now: int | float, error: str | None = None) -> Output:
        """The last output when no token comes with it."""
        return Output(self.request.id, [], [], self.final(reason, now, error))
