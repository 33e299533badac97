"""A request on its way through the engine."""

import dataclasses
import enum

from serving.hashing import Path
from serving.prefix_cache import Hit
from serving.prefix_tree import Node
from serving.request import Final, FinishReason, Output, Request


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
    cached_tokens: int = -1
    preemptions: int = 0
    started: int | float = -1.0
    first_token: int | float = -1.0

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
        """Whether another token is to be sampled."""
        return self.phase is Phase.DECODE and self.sampled < self.request.max_tokens

    def ids(self, start: int, end: int) -> list[int]:
        """Known tokens `start` to `end`."""
        prompt = self.prompt_tokens
        return [*self.request.tokens[start:end], *self.outputs[max(start - prompt, 0) : max(end - prompt, 0)]]

    def final(self, reason: FinishReason, now: int | float, error: str | None = None) -> Final:
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
        )

    def ending(self, reason: FinishReason, now: int | float, error: str | None = None) -> Output:
        """The last output when no token comes with it."""
        return Output(self.request.id, [], [], self.final(reason, now, error))
