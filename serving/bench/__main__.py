"""`python -m serving.bench`: load on a running service, or on the engine alone."""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Literal

from k3jax import program
from serving.bench import load
from serving.bench.records import Record, summary
from serving.bench.target import RequestFailed, Target, connect
from serving.bench.workload import Workload, arrivals

COLUMNS = ("load", "done", "errors", "tok/s", "req/s", "TTFT p50", "p99", "ITL p50", "p99", "TPOT p50", "latency p50")
WIDTHS = (12, 6, 6, 9, 8, 9, 9, 9, 9, 9, 11)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Puts load on a service and prints percentiles, in milliseconds.

    With --concurrency so many clients send one request after another; with --rate requests come in at random times,
    so many a second on average, whatever has become of those before. Several values give several runs.

    Examples:
      python -m serving.bench --address 127.0.0.1:50051 --concurrency 1 16 64
      python -m serving.bench --address 127.0.0.1:50051 --protocol k3jax.v1 --rate 2 8 --requests 100 --plot load.png
      python -m serving.bench --address http://127.0.0.1:30000 --protocol openai --json load.json
      python -m serving.bench --protocol engine --concurrency 16
    """

    address: str = "127.0.0.1:50051"
    """host:port, or a URL for openai."""
    protocol: Literal["vllm-grpc", "k3jax.v1", "openai", "engine"] = "vllm-grpc"
    """How to speak to it; engine runs a checkpoint in this process."""
    concurrency: tuple[int, ...] = ()
    """Clients at a time. Default: 1 8, unless there is a rate."""
    rate: tuple[float, ...] = ()
    """Requests a second."""
    requests: int = 64
    """Requests of each run."""
    prompt_tokens: int = 64
    shared_tokens: int = 0
    """Tokens with which all prompts begin."""
    output_tokens: int = 64
    warm_up: int = 2
    """Requests that are sent first and not counted."""
    seed: int = 0
    token: str | None = None
    """Bearer token."""
    checkpoint: Path | None = None
    """For the engine. Default: the shipped nano."""
    max_num_seqs: int = 8
    """For the engine: sequences that run at a time."""
    max_length: int = 1024
    """For the engine: most tokens of prompt and output together."""
    json: Path | None = None
    """Also write all figures to this file."""
    plot: Path | None = None
    """Also draw them into this file."""

    def check(self) -> None:
        """Raises `UsageError` for numbers that make no run."""
        if not 0 <= self.shared_tokens <= self.prompt_tokens or self.prompt_tokens < 1:
            raise program.UsageError(
                f"--prompt-tokens {self.prompt_tokens} --shared-tokens {self.shared_tokens}: expected at least one "
                "prompt token, and no more shared ones"
            )
        for name in ("requests", "output_tokens"):
            if getattr(self, name) < 1:
                raise program.UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least 1")
        bad = [value for value in (*self.concurrency, *self.rate) if value <= 0]
        if bad:
            raise program.UsageError(f"a load of {bad[0]}: expected more than 0")


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; the exit code."""
    options = program.parse(Options, "serving.bench", arguments)
    return program.run(lambda: asyncio.run(_measure(options)))


def _connect(options: Options) -> Target:
    if options.protocol != "engine":
        return connect(options.protocol, options.address, token=options.token)
    from serving.bench.engine_target import EngineTarget
    from serving.launch import Sizes

    checkpoint = None if options.checkpoint is None else str(options.checkpoint)
    return EngineTarget(checkpoint, Sizes(rows=options.max_num_seqs, max_length=options.max_length))


async def _measure(options: Options) -> int:
    options.check()
    target = _connect(options)
    try:
        try:
            about = await target.about()
        except RequestFailed as error:
            raise RuntimeError(f"{options.protocol} at {options.address} does not answer: {error}") from error
        return await _run_all(options, target, _workload(options, about.vocabulary))
    finally:
        await target.close()


def _workload(options: Options, vocabulary: int) -> Workload:
    # The last ids of K3's vocabulary are control tokens.
    ids = vocabulary if vocabulary <= 512 else vocabulary - 256
    return Workload(
        prompt_tokens=options.prompt_tokens,
        shared_tokens=options.shared_tokens,
        output_tokens=options.output_tokens,
        vocabulary=max(ids, 1),
        seed=options.seed,
    )


async def _run_all(options: Options, target: Target, workload: Workload) -> int:
    results: list[dict[str, Any]] = []
    await load.closed(target, workload.prompts(options.warm_up), options.output_tokens, 1, [])
    print(_row(COLUMNS))
    closed = options.concurrency or (() if options.rate else (1, 8))
    for run, value in [*(("clients", n) for n in closed), *(("rate", rate) for rate in options.rate)]:
        # Other prompts for each run: the prefix cache should not know them from the run before.
        fresh = dataclasses.replace(workload, seed=options.seed + len(results) + 1)
        result = await _run(options, target, fresh, run, value)
        results.append(result)
        print(_row(_cells(result)), flush=True)
    if options.json is not None:
        settings = {"protocol": options.protocol, "address": options.address, **dataclasses.asdict(workload)}
        options.json.write_text(json.dumps({"settings": settings, "runs": results}, indent=1) + "\n")
    if options.plot is not None:
        from serving.bench import plot

        plot.write(results, options.plot)
    return program.FAILURE if all(result["completed"] == 0 for result in results) else 0


async def _run(options: Options, target: Target, workload: Workload, run: str, value: int | float) -> dict[str, Any]:
    records: list[Record] = []
    prompts = workload.prompts(options.requests)
    if run == "clients":
        work = load.closed(target, prompts, workload.output_tokens, int(value), records)
    else:
        times = arrivals(value, options.requests, workload.seed)
        work = load.opened(target, prompts, workload.output_tokens, times, records)
    label = f"{value:g} {'clients' if run == 'clients' else '/s'}"
    seconds = await load.watched(asyncio.create_task(work), records, lambda so_far: _show(label, so_far, options))
    if sys.stderr.isatty():
        print(" " * 78, end="\r", file=sys.stderr, flush=True)
    return {"load": label, **summary(records, seconds)}


def _show(label: str, records: list[Record], options: Options) -> None:
    if sys.stderr.isatty():
        ended = sum(record.status != "" for record in records)
        tokens = sum(record.completion_tokens for record in records)
        line = f"{label}: {ended} of {options.requests} requests, {len(records) - ended} running, {tokens} tokens"
        print(f"{line:<78}", end="\r", file=sys.stderr, flush=True)


def _cells(result: dict[str, Any]) -> tuple[str, ...]:
    def ms(name: str, rank: str) -> str:
        return f"{result[name][rank]:.1f}" if result[name] else "-"

    return (
        result["load"],
        str(result["completed"]),
        str(sum(result["errors"].values())),
        f"{result['output_tokens_per_second']:.0f}",
        f"{result['requests_per_second']:.1f}",
        *(ms(name, rank) for name in ("ttft_ms", "itl_ms") for rank in ("p50", "p99")),
        ms("tpot_ms", "p50"),
        ms("latency_ms", "p50"),
    )


def _row(cells: tuple[str, ...]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))


if __name__ == "__main__":
    sys.exit(main())
