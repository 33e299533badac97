"""Choice of a backend. `None` tries an op's backends in order until one does not refuse.

A named backend runs wherever the op has it. On a device that it is not made for it raises `WrongDevice`, without its
package `MissingPackage`. An op that has no kernel of that name, or whose kernel refuses the shape or type of this call
or the generation of the GPU, runs as with `None` and says so in a note with the reason, once per traced call: so a
whole model runs with the kernels that there are, and nothing asked for by name is replaced in silence.
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


HOPPER, BLACKWELL = 9, 10
"""Major compute capability: of H100 and H200; of B200 and GB300."""
NAMES = {HOPPER: "9.x (H100, H200)", BLACKWELL: "10.x (B200, GB300)"}
MULTIPROCESSORS = 132
"""Of an H200, which kernels are cut for where there is no GPU."""


class MissingInstruction(NotImplementedError):
    """A kernel uses what this generation of GPUs does not have; other kernels of the op's family may run there."""


def capability() -> tuple[int, int]:
    """Compute capability of the default device; 9.0, what kernels are lowered for, where there is no GPU.

    0.0 of a GPU that has another kind of name for it.
    """
    major, _, minor = _capability_text().partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def _capability_text() -> str:
    return str(getattr(jax.devices()[0], "compute_capability", "9.0"))


def multiprocessors() -> int:
    """Of the default device."""
    return getattr(jax.devices()[0], "core_count", MULTIPROCESSORS)


def warps_multiply() -> bool:
    """Whether products are those of single warps (`mma.sync`): only Hopper has those of warpgroups (`wgmma`)."""
    return capability()[0] != HOPPER


def require_capability(name: str, *served: int) -> None:
    """Raises unless the default device is a GPU of a generation in `served`: what a kernel has been compiled for.

    `WrongDevice` where no Mosaic kernel runs; `MissingInstruction` where this one does not.
    """
    require_gpu(name)
    if (major := capability()[0]) not in served:
        kind = MissingInstruction if major in NAMES else WrongDevice
        needed = " or ".join(NAMES[generation] for generation in served)
        raise kind(f"{name} needs compute capability {needed}, this GPU has {_capability_text()}")


def require_hopper(name: str) -> None:
    """`require_capability` for kernels of warpgroup products, which no other generation has."""
    require_capability(name, HOPPER)


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
