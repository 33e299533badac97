"""What an op's `bench.py` offers to `python -m k3jax.bench kernels`: checks that must pass, then lines of a table.

Such a module has `gate(implementation) -> list[Check]`, quick and interpreted or portable where there is no GPU, and
`measure() -> Iterator[Measurement]`, which needs one.
"""

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from pallas import timing

BANDWIDTH = 4.3e12
"""Bytes per second of a device-to-device copy on an H200, read plus written."""
FLOPS = 790e12
"""bfloat16 operations per second of a large matrix product on an H200."""
THREADS = 12
"""Programs compiled at the same time: machine code is made outside Python's lock."""


class Check(NamedTuple):
    """One comparison of the gate: relative RMS error against the bound it must keep."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error keeps the bound; a non-finite error does not."""
        return self.error <= self.bound


class Peer(NamedTuple):
    """Another implementation of a line: measured in this run, or published; without a time, `name` says why."""

    name: str
    time: float | None


class Measurement(NamedTuple):
    """One line of the table, times in microseconds; `floor` from bytes or arithmetic, `goal` None where none is set."""

    name: str
    measured: float
    floor: float
    goal: float | None
    peers: tuple[Peer, ...] = ()


def floor_us(moved: float) -> float:
    """Microseconds that moving so many bytes through device memory takes at least."""
    return moved / BANDWIDTH * 1e6


def measured_peer(name: str, measure: Callable[[], float]) -> Peer:
    """The peer's time, or the reason why it has none here."""
    try:
        return Peer(name, measure())
    except ImportError as error:
        return Peer(f"{name}: not installed ({error.name or error})", None)
    except Exception as error:  # a peer's own failure, whatever it is, must not end our table
        return Peer(f"{name}: {type(error).__name__}: {error}"[:90], None)


def compiled(programs: dict[str, tuple[Any, tuple]]) -> dict[str, Callable[..., Any]]:
    """Every jitted function, lowered for its arguments and compiled beside the others.

    `programs` maps a name to the function and its arguments, which may be abstract. One that cannot be compiled raises
    its error when it is called, so that it takes no other with it.
    """
    return {name: program.result() for name, program in compiling(programs).items()}


def compiling(programs: dict[str, tuple[Any, tuple]]) -> dict[str, Future[Callable[..., Any]]]:
    """`compiled` without the wait: programs are taken up in their order, and each is there as soon as it is ready."""

    def build(program: tuple[Any, tuple]) -> Callable[..., Any]:
        function, arguments = program
        try:
            with timing.TURN:
                lowered = function.lower(*arguments)
            return lowered.compile()
        except Exception as error:  # told by whoever calls the program
            return functools.partial(_fail, error)

    pool = ThreadPoolExecutor(THREADS)
    started = {name: pool.submit(build, program) for name, program in programs.items()}
    pool.shutdown(wait=False)
    return started


def _fail(error: Exception, *_: Any) -> Any:
    raise error
