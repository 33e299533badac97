"""`python -m serving.bench.overload`: what ten times the load that a service can bear does to those whom it lets in."""

import asyncio
import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from k3jax import program
from serving.bench import load
from serving.bench.records import Record, spread, summary
from serving.bench.target import Target, connect
from serving.bench.workload import Workload, arrivals
from serving.service.own_server import server_at

REFUSED = "RESOURCE_EXHAUSTED"

Run = tuple[list[Record], float]
"""What became of each request, and the seconds that all took."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Fills every row of a service, then offers several times as many requests a second, and compares.

    Prints the time between two tokens (ITL) of those who are let in at both loads, and how soon the others are refused.
    Exit code 1 if the 99th percentile grows by more than --most-growth, or if anything but a refusal went wrong.
    Measure on a machine that does nothing else.

    Examples:
      python -m serving.bench.overload
      python -m serving.bench.overload --factor 10 --seconds 20 --json overload.json
    """

    address: str | None = None
    """host:port of a service that nobody else needs. Default: one of the shipped model is started."""
    rows: int = 8
    """Sequences that the service runs at a time; so many clients fill it."""
    queue: int = 8
    """Sequences that may wait, for the service that is started."""
    factor: float = 10.0
    """Offered load, in requests a second that the full service completes."""
    seconds: float = 30.0
    """Of each load."""
    prompt_tokens: int = 64
    """As many as the service computes in one step, so that the longest step is the same at both loads."""
    output_tokens: int = 64
    most_growth: float = 0.2
    seed: int = 0
    json: Path | None = None
    """Also write all figures to this file."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; the exit code."""
    options = program.parse(Options, "serving.bench.overload", arguments)
    return program.run(lambda: overload(options))


def overload(options: Options) -> int:
    """Measures, prints and judges."""
    flags = ("--max-num-seqs", str(options.rows), "--queue-limit", str(options.queue))
    with server_at(options.address, flags=flags) as server:
        full, over = asyncio.run(measure(options, server.target))
    growth = over["itl_ms"]["p99"] / full["itl_ms"]["p99"] - 1
    if options.json is not None:
        options.json.write_text(json.dumps({"full": full, "overloaded": over, "growth": growth}, indent=1) + "\n")
    return judge(full, over, growth, options.most_growth)


def judge(full: dict[str, Any], over: dict[str, Any], growth: float, most: float) -> int:
    """Prints both loads; the exit code."""
    for name, run in (("full", full), ("overloaded", over)):
        print(line(name, run))
    print(f"p99 between tokens grows by {growth:+.1%}, at most {most:+.0%}")
    others = {status for run in (full, over) for status in run["errors"]} - {REFUSED}
    for status in sorted(others):
        print(f"requests ended with {status}", file=sys.stderr)
    return 1 if others or growth > most else 0


async def measure(options: Options, address: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures of the full and of the overloaded service.

    One half of the full load comes before the overload and one after it: a machine that is quicker at one moment than
    at another would otherwise look like a service that suffers.
    """
    target = connect("vllm-grpc", address)
    try:
        vocabulary = (await target.about()).vocabulary
        workload = Workload(
            prompt_tokens=options.prompt_tokens, output_tokens=options.output_tokens, vocabulary=min(vocabulary, 256)
        )

        async def full(turn: int, seconds: float) -> Run:
            return await full_load(target, fresh(workload, options.seed + turn), options.rows, seconds)

        await full(0, min(options.seconds, 2.0))
        before = await full(1, options.seconds / 2)
        rate = options.factor * figures(*before)["requests_per_second"]
        over = await over_load(target, fresh(workload, options.seed + 2), rate, options.seconds)
        after = await full(3, options.seconds / 2)
    finally:
        await target.close()
    return figures([*before[0], *after[0]], before[1] + after[1]), figures(*over) | {"offered_per_second": rate}


def fresh(workload: Workload, seed: int) -> Workload:
    """The same load with prompts that the service has not seen."""
    return dataclasses.replace(workload, seed=seed)


async def full_load(target: Target, workload: Workload, rows: int, seconds: float) -> Run:
    """As many clients as rows, each with one request after the other, for so long."""
    records: list[Record] = []
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    prompts = itertools.takewhile(lambda prompt: loop.time() < end, workload.prompts(sys.maxsize))
    taken = await load.closed(target, prompts, workload.output_tokens, rows, records)
    return records, taken


async def over_load(target: Target, workload: Workload, rate: float, seconds: float) -> Run:
    """Requests at random times, `rate` a second, for so long."""
    count = int(rate * seconds)
    records: list[Record] = []
    times = arrivals(rate, count, workload.seed)
    taken = await load.opened(target, workload.prompts(count), workload.output_tokens, times, records)
    return records, taken


def figures(records: list[Record], seconds: float) -> dict[str, Any]:
    """The summary of a run, and how soon refusals came."""
    refused = [record.end - record.scheduled for record in records if record.status == REFUSED]
    return summary(records, seconds) | {"refusal_ms": spread(refused)}


def line(name: str, run: dict[str, Any]) -> str:
    """One load in words."""
    gaps, text = run["itl_ms"], f"{name:>11}: {run['completed']} of {run['requests']} answered"
    text += f", {run['output_tokens_per_second']:.0f} tokens/s, ITL p50 {gaps['p50']:.1f} p99 {gaps['p99']:.1f} ms"
    refusals = run["refusal_ms"]
    return text + (f", refused in p50 {refusals['p50']:.1f} p99 {refusals['p99']:.1f} ms" if refusals else "")


if __name__ == "__main__":
    sys.exit(main())
