"""Compiles the programs of an engine before it serves, several at a time."""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

THREADS = 4
"""Programs that are compiled at a time, at most; each takes some memory meanwhile."""


class Call(NamedTuple):
    """A jitted function and what it is called with."""

    function: Any
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    def run(self) -> Any:
        """Calls it."""
        return self.function(*self.args, **self.options)

    def lower(self) -> Any:
        """Traces it; what comes back can be compiled in any thread."""
        return self.function.lower(*self.args, **self.options)


def compile_all(calls: Mapping[str, Call], report: Callable[[str, float], None]) -> None:
    """Compiles every call; `report` gets the name of each, how many are done of how many, and its seconds.

    JAX keeps the machine code for calls with arguments of these shapes. Tracing is Python's, one after another.
    """
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        started = {pool.submit(_compile, call.lower()): name for name, call in calls.items()}
        for number, done in enumerate(as_completed(started), 1):
            report(f"{started[done]} ({number} of {len(started)})", done.result())


def _compile(lowered: Any) -> float:
    """Seconds that it takes."""
    start = time.perf_counter()
    lowered.compile()
    return time.perf_counter() - start
