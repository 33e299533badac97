"""Minutes or hours of mixed clients against a service: memory, files and compilations must not grow.

python -m serving.service.soak --minutes 10
"""

import dataclasses
import os
import random
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import serving
from k3jax import program
from serving.client.results import Delta
from serving.service.own_server import Server, server_at

WARM_UP = 0.2
"""Part of the time whose growth does not count: pools fill, buffers find their size."""

POINTS = 60
"""Readings of memory and open files."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Loads a service with clients that ask, hang up, come too late or ask wrongly, and watches its process.

    Exit code 1 if its memory grows by more than --mib-per-thousand per 1,000 requests, if open files grow, if anything
    is compiled, or if sequences, pages or slots are left over at the end.

    Examples:
      python -m serving.service.soak
      python -m serving.service.soak --target 127.0.0.1:50051 --pid 1234 --minutes 10
    """

    target: str | None = None
    """host:port of a service that nobody else needs. Default: one of the shipped model is started."""
    pid: int | None = None
    """Process of the target; without one, only the service's own figures are checked."""
    minutes: float = 10.0
    clients: int = 16
    seed: int = 0
    mib_per_thousand: float | None = 1.0
    """None: memory is shown but not judged; seconds say nothing of it."""


@dataclasses.dataclass(eq=False, slots=True)
class Load:
    """Clients that go on until they are told to stop."""

    target: str
    vocab: int
    go: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Clear while nobody may ask anything new."""
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    requests: int = 0
    endings: dict[str, int] = dataclasses.field(default_factory=dict)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def run(self, seed: int) -> None:
        """One client after the other."""
        rng = random.Random(seed)
        with serving.Client(self.target, retries=0) as client:
            while not self.stop.is_set():
                self.go.wait()
                ending = self._one(client, rng)
                with self.lock:
                    self.requests += 1
                    self.endings[ending] = self.endings.get(ending, 0) + 1

    def end(self, threads: Iterable[threading.Thread]) -> None:
        """Tells all clients to stop, and waits for them."""
        self.stop.set()
        self.go.set()
        for thread in threads:
            thread.join()

    def _one(self, client: "serving.Client", rng: random.Random) -> str:
        kind = rng.choices(("ask", "hang up", "late", "wrong"), (70, 15, 10, 5))[0]
        # Short ones, since growth goes by the number of requests; now and then one that takes several chunks.
        prompt = [rng.randrange(self.vocab) for _ in range(rng.choices((rng.randrange(1, 12), 100), (49, 1))[0])]
        if kind == "wrong":
            prompt = [*prompt, self.vocab]
        timeout = rng.uniform(0.005, 0.3) if kind == "late" else 60.0
        options = {"max_tokens": rng.randrange(1, 8), "seed": rng.randrange(9), "timeout": timeout}
        try:
            stream = client.generate(prompt, **options)
            if kind == "hang up":
                read: Delta | None = next(iter(stream), None)
                stream.cancel()
                return "hung up" if read is not None else "ended"
            return stream.result.finish_reason
        except serving.ServiceError as error:
            return error.code.name.lower()


def resident_mib(pid: int) -> float:
    """Memory of a process, on Linux."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files(pid: int) -> int:
    """Descriptors of a process, on Linux."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def growth(requests: list[int], memory: list[float]) -> float:
    """MiB per 1,000 requests after the warm-up: the slope of the least-squares line."""
    first = int(WARM_UP * len(requests))
    if len(requests) - first < 3:
        return 0.0
    slope = np.polyfit(np.asarray(requests[first:], float), np.asarray(memory[first:], float), 1)[0]
    return float(1000 * slope)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; the exit code."""
    flags = program.parse(Flags, "serving.service.soak", arguments)
    return program.run(lambda: start(flags))


def start(flags: Flags) -> int:
    """Loads, watches and judges the target, or a server of its own."""
    with server_at(flags.target, flags.pid, ("--max-num-seqs", str(flags.clients))) as server:
        return soak(flags, server)


def soak(flags: Flags, server: Server) -> int:
    """Loads, watches and judges a server."""
    with serving.Client(server.target) as client:
        load = Load(server.target, client.model().vocab_size)
        threads = [threading.Thread(target=load.run, args=(flags.seed + n,)) for n in range(flags.clients)]
        for thread in threads:
            thread.start()
        try:
            requests, memory, files = watch(flags.minutes, server.pid, load, client)
        finally:
            # Also when somebody has had enough: the program could not end while they go on.
            load.end(threads)
        problems = list(leftovers(client, time.monotonic() + 10))
    print(f"{load.requests} requests in {flags.minutes} min, endings {load.endings}")
    if server.pid is not None:
        slope = growth(requests, memory)
        tenths = " ".join(f"{value:.0f}" for value in memory[:: max(len(memory) // 10, 1)])
        print(f"memory {slope:+.3f} MiB per 1,000 requests, open files {files[0]} to {files[-1]}; in MiB: {tenths}")
        if flags.mib_per_thousand is not None and slope > flags.mib_per_thousand:
            problems.append(f"memory grows by {slope:.2f} MiB per 1,000 requests, at most {flags.mib_per_thousand}")
        if files[-1] > files[int(WARM_UP * len(files))] + 2:
            problems.append(f"open files grow from {files[int(WARM_UP * len(files))]} to {files[-1]}")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def watch(minutes: float, pid: int | None, load: Load, client: Any) -> tuple[list[int], list[float], list[int]]:
    """Requests, memory and open files, `POINTS` times over the whole time.

    They are read while nothing runs and nothing is cached: what a step borrows and what the allocator keeps for the
    next one, tens of MiB, come and go.
    """
    requests, memory, files = [], [], []
    for _ in range(POINTS):
        load.go.set()
        time.sleep(60 * minutes / POINTS)
        if pid is not None:
            load.go.clear()
            settle(client, time.monotonic() + 10)
            client.flush()
            memory.append(resident_mib(pid))
            files.append(open_files(pid))
        requests.append(load.requests)
        if sys.stderr.isatty():
            print(f"{load.requests} requests", end="\r", file=sys.stderr, flush=True)
    load.go.set()
    return requests, memory, files


def settle(client: Any, end: int | float) -> dict[str, Any]:
    """Waits, until `end`, for what is on its way out; returns the service's figures then."""
    while (stats := client.stats())["running"] + stats["waiting"] and time.monotonic() < end:
        time.sleep(0.02)
    return stats


def leftovers(client: Any, end: int | float) -> list[str]:
    """What is still there when nobody asks any more; waits a little for what is on its way out."""
    settle(client, end)
    client.flush()
    stats = client.stats()
    names = ("running", "waiting", "pages_used", "slots_used", "compilations")
    return [f"{name} is {stats[name]:g} at the end, expected 0" for name in names if stats[name]]


if __name__ == "__main__":
    sys.exit(main())
