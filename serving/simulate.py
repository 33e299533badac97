"""Replays a trace through the real tree and scheduler, with a roofline in place of the device.

    python -m serving.simulate agentic --requests 20000 --preset k3 --device gb300x16
    python -m serving.simulate trace.jsonl --policies lru:prompt --policies flop:prompt,marconi,decode-end

A policy is EVICTION:RETENTION; eviction is `lru`, `flop` (alpha tuned while the engine runs) or `flop=ALPHA`.
"""

import dataclasses
import gc
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from serving.alpha import parse_eviction
from serving.core import Core
from serving.costs import Device, ModelCost
from serving.plan import Plan, RowResult, Shape, StepResult
from serving.prefix_cache import CacheOptions, PrefixCache
from serving.request import Request
from serving.retention import Retention
from serving.scheduler import SchedulerOptions
from serving.sequence import Phase
from serving.trace import TraceRequest

POLICIES = (
    "lru:prompt",
    "lru:interval=32768",
    "lru:prompt,interval=32768",
    "lru:prompt,marconi",
    "lru:prompt,marconi,decode-end",
    "lru:prompt,marconi,decode-end,supersede",
    "flop:prompt,marconi",
    "flop:prompt,marconi,decode-end",
    "flop:prompt,marconi,decode-end,supersede",
)


class SegmentPath:
    """A sequence made of segments: units are named by the segments that they cover."""

    def __init__(
        self, salt: str, segments: Iterable[tuple[int, int]], unit: int, known: "SegmentPath | None" = None
    ) -> None:
        """`known`: a path whose segments may begin this one; its units are then taken over."""
        self.segments = tuple(segments)
        self._unit, self._salt = unit, salt
        self._length = sum(length for _, length in self.segments)
        shared = known is not None and known.segments == self.segments[: len(known.segments)] and known._salt == salt
        self.units: list[Any] = list(known.units) if known is not None and shared else []
        self._name_units()

    def __len__(self) -> int:
        """Tokens."""
        return self._length

    def extend(self, tokens: Any) -> None:
        """Nothing: a trace knows its outputs from the start."""

    def tail(self, units: int, tokens: int) -> Any:
        """See `Path.tail`."""
        return hash(
            (self.units[units - 1] if units else self._salt, tokens, *self._covered(units * self._unit, tokens))
        )

    def _name_units(self) -> None:
        parent = self.units[-1] if self.units else self._salt
        position, end = 0, len(self.units) * self._unit
        for id, length in self.segments:
            # Units that lie within one segment: their offset in it says everything.
            while position + length >= end + self._unit:
                inside = end >= position
                what = (id, end - position) if inside else self._covered(end, self._unit)
                parent = hash((parent, *what))
                self.units.append(parent)
                end += self._unit
            position += length

    def _covered(self, start: int, tokens: int) -> tuple[int, ...]:
        """Ids and offsets of the segments that overlap a range."""
        found: list[int] = []
        position = 0
        for id, length in self.segments:
            if position < start + tokens and start < position + length:
                found += (id, max(start - position, 0))
            position += length
        return tuple(found)


class RooflineRunner:
    """Takes the time that the device would, and says zeros."""

    def __init__(self, cost: ModelCost, device: Device) -> None:
        self.cost, self.device = cost, device
        self.now = 0.0
        self.last_decode = 1e-3
        self._said: dict[int, RowResult] = {}

    def dispatch(self, plan: Plan) -> Plan:
        """Moves the clock to the end of the step."""
        seconds = self.device.overhead
        for row in plan.prefill:
            seconds += self.device.prefill_seconds(self.cost, row.start, row.start + len(row.ids))
        if plan.decode:
            steps = max(row.tokens for row in plan.decode)
            lengths = [row.length for row in plan.decode]
            self.last_decode = self.device.decode_seconds(self.cost, lengths) + self.device.overhead
            seconds += steps * self.last_decode - self.device.overhead
        self.now += seconds
        return plan

    def collect(self, ticket: Plan) -> StepResult:
        """Tokens for every row that samples."""
        said = RowResult([0], [0.0], True)
        silent = RowResult([], [], True)
        return StepResult(
            [said if row.final else silent for row in ticket.prefill],
            [[True] * len(row.captures) for row in ticket.prefill],
            [self._tokens(row.tokens) for row in ticket.decode],
        )

    def _tokens(self, count: int) -> RowResult:
        """The same object for every row that says so many."""
        if count not in self._said:
            self._said[count] = RowResult([0] * count, [0.0] * count, True)
        return self._said[count]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One policy on one trace."""

    policy: str
    requests: int
    hit_rate: int | float
    """Cached prompt tokens over all prompt tokens."""
    flops_saved: int | float
    """Part of the prefill FLOPs that hits saved."""
    cached_gib: int | float
    """Bytes that the cache held at the end of requests, on average."""
    ttft_mean: int | float
    ttft_p95: int | float
    tokens_per_second: int | float
    """Prompt and output tokens served per second of simulated time."""
    alpha: int | float
    preemptions: int
    seconds: int | float
    """Wall time of the simulation."""


def build(policy: str, cost: ModelCost, device: Device, cache: CacheOptions, options: SchedulerOptions) -> Core:
    """An engine with that policy on a simulated device."""
    eviction, _, retention = policy.partition(":")
    alpha, tuner = parse_eviction(eviction, cache, cost)
    runner = RooflineRunner(cost, device)
    pools = PrefixCache(cache, cost, alpha=alpha)
    options = dataclasses.replace(options, retention=Retention.parse(retention))
    return Core(options, pools, runner, clock=lambda: runner.now, ahead=0, tuner=tuner)


class Simulation:
    """One trace on one engine."""

    def __init__(self, core: Core) -> None:
        self.core = core
        assert isinstance(core.runner, RooflineRunner)
        self.runner = core.runner
        self._paths: dict[int, SegmentPath] = {}
        self._ttft: list[float] = []
        self._held: list[float] = []
        self._flops = self._saved = 0.0
        self._tokens = 0

    def run(self, trace: Iterable[TraceRequest]) -> None:
        """Serves the whole trace."""
        arrivals = iter(trace)
        coming = next(arrivals, None)
        number = 0
        while coming is not None or not self.core.idle:
            if self.core.idle and coming is not None:
                self.runner.now = max(self.runner.now, coming.time)
            while coming is not None and coming.time <= self.runner.now and self._has_room():
                self._submit(coming, number)
                coming, number = next(arrivals, None), number + 1
            self._step(coming)

    def _has_room(self) -> bool:
        return len(self.core.scheduler.waiting) < self.core.options.max_waiting - 1

    def _submit(self, item: TraceRequest, number: int) -> None:
        prompt = item.tokens
        path = self._path(item)
        # A request waits from its arrival, however long the step is that it falls into.
        sequence = self.core.submit(
            Request(id=str(number), tokens=range(prompt), max_tokens=item.output[1], salt=item.tenant), path
        )
        sequence.arrival = item.time

    def _path(self, item: TraceRequest) -> SegmentPath:
        """The path of a request; its session's last one shortens the work."""
        unit = self.core.cache.options.unit
        key = item.prompt[-2 if len(item.prompt) > 1 else 0][0]
        path = SegmentPath(item.tenant, (*item.prompt, item.output), unit, self._paths.pop(key, None))
        self._paths[item.output[0]] = path
        if len(self._paths) > 5000:
            self._paths.pop(next(iter(self._paths)))
        return path

    def _step(self, coming: TraceRequest | None) -> None:
        for output in self.core.step(self._stride(coming)):
            if output.final is not None:
                self._account(output.final)

    def _stride(self, coming: TraceRequest | None) -> int:
        """Tokens to decode at once: until something else happens."""
        running = self.core.scheduler.running
        if not running or any(s.phase is not Phase.DECODE for s in running):
            return 1
        left = min([s.max_tokens - s.sampled for s in running])
        if coming is None or len(running) == self.core.options.rows or len(self.core.scheduler.waiting):
            return max(left, 1)
        return max(1, min(left, int((coming.time - self.runner.now) / self.runner.last_decode)))

    def _account(self, final: Any) -> None:
        cost, pools = self.core.cache.cost, self.core.cache
        self._ttft.append(final.first_token_seconds)
        self._tokens += final.prompt_tokens + final.completion_tokens
        self._flops += cost.prefill_flops(0, final.prompt_tokens)
        self._saved += cost.prefill_flops(0, final.cached_tokens)
        pages = pools.pages.idle * pools.options.page_size * cost.latent_bytes_per_token
        self._held.append(pages + pools.slots.idle * cost.state_bytes)

    def report(self, policy: str, seconds: int | float) -> Report:
        """The figures of the run."""
        counters = self.core.counters
        if not self._ttft:
            raise ValueError("the trace has no requests, expected at least one")
        return Report(
            policy=policy,
            requests=len(self._ttft),
            hit_rate=counters.hit_rate,
            flops_saved=self._saved / max(self._flops, 1.0),
            cached_gib=float(np.mean(self._held)) / 2**30,
            ttft_mean=float(np.mean(self._ttft)),
            ttft_p95=float(np.quantile(self._ttft, 0.95)),
            tokens_per_second=self._tokens / max(self.runner.now, 1e-9),
            alpha=float(self.core.cache.evictor.alpha),
            preemptions=counters.preemptions,
            seconds=seconds,
        )


def simulate(policy: str, trace: Iterable[TraceRequest], core: Core) -> Report:
    """Serves `trace` and checks the books afterwards."""
    start = time.perf_counter()
    simulation = Simulation(core)
    collecting = gc.isenabled()
    # Counting references frees all that a run leaves behind; the collector would only walk an ever larger heap.
    gc.disable()
    try:
        simulation.run(trace)
    finally:
        if collecting:
            gc.enable()
    core.check_books()
    return simulation.report(policy, time.perf_counter() - start)


def divide_memory(
    cost: ModelCost, total: int | float, state_fraction: int | float, page_size: int, unit: int
) -> CacheOptions:
    """Pools that together take `total` bytes, `state_fraction` of them for states. Raises `ValueError`."""
    if not 0 < state_fraction < 1:
        raise ValueError(f"the fraction of the memory for states is {state_fraction}, expected one between 0 and 1")
    pages = int(total * (1 - state_fraction) / (cost.latent_bytes_per_token * page_size))
    slots = int(total * state_fraction / cost.state_bytes)
    return CacheOptions(pages=max(pages, 2) + 1, slots=max(slots, 2) + 1, page_size=page_size, unit=unit)


def table(reports: Iterable[Report]) -> Iterator[str]:
    """The reports as lines of text."""
    heads = (
        "policy",
        "hit rate",
        "FLOPs saved",
        "cached GiB",
        "TTFT mean",
        "p95 s",
        "tokens/s",
        "alpha",
        "preempted",
        "wall s",
    )
    yield "{:42s} {:>8s} {:>11s} {:>10s} {:>9s} {:>7s} {:>9s} {:>5s} {:>9s} {:>7s}".format(*heads)
    for r in reports:
        yield (
            f"{r.policy:42s} {r.hit_rate:8.3f} {r.flops_saved:11.3f} {r.cached_gib:10.1f} {r.ttft_mean:9.2f} "
            f"{r.ttft_p95:7.2f} {r.tokens_per_second:9.0f} {r.alpha:5.2f} {r.preemptions:9d} {r.seconds:7.1f}"
        )


def plot(reports: list[Report], path: str) -> None:
    """Hit rate and TTFT of each policy as an image. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 1 + 0.5 * len(reports)), sharey=True)
    names = [report.policy for report in reports]
    for axis, values, title in (
        (axes[0], [100 * r.hit_rate for r in reports], "prompt tokens from the cache, %"),
        (axes[1], [r.ttft_mean for r in reports], "mean time to first token, s"),
    ):
        axis.barh(names, values)
        axis.set_title(title)
        axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)
    print(f"plot: {path}", file=sys.stderr)


def default_shapes(step: int) -> tuple[Shape, ...]:
    """Prefill shapes of a server with steps of `step` tokens."""
    return (Shape(1, 256), Shape(4, 256), Shape(1, step // 4), Shape(4, step // 4), Shape(1, step))


if __name__ == "__main__":
    from serving.simulate_cli import main

    raise SystemExit(main())
