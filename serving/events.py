"""What changes in the prefix cache, for routers that follow it.

An entry is announced when pages and state both exist, since only then can it be reused: a router that counted
pages alone would send requests to a cache that cannot serve them.
"""

import collections
import itertools
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from serving.hashing import Digest

Reason = Literal["memory", "non_finite", "flush"]
Tier = Literal["device", "host", "disk"]


class Stored(NamedTuple):
    """A prefix can now be reused."""

    sequence: int
    name: Digest
    """Digest of the prefix."""
    parent: Digest
    """Digest of the nearest shorter prefix that can be reused; None when there is none."""
    start: int
    """Tokens of that shorter prefix."""
    end: int
    tier: Tier
    units: tuple[Digest, ...] = ()
    """Digests of the whole hash units from the one in which `start` lies to `end`.

    Like their token ids, they are there once somebody has listened: a prefix may have a million tokens.
    """
    tokens: tuple[int, ...] = ()
    """Their token ids, where the path knows them."""


class Removed(NamedTuple):
    """A prefix can no longer be reused from `tier`."""

    sequence: int
    name: Digest
    end: int
    tier: Tier
    reason: Reason


class Events:
    """Numbers the events, keeps the latest ones, and hands them to listeners in order."""

    def __init__(self, keep: int = 1024) -> None:
        self._latest: collections.deque[Stored | Removed] = collections.deque(maxlen=keep)
        self._listeners: list[Callable[[Stored | Removed], None]] = []
        self._sequence = itertools.count()
        self.detailed = False
        """Whether anybody has ever listened."""

    def listen(self, listener: Callable[[Stored | Removed], None]) -> Callable[[], None]:
        """Calls `listener` with every event from now on, in the engine's thread; returns what ends that."""
        self._listeners.append(listener)
        self.detailed = True
        return lambda: self._listeners.remove(listener)

    def since(self, sequence: int) -> Iterator[Stored | Removed]:
        """The kept events numbered `sequence` or higher; a gap means that older ones are gone."""
        return (event for event in self._latest if event.sequence >= sequence)

    def stored(
        self,
        name: Digest,
        parent: Digest,
        start: int,
        end: int,
        tier: Tier = "device",
        units: tuple[Digest, ...] = (),
        tokens: tuple[int, ...] = (),
    ) -> None:
        """Announces a prefix; the arguments are the fields of `Stored`."""
        self._send(Stored(next(self._sequence), name, parent, start, end, tier, units, tokens))

    def removed(self, name: Digest, end: int, reason: Reason, tier: Tier = "device") -> None:
        """Withdraws a prefix."""
        self._send(Removed(next(self._sequence), name, end, tier, reason))

    def _send(self, event: Stored | Removed) -> None:
        self._latest.append(event)
        for listener in tuple(self._listeners):
            listener(event)
