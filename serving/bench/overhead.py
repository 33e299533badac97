"""`python -m serving.bench.overhead`: what gRPC and the gateway cost, beside the engine alone."""

import contextlib
import dataclasses
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from k3jax import program
from serving.gateway import processes

Runs = list[dict[str, Any]]
"""One for each load."""
Measure = Callable[[Sequence[str]], Runs]
"""Flags of `python -m serving.bench` -> its runs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Puts the same load on the engine in one process, on the service, and on the gateway before it.

    Each line gives tokens a second, their share of the engine's, and the time to the first token; with several
    repeats, medians follow. Measure on a machine that does nothing else. The clients have a process of their own; only
    the engine alone shares one with them, while service and gateway idle.

    Examples:
      python -m serving.bench.overhead --repeats 3
      python -m serving.bench.overhead --streams 1 --requests 8
      python -m serving.bench.overhead --streams 1 16 64 --max-num-seqs 64 --json overhead.json
    """

    streams: tuple[int, ...] = (1, 16, 64)
    """Clients at a time."""
    requests: int = 64
    """Requests of each run."""
    repeats: int = 1
    """Times that all doors take turns: two runs of the same load may differ by a fifth."""
    prompt_tokens: int = 64
    output_tokens: int = 64
    max_num_seqs: int = 16
    """Sequences that the engine runs at a time."""
    max_length: int = 1024
    """Most tokens of prompt and output together."""
    checkpoint: Path | None = None
    """Default: the shipped nano."""
    gateway: bool = True
    """Measure the gateway too (needs smg)."""
    json: Path | None = None
    """Also write all figures to this file."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; the exit code."""
    options = program.parse(Options, "serving.bench.overhead", arguments)
    # The service must not outlive the one who started it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return program.run(lambda: _compare(options))


def _compare(options: Options) -> int:
    if options.gateway:
        processes.require_smg()
    results: dict[str, list[Runs]] = {}
    for door, runs in measured(options, run_bench):
        results.setdefault(door, []).append(runs)
        for line in lines(door, runs, results["engine"][-1]):
            print(line, flush=True)
    if options.repeats > 1:
        print(f"medians of {options.repeats}:")
        medians = {door: middle(rounds) for door, rounds in results.items()}
        for door, runs in medians.items():
            print("\n".join(lines(door, runs, medians["engine"])))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def measured(options: Options, measure: Measure) -> Iterator[tuple[str, Runs]]:
    """Runs by door, the engine's first in each round; service and gateway live all the time."""
    sizes = ["--max-num-seqs", str(options.max_num_seqs), "--max-length", str(options.max_length)]
    sizes += [] if options.checkpoint is None else ["--checkpoint", str(options.checkpoint)]
    load = ["--concurrency", *map(str, options.streams), "--requests", str(options.requests)]
    load += ["--prompt-tokens", str(options.prompt_tokens), "--output-tokens", str(options.output_tokens)]
    with contextlib.ExitStack() as stack:
        command = processes.service_command(["--port", "0", "--log-level", "warning", *sizes])
        service = stack.enter_context(processes.running(command, stdout=subprocess.PIPE))
        address = processes.service_address(service)
        doors = {"engine": sizes, "vllm-grpc": ["--address", address], "k3jax.v1": ["--address", address]}
        if options.gateway:
            doors["openai"] = ["--address", _start_gateway(stack, service, address)]
        for turn in range(options.repeats):
            for number, (door, where) in enumerate(doors.items()):
                # The prefix cache of the service should know no prompt of an earlier run.
                seed = ["--seed", str(1000 * (len(doors) * turn + number))]
                yield door, measure([*load, *seed, "--protocol", door, *where])


def _start_gateway(stack: contextlib.ExitStack, service: Any, address: str) -> str:
    """The URL of a gateway before a service, which lives as long as the stack."""
    port, metrics = processes.free_port(), processes.free_port()
    command = processes.gateway_command([address], host="127.0.0.1", port=port, metrics_port=metrics)
    smg = stack.enter_context(processes.running(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    url = f"http://127.0.0.1:{port}"
    processes.wait_for_models(url, [service, smg])
    return url


def middle(rounds: Sequence[Runs]) -> Runs:
    """For each load, the medians of its runs."""
    return [_median(runs) for runs in zip(*rounds, strict=True)]


def _median(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The medians of several runs of one load; errors are added up."""
    ranks = {rank for run in runs for rank in run["ttft_ms"]}
    return {
        "load": runs[0]["load"],
        "output_tokens_per_second": statistics.median(run["output_tokens_per_second"] for run in runs),
        "ttft_ms": {rank: statistics.median(run["ttft_ms"][rank] for run in runs if run["ttft_ms"]) for rank in ranks},
        "errors": sum((Counter(run["errors"]) for run in runs), Counter()),
    }


def run_bench(flags: Sequence[str]) -> Runs:
    """`python -m serving.bench` in a process of its own. Raises `RuntimeError` when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "runs.json"
        command = [sys.executable, "-m", "serving.bench", *flags, "--json", str(file)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise RuntimeError(f"python -m serving.bench {' '.join(flags)} failed: {last}")
        return json.loads(file.read_text())["runs"]


def lines(door: str, runs: Sequence[dict[str, Any]], engine: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One line for each load."""
    for run, alone in zip(runs, engine, strict=True):
        speed, share = (
            run["output_tokens_per_second"],
            run["output_tokens_per_second"] / alone["output_tokens_per_second"],
        )
        first = run["ttft_ms"]
        lost = sum(run["errors"].values())
        yield (
            f"{door:>10}  {run['load']:>11}  {speed:8.0f} tok/s  {share:6.1%} of the engine  "
            f"TTFT p50 {first.get('p50', float('nan')):7.1f} p99 {first.get('p99', float('nan')):7.1f} ms"
            + (f"  {lost} errors" if lost else "")
        )


if __name__ == "__main__":
    sys.exit(main())
