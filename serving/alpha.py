"""The weight of efficiency against recency, tuned while the engine runs (Marconi, arXiv 2411.19379, section 4.2).

From the first eviction on, a window of requests is recorded. It is then replayed through trees without memory behind
them, one for each candidate, and the candidate that would have saved the most FLOPs wins; then the next window begins.
The replay is cut into single requests, so that no step of the engine waits for it.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from serving.costs import ModelCost
from serving.hashing import Path
from serving.prefix_cache import CacheOptions, PrefixCache

REST = 31
"""Windows between two that are replayed, at most."""

CANDIDATES = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Visit:
    """A request as the cache saw it."""

    path: Path
    tokens: int
    """Of the prompt."""
    boundaries: tuple[int, ...]
    """Where states were left, in ascending order; those at the end of decoding may exceed `tokens`."""
    time: int | float


class AlphaTuner:
    """Records windows of visits and chooses alpha for the next one."""

    def __init__(
        self,
        options: CacheOptions,
        cost: ModelCost,
        *,
        window: int = 256,
        candidates: Sequence[int | float] = CANDIDATES,
    ) -> None:
        self._options, self._cost = options, cost
        self._window, self._candidates = window, tuple(candidates)
        self._visits: list[Visit] = []
        self._replay: Iterator[None] | None = None
        self._rest, self._skip = 0, 0
        self._best: float | None = None

    def record(self, visit: Visit) -> None:
        """Takes note of a finished request. While a replay runs nothing is recorded, nor for a while after it."""
        if self._skip:
            self._skip -= 1
        elif self._replay is None:
            self._visits.append(visit)
            if len(self._visits) >= self._window:
                self._replay = self._run(self._visits)
                self._visits = []

    def advance(self) -> int | float | None:
        """Replays one more request; returns the best candidate when the window is through."""
        if self._replay is None:
            return None
        if next(self._replay, self) is None:
            return None
        self._replay = None
        # Each replay costs as much as its window times the candidates: the longer the engine runs, the rarer they are.
        self._rest = min(2 * self._rest + self._window, REST * self._window)
        self._skip = self._rest
        return self._best

    def _run(self, visits: list[Visit]) -> Iterator[None]:
        saved: dict[float, float] = {}
        for alpha in self._candidates:
            cache = PrefixCache(self._options, self._cost, alpha=alpha)
            total = 0.0
            # The first half only fills the cache.
            for number, visit in enumerate(visits):
                gained = replay(cache, visit)
                total += gained if number >= len(visits) // 2 else 0.0
                yield
            saved[alpha] = total
        # Ties go to the smallest alpha, the one closest to LRU.
        self._best = max(self._candidates, key=lambda alpha: (saved[alpha], -alpha))


def fixed_alpha(eviction: str) -> float | None:
    """The alpha of `lru` (0) or `flop=ALPHA`; None for `flop`, whose alpha is tuned while the engine runs.

    Raises `ValueError` for anything else.
    """
    known = re.fullmatch(r"lru|flop|flop=(\d+(?:\.\d+)?)", eviction)
    if known is None:
        raise ValueError(f"eviction is {eviction!r}, expected lru, flop or flop=ALPHA with a number of at least 0")
    return None if eviction == "flop" else float(known[1] or 0.0)


def parse_eviction(text: str, cache: CacheOptions, cost: ModelCost) -> tuple[float, AlphaTuner | None]:
    """Alpha at first, and what tunes it if it is not fixed. Raises `ValueError` as `fixed_alpha` does."""
    alpha = fixed_alpha(text)
    if alpha is not None:
        return alpha, None
    # Long enough to fill the memory several times over: before that every alpha looks alike.
    return 0.0, AlphaTuner(cache, cost, window=max(256, 4 * cache.slots))


def replay(cache: PrefixCache, visit: Visit) -> float:
    """Lets a request pass through a cache; returns the FLOPs that its hit saves."""
    match = cache.match(visit.path, visit.tokens - 1)
    hit = cache.hold(match, visit.time)
    page = cache.options.page_size
    table = hit.pages[: hit.tokens // page] if hit else []
    if hit is not None:
        cache.slots.release([hit.slot])
        cache.pages.release(hit.pages[len(table) :])
    longest = max((visit.tokens, *visit.boundaries))
    fresh = cache.take_pages(-(-longest // page) - len(table), visit.time)
    table = table + (fresh or [])
    for boundary in visit.boundaries if fresh is not None else ():
        slot = cache.take_slot(visit.time) if boundary > match.tokens else None
        if slot is not None and cache.store(visit.path, boundary, table, slot, visit.time) is None:
            cache.slots.release([slot])
    cache.pages.release(table)
    return cache.cost.prefill_flops(0, match.tokens)
