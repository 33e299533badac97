"""Choice of a backend: a named one runs or refuses, `None` tries them in order."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax

Implementation = Literal["xla", "mosaic", "triton"] | None

ORDER = ("mosaic", "triton", "xla")
"""Order of trial when no implementation is named."""


def require_gpu(name: str) -> None:
    """Raises `NotImplementedError` unless JAX's default backend is a GPU."""
    if (platform := jax.default_backend()) != "gpu":
        raise NotImplementedError(f"{name} runs on GPUs, the default backend is {platform!r}")


def select(implementation: Implementation, **backends: Callable[..., Any]) -> Callable[..., Any]:
    """A callable that runs `implementation`, or with `None` the first backend that does not refuse.

    A backend refuses by raising `NotImplementedError` with its reason while it is traced. When a named
    one is unknown or refuses, that error is raised; when all refuse, an `ExceptionGroup` of all reasons.
    """
    if implementation is not None:
        if implementation not in backends:
            known = ", ".join(name for name in ORDER if name in backends)
            raise NotImplementedError(f"implementation {implementation!r} does not exist here; there is: {known}")
        return backends[implementation]
    return functools.partial(_first, [backends[name] for name in ORDER if name in backends])


def _first(candidates: list[Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
    refusals: list[NotImplementedError] = []
    for candidate in candidates:
        try:
            return candidate(*args, **kwargs)
        except NotImplementedError as refusal:
            refusals.append(refusal)
    raise ExceptionGroup("no implementation serves this call", refusals)
