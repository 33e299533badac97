"""A histogram that costs next to nothing to fill: something is observed with every token of every stream."""

import bisect
import itertools
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Tally(Collector):
    """Values by bucket. One thread observes; any other may collect, and may miss what is just being observed."""

    def __init__(self, name: str, text: str, borders: Sequence[int | float]) -> None:
        self._name, self._text, self._borders = name, text, tuple(borders)
        self._counts = [0] * (len(borders) + 1)
        self._sum = 0.0

    def observe(self, value: int | float) -> None:
        """Counts a value; one on a border belongs below it."""
        self._counts[bisect.bisect_left(self._borders, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """The family, with cumulative buckets as Prometheus wants them."""
        names = [str(float(border)) for border in self._borders] + ["+Inf"]
        buckets = list(zip(names, map(float, itertools.accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)

    def describe(self) -> Iterator[Metric]:
        """The family without values."""
        yield HistogramMetricFamily(self._name, self._text)
