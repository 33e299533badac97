"""What the service itself costs: streams from a device that only waits, to clients in a process of their own.

python -m serving.service.transport --streams 64 --tokens 1000
python -m serving.service.transport --streams 16 --step-ms 30
"""

import asyncio
import dataclasses
import json
import subprocess
import sys
import time

from k3jax import program
from serving.core import Core
from serving.costs import ModelCost
from serving.engine import Engine, Stream
from serving.plan import Plan, RowResult, Shape, StepResult
from serving.prefix_cache import CacheOptions, PrefixCache
from serving.request import Request
from serving.scheduler import SchedulerOptions
from serving.service import event_loop
from serving.service.model_card import ModelCard
from serving.service.options import ServiceOptions
from serving.service.server import Service

PAGE = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Measures messages a second and CPU time a message, without a model, on a machine that does nothing else.

    Examples:
      python -m serving.service.transport
      python -m serving.service.transport --streams 16 --tokens 100 --step-ms 30 --json
    """

    streams: int = 64
    """Calls at a time."""
    tokens: int = 500
    """Of each call, and so messages: one a step, unless the reader is slower than the engine."""
    step_ms: float = 3.0
    """Time of a step. At 0 readers fall behind, and tens of tokens share a message."""
    json: bool = False
    """Print one JSON record."""


class SilentRunner:
    """A device that takes `seconds` for a step and always says 7."""

    def __init__(self, seconds: int | float = 0.0) -> None:
        self.seconds = seconds

    def dispatch(self, plan: Plan) -> Plan:
        """Waits, as a device would be waited for."""
        if self.seconds:
            time.sleep(self.seconds)
        return plan

    def collect(self, ticket: Plan) -> StepResult:
        """One token for each row that decodes or ends its prompt."""
        said, silent = RowResult([7], [0.0], True), RowResult([], [], True)
        prefill = [said if row.final else silent for row in ticket.prefill]
        return StepResult(prefill, [[True] * len(row.captures) for row in ticket.prefill], [said] * len(ticket.decode))


def silent_engine(rows: int, max_length: int, step_seconds: int | float = 0.0) -> Engine:
    """An engine of `rows` rows around that device."""
    cost = ModelCost(flops_per_token=1.0, flops_per_pair=0.0, latent_bytes_per_token=1.0, state_bytes=1.0)
    pages = rows * (max_length // PAGE + 2)
    cache = PrefixCache(CacheOptions(pages=pages, slots=3 * rows + 1, page_size=PAGE, unit=PAGE), cost)
    options = SchedulerOptions(rows=rows, token_budget=256 + rows, shapes=(Shape(8, 16),), max_length=max_length)
    return Engine(Core(options, cache, SilentRunner(step_seconds)))


def silent_card(max_length: int) -> ModelCard:
    """The card of a model that is not there."""
    return ModelCard(
        name="silent",
        path="",
        vocab_size=32,
        max_length=max_length,
        stop_ids=(),
        bos_id=0,
        pad_id=0,
        dtype="float32",
        kv_cache_dtype="float32",
    )


async def alone(streams: int, tokens: int, step_seconds: int | float) -> dict[str, float]:
    """Figures of the engine without a service around it."""
    engine = silent_engine(streams, tokens + PAGE, step_seconds)
    engine.start()
    start, cpu = time.perf_counter(), time.process_time()
    prompts = [[number % 32, number // 32, 5] for number in range(streams)]
    requests = [Request(id=str(n), tokens=prompt, max_tokens=tokens) for n, prompt in enumerate(prompts)]
    answers = [await engine.submit(request) for request in requests]

    async def read(stream: Stream) -> int:
        return sum([len(output.tokens) async for output in stream])

    received = sum(await asyncio.gather(*map(read, answers)))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    await asyncio.to_thread(engine.stop)
    return {
        "engine_tokens_per_second": received / seconds,
        "engine_cpu_us_per_token": 1e6 * cpu / received,
    }


async def measure(streams: int, tokens: int, step_seconds: int | float) -> dict[str, float]:
    """Figures of the engine with the service around it."""
    service = Service(ServiceOptions(port=0, rows=streams))
    await service.start()
    engine = silent_engine(streams, tokens + PAGE, step_seconds)
    engine.start()
    await service.attach(engine, silent_card(tokens + PAGE))
    command = [sys.executable, "-m", "serving.service.transport_client", str(service.port), str(streams), str(tokens)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    await process.stdout.readline()
    cpu = time.process_time()
    process.stdin.write(b"go\n")
    client = json.loads(await process.stdout.readline())
    cpu = time.process_time() - cpu
    await process.wait()
    await service.stop(0)
    messages, received, seconds = client["messages"], client["tokens"], client["seconds"]
    return {
        "messages_per_second": messages / seconds,
        "tokens_per_second": received / seconds,
        "tokens_per_message": received / max(messages, 1),
        "client_cpu_us_per_message": 1e6 * client["cpu"] / max(messages, 1),
        "server_cpu_us_per_message": 1e6 * cpu / max(messages, 1),
        "server_cpu_us_per_token": 1e6 * cpu / max(received, 1),
    }


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; the exit code."""
    flags = program.parse(Flags, "serving.service.transport", arguments)
    return program.run(lambda: transport(flags))


def transport(flags: Flags) -> int:
    """Measures and prints."""
    run = (flags.streams, flags.tokens, flags.step_ms / 1000)
    figures = event_loop.run(measure(*run)) | event_loop.run(alone(*run))
    figures["share_of_engine"] = figures["tokens_per_second"] / figures["engine_tokens_per_second"]
    if flags.json:
        print(json.dumps({"streams": flags.streams, "tokens": flags.tokens} | figures))
    else:
        for name, value in figures.items():
            print(f"{name.replace('_', ' '):<28}{value:12.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
