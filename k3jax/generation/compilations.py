"""How often and how long XLA compiles, from JAX's own events."""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax

_COMPILE = "/jax/core/compile/backend_compile_duration"
_LOWER = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_TRACE = "/jax/core/compile/jaxpr_trace_duration"


class Compilations:
    """Counts compilations while it is entered, and the seconds that calls through it spend on them."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._tracing = self._rest = 0.0

    def __enter__(self) -> "Compilations":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """`function(*args, **options)`, with its tracing, lowering and compilation added to `seconds`.

        Wall time would not do: a call that compiles may also wait for the device.
        """
        self._tracing = self._rest = 0.0
        result = function(*args, **options)
        self.seconds += self._tracing + self._rest
        return result

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _TRACE:
            # Functions traced inside another one report too; the outermost one holds them all.
            self._tracing = max(self._tracing, duration_secs)
        elif event in (_COMPILE, _LOWER):
            self._rest += duration_secs
            self.count += event == _COMPILE
