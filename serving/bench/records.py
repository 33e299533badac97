"""What happened to each request, and the figures over all of them."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

PERCENTILES = (50, 90, 95, 99)


@dataclasses.dataclass(slots=True)
class Record:
    """One request. Times in seconds since the run began."""

    scheduled: float
    """When it was due; waiting for a free reader does not count, being late does."""
    arrivals: list[float] = dataclasses.field(default_factory=list)
    """When each message with tokens came."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    """Tokens of each message."""
    end: float = 0.0
    status: str = ""
    """`ok`, or the name of the error."""

    @property
    def completion_tokens(self) -> int:
        """Tokens of the whole answer."""
        return sum(self.tokens)

    def gaps(self) -> list[float]:
        """Seconds between a message and the one before it."""
        return [late - early for early, late in itertools.pairwise(self.arrivals)]


def percentile(ordered: Sequence[float], percent: int | float) -> float:
    """The nearest-rank percentile of ascending values; NaN without any."""
    return ordered[max(math.ceil(percent / 100 * len(ordered)) - 1, 0)] if ordered else math.nan


def spread(values: Iterable[float]) -> dict[str, float]:
    """Mean, percentiles and largest of some seconds, in milliseconds; empty without values."""
    ordered = sorted(1000 * value for value in values)
    if not ordered:
        return {}
    ranks = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **ranks, "max": ordered[-1]}


def summary(records: Sequence[Record], seconds: int | float) -> dict[str, Any]:
    """The figures of a run that took `seconds`.

    TTFT is measured from when a request was due, so that a service that makes its clients wait cannot hide it. TPOT is
    an answer's time after its first message, divided by the tokens that came in it.
    """
    done = [record for record in records if record.status == "ok"]
    begun = [record for record in done if record.arrivals]
    slow = [record for record in begun if record.completion_tokens > record.tokens[0]]
    output = sum(record.completion_tokens for record in records)
    return {
        "seconds": seconds,
        "requests": len(records),
        "completed": len(done),
        "errors": dict(Counter(record.status for record in records if record.status != "ok")),
        "output_tokens": output,
        "requests_per_second": len(done) / seconds,
        "output_tokens_per_second": output / seconds,
        "ttft_ms": spread(record.arrivals[0] - record.scheduled for record in begun),
        "itl_ms": spread(gap for record in done for gap in record.gaps()),
        "tpot_ms": spread((r.arrivals[-1] - r.arrivals[0]) / (r.completion_tokens - r.tokens[0]) for r in slow),
        "latency_ms": spread(record.end - record.scheduled for record in done),
    }
