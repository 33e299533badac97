"""Choice of a backend. `None` tries an op's backends in order until one does not refuse.

A named backend runs wherever the op has it, and where it then refuses (no GPU, a shape that it does not serve) that
refusal is raised: what was asked for by name is never replaced in silence. An op that has no kernel of that name, or
none for calls of this kind and so does not offer it to `select`, runs as with `None` and says so in a note, once per
traced call: a whole model can be run with the kernels that there are.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal

import jax

Implementation = Literal["xla", "mosaic", "triton"] | None

ORDER = ("mosaic", "triton", "xla")
"""Order of trial when no implementation is named."""

NOTES = logging.getLogger("pallas.dispatch")
"""Gets the notes on ops without a kernel of the name asked for."""


def require_gpu(name: str) -> None:
    """Raises `NotImplementedError` unless JAX's default backend is a GPU."""
    if (platform := jax.default_backend()) != "gpu":
        raise NotImplementedError(f"{name} runs on GPUs, the default backend is {platform!r}")


def select(implementation: Implementation, **backends: Callable[..., Any]) -> Callable[..., Any]:
    """A callable that runs `implementation`, or the first backend that does not refuse: see above for the rule.

    A backend refuses by raising `NotImplementedError` with its reason while it is traced; when all refuse, an
    `ExceptionGroup` holds all reasons. Raises `ValueError` for a name that no op knows.
    """
    if implementation is not None:
        if implementation not in ORDER:
            raise ValueError(f"implementation {implementation!r} is unknown; choose one of {', '.join(ORDER)}")
        if implementation in backends:
            return backends[implementation]
        some = next(iter(backends.values()))
        NOTES.warning("note %s.%s: no %s kernel for this call", some.__module__, some.__name__, implementation)
    return functools.partial(_first, [backends[name] for name in ORDER if name in backends])


def _first(candidates: list[Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
    refusals: list[NotImplementedError] = []
    for candidate in candidates:
        try:
            return candidate(*args, **kwargs)
        except NotImplementedError as refusal:
            refusals.append(refusal)
    raise ExceptionGroup("no implementation serves this call", refusals)
