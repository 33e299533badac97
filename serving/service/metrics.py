"""Prometheus metrics. Calls are counted as they happen; the engine's figures are read when they are asked for."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.request import Final
from serving.service.jobs import Jobs
from serving.service.tally import Tally
from serving.stats import Stats

FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 40, 80, 160)
INTER_TOKEN = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 1, 3)
QUEUE = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
STEP = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.05, 0.1, 0.25, 0.5, 1, 5)
CALL = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
ACCEPTED = (1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8)
"""Bucket borders: seconds, tokens, and tokens per verification."""


class Metrics:
    """All metrics of a service, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._draft = 0
        self.first_token = self._histogram("first_token_seconds", "From the call to its first token.", FIRST_TOKEN)
        self.inter_token = Tally("k3jax_inter_token_seconds", "Between two tokens of a choice.", INTER_TOKEN)
        self.registry.register(self.inter_token)
        self.queue = self._histogram("queue_seconds", "From submission to the first chunk.", QUEUE)
        self.step = self._histogram("step_seconds", "A step of the engine.", STEP)
        self._call = self._histogram("call_seconds", "A whole call.", CALL)
        self._prompt = self._histogram("prompt_tokens", "Prompt tokens of an answer.", TOKENS)
        self._completion = self._histogram("completion_tokens", "Tokens of an answer.", TOKENS)
        self._accepted = self._histogram("acceptance_length", "Tokens per verification of a draft.", ACCEPTED)
        self._ended = Counter("k3jax_calls", "Calls by their end.", ["ending"], registry=self.registry)
        self._aborts = Counter("k3jax_aborts", "Choices that gave no answer.", ["reason"], registry=self.registry)
        self._messages = Counter("k3jax_messages", "Streamed messages.", ["protocol"], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[int | float, ...]) -> Histogram:
        return Histogram(f"k3jax_{name}", text, buckets=buckets, registry=self.registry)

    def drafts(self, tokens: int) -> None:
        """So many tokens are drafted at a time."""
        self._draft = tokens

    def finished(self, final: Final) -> None:
        """A choice has ended."""
        self.queue.observe(final.queued_seconds)
        self._prompt.observe(final.prompt_tokens)
        self._completion.observe(final.completion_tokens)
        if final.drafted_tokens and self._draft:
            blocks = final.drafted_tokens / self._draft
            self._accepted.observe(1 + final.accepted_tokens / blocks)
        if final.finish_reason not in ("stop", "length"):
            self._aborts.labels(final.finish_reason).inc()

    def call_ended(self, ending: str, seconds: int | float) -> None:
        """A call is over: a finish reason, a status, or `cancelled`."""
        self._ended.labels(ending).inc()
        self._call.observe(seconds)

    def counting(self, protocol: str) -> Callable[[], None]:
        """What is to be called whenever a message has been handed to gRPC."""
        return self._messages.labels(protocol).inc

    def serve(self, host: str, port: int) -> tuple[int, Callable[[], None]]:
        """Answers scrapes over HTTP in a thread; returns the port and what ends it.

        Raises `OSError` when the address cannot be had.
        """
        try:
            server, thread = start_http_server(port, addr=host, registry=self.registry)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no port"
            raise OSError(f"cannot serve metrics on {host}:{port} ({reason}); give another --metrics-port") from error

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return server.server_port, stop


class EngineCollector(Collector):
    """The engine's figures as they are when somebody scrapes."""

    def __init__(
        self, stats: Callable[[int | float], Stats | None], jobs: Jobs, clock: Callable[[], int | float]
    ) -> None:
        """`stats(seconds)`: a snapshot of the engine, or None if it takes longer. `clock`: seconds since its beat."""
        self._stats, self._jobs, self._beat = stats, jobs, clock
        self._started = time.time()
        self._lock = threading.Lock()
        self._latest: Stats | None = None

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield gauge("uptime_seconds", "Since the process began to serve.", time.time() - self._started)
        yield gauge("engine_beat_age_seconds", "Since the engine last showed that it lives.", self._beat())
        yield gauge("active_calls", "Calls that are being served.", len(self._jobs))
        yield gauge("waiting_prompt_tokens", "Prompt tokens of calls without a token.", self._jobs.waiting_tokens)
        with self._lock:
            # A scrape must not wait for a long step: it takes the last figures then.
            self._latest = self._stats(0.03) or self._latest
            stats = self._latest
        if stats is not None:
            yield from self._engine(stats)

    def _engine(self, stats: Stats) -> Iterator[Metric]:
        yield gauge("running", "Sequences in the batch.", stats.running)
        yield gauge("waiting", "Sequences in the queue.", stats.waiting)
        yield gauge("prefix_entries", "Prefixes that can be reused.", stats.entries)
        for name, pool in (("pages", stats.pages), ("slots", stats.slots)):
            yield gauge(f"{name}_capacity", f"Members of the pool of {name}.", pool.capacity)
            yield gauge(f"{name}_used", f"Members of the pool of {name} in use.", pool.used)
            yield gauge(f"{name}_cached", f"Those that the prefix cache holds, {name}.", pool.cached)
        counters = stats.counters
        for name, text in COUNTERS.items():
            yield counter(name, text, getattr(counters, name))
        yield counter("compilations", "Programs compiled after warm-up.", stats.compilations)
        yield labelled("finished", "Sequences by finish reason.", "reason", counters.finished)
        yield labelled("prefixes_removed", "Prefixes dropped.", "reason", counters.removed)


COUNTERS = {
    "requests": "Sequences submitted.",
    "prompt_tokens": "Prompt tokens of admitted sequences.",
    "cached_tokens": "Prompt tokens that were not computed.",
    "output_tokens": "Sampled tokens.",
    "computed_tokens": "Prompt tokens computed.",
    "steps": "Steps of the engine.",
    "preemptions": "Sequences pushed out of the batch.",
    "stored": "Prefixes stored.",
    "non_finite_states": "States that were not finite.",
}


def gauge(name: str, text: str, value: int | float) -> GaugeMetricFamily:
    """One gauge."""
    return GaugeMetricFamily(f"k3jax_{name}", text, value=float(value))


def counter(name: str, text: str, value: int | float) -> CounterMetricFamily:
    """One counter, apart by its name from the histograms of calls."""
    return CounterMetricFamily(f"k3jax_engine_{name}", text, value=float(value))


def labelled(name: str, text: str, label: str, values: Any) -> CounterMetricFamily:
    """A counter for each value of a label."""
    family = CounterMetricFamily(f"k3jax_engine_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
