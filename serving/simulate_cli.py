"""The command line of `python -m serving.simulate`."""

import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from k3jax import config
from serving.costs import DEVICES, ModelCost
from serving.scheduler import SchedulerOptions
from serving.simulate import POLICIES, Report, build, default_shapes, divide_memory, plot, simulate, table
from serving.trace import AgenticOptions, TraceError, TraceRequest, agentic, read, write

PRESETS: dict[str, Callable[[], config.K3Config]] = {"k3": config.k3, "nano": config.nano}


def run(
    trace: str,
    policies: tuple[str, ...],
    preset: Literal["k3", "nano"],
    device: str,
    cache_gib: float,
    state_fraction: float,
    page_size: int,
    unit: int,
    rows: int,
    step_tokens: int,
    requests: int,
    sessions_per_second: float,
    seed: int,
    save: str | None,
    image: str | None,
) -> Iterator[Report]:
    """Simulates each policy on the same trace."""
    made = AgenticOptions(requests=requests, sessions_per_second=sessions_per_second, seed=seed)

    def source() -> Iterator[TraceRequest]:
        return agentic(made) if trace == "agentic" else read(trace)

    if save:
        write(save, source())
    cost = ModelCost.of(PRESETS[preset]())
    cache = divide_memory(cost, cache_gib * 2**30, state_fraction, page_size, unit)
    options = SchedulerOptions(
        rows=rows,
        token_budget=step_tokens + rows,
        shapes=default_shapes(step_tokens),
        max_length=2**20,
        max_waiting_tokens=2**40,
    )
    print(
        f"{preset} on {device}: {cache.pages - 1} pages of {page_size} tokens and {cache.slots - 1} states in "
        f"{cache_gib:.0f} GiB, {rows} rows, steps of {step_tokens} tokens"
    )

    def reports() -> Iterator[Report]:
        done = []
        for policy in policies:
            done.append(simulate(policy, source(), build(policy, cost, DEVICES[device], cache, options)))
            yield done[-1]
        if image:
            plot(done, image)

    return reports()


def main() -> int:
    """Parses the command line, prints a table, returns the exit code."""
    import tyro

    def command(
        trace: Annotated[str, tyro.conf.Positional],
        /,
        policies: tuple[str, ...] = POLICIES,
        preset: Literal["k3", "nano"] = "k3",
        device: Literal["h200x8", "gb300x16"] = "gb300x16",
        cache_gib: float = 1200.0,
        state_fraction: float = 0.4,
        page_size: int = 256,
        unit: int = 64,
        rows: int = 64,
        step_tokens: int = 8192,
        requests: int = 10_000,
        sessions_per_second: float = 0.35,
        seed: int = 0,
        save: str | None = None,
        image: str | None = None,
    ) -> int:
        """Replays a trace through the real prefix tree and scheduler with a roofline cost model.

        Examples: `python -m serving.simulate agentic --requests 20000`,
        `python -m serving.simulate trace.jsonl --policies lru:prompt flop:prompt,marconi,decode-end`.

        Args:
            trace: a file of requests (see serving/trace.py), or `agentic` for a generated trace
            policies: EVICTION:RETENTION with lru, flop or flop=ALPHA
            preset: the model
            device: the devices of the roofline
            cache_gib: memory of both pools together
            state_fraction: part of it for states
            page_size: tokens per page
            unit: tokens per hash unit
            rows: sequences that run at a time
            step_tokens: prefill tokens of a step
            requests: of a generated trace
            sessions_per_second: arrivals of a generated trace
            seed: of a generated trace
            save: write the trace to this file
            image: write a plot to this file (needs matplotlib)
        """
        arguments = dict(locals())
        try:
            for line in table(run(**arguments)):
                print(line, flush=True)
        except (TraceError, ValueError, OSError) as error:
            print(f"serving.simulate: {error}", file=sys.stderr)
            return 2
        return 0

    return tyro.cli(command, prog="python -m serving.simulate")
