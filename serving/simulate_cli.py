"""The command line of `python -m serving.simulate`."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from k3jax import config, program
from serving.costs import DEVICES, ModelCost
from serving.prefix_cache import CacheOptions
from serving.scheduler import SchedulerOptions
from serving.simulate import POLICIES, Report, build, default_shapes, divide_memory, plot, simulate, table
from serving.trace import AgenticOptions, TraceError, TraceRequest, agentic, read, write

PRESETS: dict[str, Callable[[], config.K3Config]] = {"k3": config.k3, "nano": config.nano}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Replays a trace through the real prefix tree and scheduler with a roofline cost model; a line for each policy.

    Examples:
      python -m serving.simulate agentic --requests 20000
      python -m serving.simulate trace.jsonl --policies lru:prompt flop:prompt,marconi,decode-end
    """

    trace: str
    """A file of requests (see serving/trace.py), or `agentic` for a generated trace."""
    policies: tuple[str, ...] = POLICIES
    """EVICTION:RETENTION with lru, flop or flop=ALPHA."""
    preset: Literal["k3", "nano"] = "k3"
    """The model."""
    device: Literal["h200x8", "gb300x16"] = "gb300x16"
    """The devices of the roofline."""
    cache_gib: float = 1200.0
    """Memory of both pools together."""
    state_fraction: float = 0.4
    """Part of it for states."""
    page_size: int = 256
    """Tokens per page."""
    unit: int = 64
    """Tokens per hash unit."""
    rows: int = 64
    """Sequences that run at a time."""
    step_tokens: int = 8192
    """Prefill tokens of a step."""
    requests: int = 10_000
    """Of a generated trace."""
    sessions_per_second: float = 0.35
    """Arrivals of a generated trace."""
    seed: int = 0
    """Of a generated trace."""
    save: str | None = None
    """Write the trace to this file."""
    image: str | None = None
    """Write a plot to this file (needs matplotlib)."""

    def requests_of_trace(self) -> Iterator[TraceRequest]:
        """The trace from its beginning."""
        if self.trace != "agentic":
            return read(self.trace)
        made = AgenticOptions(requests=self.requests, sessions_per_second=self.sessions_per_second, seed=self.seed)
        return agentic(made)


def main(arguments: list[str] | None = None) -> int:
    """Prints a table; the exit code."""
    options = program.parse(Options, "serving.simulate", arguments)
    return program.run(lambda: _print(options))


def _print(options: Options) -> int:
    if options.trace != "agentic":
        program.require_path(Path(options.trace), "trace")
    try:
        if options.save:
            write(options.save, options.requests_of_trace())
        cost = ModelCost.of(PRESETS[options.preset]())
        size = options.cache_gib * 2**30
        cache = divide_memory(cost, size, options.state_fraction, options.page_size, options.unit)
        print(_described(options, cache))
        for line in table(reports(options, cost, cache)):
            print(line, flush=True)
    except (TraceError, ValueError, OSError) as error:
        raise program.UsageError(str(error)) from error
    return 0


def reports(options: Options, cost: ModelCost, cache: CacheOptions) -> Iterator[Report]:
    """Simulates each policy on the same trace, and draws them all if that is wanted."""
    done = []
    for policy in options.policies:
        engine = build(policy, cost, DEVICES[options.device], cache, _scheduling(options))
        done.append(simulate(policy, options.requests_of_trace(), engine))
        yield done[-1]
    if options.image:
        plot(done, options.image)


def _scheduling(options: Options) -> SchedulerOptions:
    return SchedulerOptions(
        rows=options.rows,
        token_budget=options.step_tokens + options.rows,
        shapes=default_shapes(options.step_tokens),
        max_length=2**20,
        max_waiting_tokens=2**40,
    )


def _described(options: Options, cache: CacheOptions) -> str:
    return (
        f"{options.preset} on {options.device}: {cache.pages - 1} pages of {options.page_size} tokens and "
        f"{cache.slots - 1} states in {options.cache_gib:.0f} GiB, {options.rows} rows, "
        f"steps of {options.step_tokens} tokens"
    )
