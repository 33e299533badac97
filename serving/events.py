"""What changes in the prefix cache, for routers that follow it.

An entry is announced when pages and state both exist, since only then can it be reused: a router that counted
pages alone would send requests to a cache that cannot serve them.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from serving.hashing import Digest

Reason = Literal["memory", "non_finite", "flush"]
Tier = Literal["device", "host", "disk"]


class Stored(NamedTuple):
    """A prefix can now be reused."""

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

    Like their token ids, they are there while somebody listens: a prefix may have a million tokens.
    """
    tokens: tuple[int, ...] = ()
    """Their token ids, where the path knows them."""


class Removed(NamedTuple):
    """A prefix can no longer be reused from `tier`."""

    name: Digest
    end: int
    tier: Tier
    reason: Reason


class Events:
    """Hands events to listeners in order."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Stored | Removed], None]] = []

    @property
    def detailed(self) -> bool:
        """Whether anybody reads the details."""
        return bool(self._listeners)

    def listen(self, listener: Callable[[Stored | Removed], None]) -> Callable[[], None]:
        """Calls `listener` with every event from now on, in the engine's thread; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

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
        self._send(Stored(name, parent, start, end, tier, units, tokens))

    def removed(self, name: Digest, end: int, reason: Reason, tier: Tier = "device") -> None:
        """Withdraws a prefix."""
        self._send(Removed(name, end, tier, reason))

    def _send(self, event: Stored | Removed) -> None:
        for listener in tuple(self._listeners):
            listener(event)
