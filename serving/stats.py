"""Counters of the engine, and what they add up to."""

import collections
import dataclasses


@dataclasses.dataclass(slots=True)
class Counters:
    """Everything that only grows."""

    requests: int = 0
    finished: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Requests by finish reason."""
    prompt_tokens: int = 0
    """Of admitted requests; a request that resumes after preemption is not counted again."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed."""
    output_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens computed, those computed again after preemption included."""
    steps: int = 0
    preemptions: int = 0
    stored: int = 0
    removed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Prefixes dropped, by reason."""
    deferred: int = 0
    """Times that a request waited a step for a state on its way."""
    skipped_captures: int = 0
    """States that were not kept for lack of a slot."""
    non_finite_states: int = 0

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens over all prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """Occupancy of one pool."""

    capacity: int
    used: int
    cached: int
    """Of the used ones, those that the prefix cache holds (running requests may hold them too)."""
    bytes_each: int | float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """How busy an engine is, for whoever spreads requests over several."""

    running: int
    waiting: int
    waiting_tokens: int
    """Prompt tokens of waiting requests."""
    used_tokens: int
    """Rows of pages that running requests hold."""
    cached_tokens: int
    """Rows of pages that only the prefix cache holds."""
    max_tokens: int
    hit_rate: int | float
    tokens_per_second: int | float
    """Output tokens since the last call."""

    @property
    def usage(self) -> float:
        """Part of the token rows that running requests hold."""
        return self.used_tokens / self.max_tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A snapshot of the engine."""

    running: int
    waiting: int
    pages: PoolUse
    slots: PoolUse
    entries: int
    """Prefixes that can be reused."""
    nodes: int
    waste_bytes: int | float
    """Bytes of page rows in use that hold no token."""
    alpha: int | float
    counters: Counters
    compilations: int = 0
    """Programs compiled since warm-up ended."""

    def summary(self) -> dict[str, float | int | dict[str, int]]:
        """All figures by name."""
        values: dict[str, float | int | dict[str, int]] = {
            "running": self.running,
            "waiting": self.waiting,
            "entries": self.entries,
            "nodes": self.nodes,
            "waste_bytes": self.waste_bytes,
            "alpha": self.alpha,
            "hit_rate": round(self.counters.hit_rate, 4),
            "compilations": self.compilations,
        }
        for name, pool in (("pages", self.pages), ("slots", self.slots)):
            values |= {f"{name}_{key}": value for key, value in dataclasses.asdict(pool).items()}
        for field in dataclasses.fields(self.counters):
            value = getattr(self.counters, field.name)
            values[field.name] = dict(value) if isinstance(value, dict) else value
        return values
