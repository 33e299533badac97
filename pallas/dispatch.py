"""Choice of a backend. `None` tries an op's backends in order until one does not refuse.

A named backend runs wherever the op has it. On a device that it is not made for it raises `WrongDevice`, without its
package `MissingPackage`. An op that has no kernel of that name, or whose kernel refuses the shape or type of this call,
runs as with `None` and says so in a note with the reason, once per traced call: so a whole model runs with the kernels
that there are, and nothing asked for by name is replaced in silence.
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


class WrongDevice(NotImplementedError):
    """A kernel was asked for on a device that it is not made for."""


class MissingPackage(NotImplementedError):
    """A kernel was asked for whose package is not installed."""


def require_gpu(name: str) -> None:
    """Raises `WrongDevice` unless JAX's default backend is a GPU."""
    if (platform := jax.default_backend()) != "gpu":
        raise WrongDevice(f"{name} runs on GPUs, the default backend is {platform!r}")


def require_hopper(name: str) -> None:
    """Raises `WrongDevice` unless the default device has the instructions that the Mosaic kernels use."""
    require_gpu(name)
    capability = str(getattr(jax.devices()[0], "compute_capability", "9.0"))
    if not capability.startswith("9."):
        raise WrongDevice(f"{name} needs compute capability 9.x (H100, H200), this GPU has {capability}")


def select(implementation: Implementation, **backends: Callable[..., Any]) -> Callable[..., Any]:
    """A callable that runs `implementation`, or the first backend that does not refuse: see above for the rule.

    A backend refuses by raising `NotImplementedError` with its reason while it is traced; when all refuse, an
    `ExceptionGroup` holds all reasons. Raises `ValueError` for a name that no op knows.
    """
    if implementation is not None and implementation not in ORDER:
        raise ValueError(f"implementation {implementation!r} is unknown; choose one of {', '.join(ORDER)}")
    order = [backends[name] for name in ORDER if name in backends]
    if implementation is None:
        return functools.partial(_first, order)
    return functools.partial(_named, implementation, backends.get(implementation), order)


def _named(
    name: str, wanted: Callable[..., Any] | None, order: list[Callable[..., Any]], *args: Any, **kwargs: Any
) -> Any:
    reason = "there is none"
    if wanted is not None:
        try:
            return wanted(*args, **kwargs)
        except (WrongDevice, MissingPackage):
            raise
        except NotImplementedError as refusal:
            if len(order) == 1:
                raise
            reason = str(refusal)
    NOTES.warning("note %s.%s: no %s kernel for this call: %s", order[-1].__module__, order[-1].__name__, name, reason)
    return _first([backend for backend in order if backend is not wanted], *args, **kwargs)


def _first(candidates: list[Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
    refusals: list[NotImplementedError] = []
    for candidate in candidates:
        try:
            return candidate(*args, **kwargs)
        except NotImplementedError as refusal:
            refusals.append(refusal)
    raise ExceptionGroup("no implementation serves this call", refusals)
