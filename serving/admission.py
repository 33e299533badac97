"""Who runs next: fair queues, and budgets of pages and prefill work for each class of requests.

A request belongs to the first class whose limit its prompt does not exceed. A class may hold its share of the pages
(one request may exceed it if it is the only one of its class), so that a few very long requests cannot take the whole
memory; and prefill is divided among the classes with work in proportion to their weights, so that short prompts pass
long ones without stopping them.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator
from collections.abc import Sequence as Listing

from serving.request import QueueFull
from serving.sequence import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """Requests of similar length."""

    name: str
    longest: int | float
    """Prompt tokens that still belong to the class."""
    page_share: int | float
    """Part of all pages that the class may reserve."""
    prefill_weight: int | float
    """Relative share of prefill while other classes have work too."""


CLASSES = (
    RequestClass(name="short", longest=8192, page_share=1.0, prefill_weight=6.0),
    RequestClass(name="long", longest=131072, page_share=0.8, prefill_weight=3.0),
    RequestClass(name="ultra-long", longest=math.inf, page_share=0.5, prefill_weight=1.0),
)


def classify(classes: Listing[RequestClass], tokens: int) -> RequestClass:
    """The class of a prompt of `tokens` tokens."""
    return next(kind for kind in classes if tokens <= kind.longest)


class FairShare:
    """Virtual time: work done over weight. Who is least ahead goes first; idle time earns no credit."""

    def __init__(self) -> None:
        self._time: dict[str, int | float] = {}
        self._now = 0.0

    def join(self, name: str) -> None:
        """`name` has work again."""
        self._time[name] = max(self._time.get(name, 0.0), self._now)

    def time(self, name: str) -> float:
        """How far ahead `name` is."""
        return self._time.get(name, self._now)

    def charge(self, name: str, work: int | float) -> None:
        """`name` has been served."""
        start = self.time(name)
        self._now = max(self._now, start)
        self._time[name] = start + work


class Budgets:
    """Pages that running requests of each class have reserved, and their share of prefill."""

    def __init__(self, classes: Listing[RequestClass], pages: int) -> None:
        if not classes or classes[-1].longest != math.inf:
            raise ValueError(
                "the last request class has a limit; expected one without, so that every prompt has a class"
            )
        self.classes = {kind.name: kind for kind in classes}
        self._pages = pages
        self._reserved: collections.Counter[str] = collections.Counter()
        self._by_sequence: dict[Sequence, int] = {}
        self._prefill = FairShare()

    def admits(self, kind: str, pages: int) -> bool:
        """Whether the class has room for a request of `pages` pages."""
        used = self._reserved[kind]
        return not used or used + pages <= self.classes[kind].page_share * self._pages

    def reserve(self, sequence: Sequence, pages: int) -> None:
        """A request starts."""
        self._by_sequence[sequence] = pages
        self._reserved[sequence.kind] += pages
        self._prefill.join(sequence.kind)

    def give_back(self, sequence: Sequence) -> None:
        """A request stops."""
        self._reserved[sequence.kind] -= self._by_sequence.pop(sequence)

    def prefilled(self, sequence: Sequence, tokens: int) -> None:
        """A chunk has been scheduled."""
        self._prefill.charge(sequence.kind, tokens / self.classes[sequence.kind].prefill_weight)

    def prefill_order(self, sequence: Sequence) -> tuple[int, float, float, int]:
        """Sort key among sequences that wait for their next chunk."""
        return (sequence.request.priority, self._prefill.time(sequence.kind), sequence.arrival, sequence.order)


class WaitingQueue:
    """Sequences by priority, tenant and class; tenants of one priority take turns by the work they were given."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._lines: dict[tuple[int, str, str], collections.deque[Sequence]] = {}
        self._shares = FairShare()
        self._sizes: dict[Sequence, int] = {}
        self._tokens = 0

    def __len__(self) -> int:
        """Waiting sequences."""
        return len(self._sizes)

    @property
    def tokens(self) -> int:
        """Tokens that wait to be prefilled."""
        return self._tokens

    def require_room(self, tokens: int) -> None:
        """Raises `QueueFull` if a request of `tokens` prompt tokens is one too many."""
        if len(self) >= self._max_requests:
            raise QueueFull(f"{len(self)} requests are waiting, the limit; try again later")
        if len(self) and self._tokens + tokens > self._max_tokens:
            raise QueueFull(f"{self._tokens} prompt tokens are waiting and {tokens} more exceed {self._max_tokens}")

    def push(self, sequence: Sequence, *, front: bool = False) -> None:
        """Adds a sequence at the end of its line, or at the front after preemption."""
        line = self._lines.setdefault(self._line(sequence), collections.deque())
        if not line:
            self._shares.join(sequence.request.turn)
        (line.appendleft if front else line.append)(sequence)
        self._sizes[sequence] = sequence.to_prefill
        self._tokens += sequence.to_prefill

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it stands."""
        key = self._line(sequence)
        line = self._lines[key]
        if line[0] is sequence:
            line.popleft()
        else:
            line.remove(sequence)
        if not line:
            del self._lines[key]
        self._tokens -= self._sizes.pop(sequence)

    def heads(self) -> Iterator[Sequence]:
        """The first of each line, in the order in which they should start."""
        order = sorted(self._lines, key=lambda key: (key[0], self._shares.time(key[1]), self._lines[key][0].rank))
        return (self._lines[key][0] for key in order if key in self._lines)

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """The sequence's tenant has been given `tokens` tokens of work."""
        self._shares.charge(sequence.request.turn, tokens)

    @staticmethod
    def _line(sequence: Sequence) -> tuple[int, str, str]:
        return sequence.request.priority, sequence.request.turn, sequence.kind
