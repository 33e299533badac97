"""Time of one call inside a chain, by the host's clock or the device's, and relative errors, for benchmarks."""

import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

TURN = threading.Lock()
"""Whoever traces a program or measures one has it: both need Python, and a host that is late leaves the device idle."""
TAKES, MOST_IDLE = 3, 0.25
"""How often a measurement is taken whose programs leave the device idle for more than this share of their time."""


def median_call_us(run: Callable[[Any], Any], carry: Any, calls: int, repeats: int = 7, enqueued: int = 4) -> float:
    """Median microseconds per call of a compiled program of `calls` chained calls.

    `run` maps the carry to the next one and may donate it. Several programs are enqueued before the clock is read, so
    launch and host time hide behind the device's.
    """
    carry = jax.block_until_ready(run(carry))
    samples = []
    with TURN:
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(enqueued):
                carry = run(carry)
            jax.block_until_ready(carry)
            samples.append((time.perf_counter() - start) / (enqueued * calls))
    return statistics.median(samples) * 1e6


def device_call_us(run: Callable[[Any], Any], carry: Any, calls: int, programs: int = 5) -> float:
    """Median microseconds per call by the device's clock: from the first kernel's start to the last one's end.

    What lies between two programs, in which the host hands over the next one, does not count, just as it does not when
    a captured graph is replayed. A program that waits for the host inside is taken again, and the shortest take counts.
    `run` maps the carry to the next one and may donate it. Raises `RuntimeError` where the profiler sees no kernels.
    """
    carry = jax.block_until_ready(run(carry))  # whatever it waits for, it does before it is our turn
    takes = []
    for _ in range(TAKES):
        with TURN:
            carry, spans = _take(run, carry, programs)
        if len(spans) < programs:
            raise RuntimeError(f"the profiler saw {len(spans)} kernels of {programs} programs on the device")
        parted = part_programs(spans, programs)
        takes.append(statistics.median(program_times(spans, programs)))
        if statistics.median(map(idle_share, parted)) <= MOST_IDLE:
            break
    return min(takes) / calls / 1e3


Spans = Sequence[tuple[float, float]]
"""(start, end) in nanoseconds of what ran on the device, by start."""


def _take(run: Callable[[Any], Any], carry: Any, programs: int) -> tuple[Any, Spans]:
    """The carry after so many programs, each waited for, and what ran meanwhile."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            for _ in range(programs):
                carry = jax.block_until_ready(run(carry))
        finally:
            jax.profiler.stop_trace()
        return carry, device_spans(Path(folder))


def device_spans(folder: Path) -> Spans:
    """All that ran on the GPU's streams in a stored profile."""
    spans = []
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            if plane.name.startswith("/device:GPU"):
                streams = [line for line in plane.lines if line.name.startswith("Stream")]
                events = itertools.chain.from_iterable(line.events for line in streams)
                spans += [(float(event.start_ns), float(event.start_ns + event.duration_ns)) for event in events]
    return sorted(spans)


def part_programs(spans: Spans, programs: int) -> list[Spans]:
    """What each of several programs ran, which the host waited for one by one: the widest gaps part them."""
    ends = list(itertools.accumulate((end for _, end in spans), max))
    gaps = [start - end for end, (start, _) in zip(ends, spans[1:])]
    widest = sorted(range(len(gaps)), key=gaps.__getitem__)[len(gaps) - (programs - 1) :]
    cuts = [0, *sorted(cut + 1 for cut in widest), len(spans)]
    return [spans[first:end] for first, end in itertools.pairwise(cuts)]


def program_times(spans: Spans, programs: int) -> list[float]:
    """How long each of several programs took: see `part_programs`."""
    return [elapsed(program) for program in part_programs(spans, programs)]


def elapsed(spans: Spans) -> float:
    """From the first start to the last end."""
    return max(end for _, end in spans) - spans[0][0]


def idle_share(spans: Spans) -> float:
    """Part of that time in which nothing ran."""
    ends = itertools.accumulate((end for _, end in spans), max)
    return sum(max(0.0, start - end) for end, (start, _) in zip(ends, spans[1:])) / elapsed(spans)


def relative_rms(actual: jax.Array, expected: jax.Array) -> float:
    """Root mean square of the difference over that of `expected`; infinite when either holds a non-finite value."""
    return float(_relative_rms(actual, expected))


@jax.jit  # one small program a shape, where every operation of it would be one by itself
def _relative_rms(actual: jax.Array, expected: jax.Array) -> jax.Array:
    actual, expected = actual.astype(jnp.float32), expected.astype(jnp.float32)
    finite = jnp.isfinite(actual).all() & jnp.isfinite(expected).all()
    scale = jnp.sqrt(jnp.mean(expected**2))
    ratio = jnp.sqrt(jnp.mean((actual - expected) ** 2)) / jnp.maximum(scale, 1e-30)
    return jnp.where(finite, ratio, jnp.inf)
