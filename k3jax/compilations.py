"""How often and how long XLA compiles, from JAX's own events."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Counts compilations while it is entered, and the time of the calls through it that compiled."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def __enter__(self) -> "Compilations":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`. A call that compiles returns as soon as its work is enqueued, so its time is that of compiling."""
        before, start = self.count, time.perf_counter()
        result = function(*args)
        if self.count > before:
            self.seconds += time.perf_counter() - start
        return result

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        self.count += event == _EVENT
