"""MoE benchmark: device times of the routed experts at Kimi K3's shapes, rotating over the experts of a whole layer."""

from collections.abc import Callable, Iterator
from concurrent.futures import wait
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas import timing
from pallas.benchmark import BANDWIDTH, FLOPS, Measurement, Peer, compiling, measured_peer
from pallas.dispatch import Implementation
from pallas.moe import bench_front, peers
from pallas.moe import gate as gates
from pallas.moe.shapes import CHOSEN, EXPERTS, INNER, LATENT, RANK_INNER
from pallas.moe.types import PackedExperts

gate = gates.gate


class Line(NamedTuple):
    """One line: tokens, expert width, calls in a program, goal and published figure in microseconds."""

    tokens: int
    inner: int
    calls: int
    goal: float | None
    published: Peer


LINES = (
    Line(1, INNER, 16, 85.0, Peer("Marlin, published", 163.0)),
    Line(1, RANK_INNER, 16, 20.0, Peer("Marlin, published", 71.5)),
    Line(8, INNER, 4, 600.0, Peer("Marlin, published", 876.0)),
    Line(8, RANK_INNER, 4, None, Peer("Marlin, published", 177.0)),
    Line(64, INNER, 2, 3200.0, Peer("Marlin, published, all experts", 5735.0)),
    Line(1000, INNER, 2, None, Peer("Marlin, published, 1024 tokens", 9062.0)),
    Line(8192, INNER, 2, 24000.0, Peer("Marlin, published", 44413.0)),
)
SHORT = 16
"""Calls of so few tokens end so soon that programs being traced beside them would hold up the next."""
PORTABLE = ((1, INNER), (8, INNER))
"""Lines that the portable form is timed for as well."""


def chain(calls: int, implementation: Implementation) -> Callable[..., jax.Array]:
    """A program of dependent calls; each reads other experts where there are several choices."""

    def run(x: jax.Array, ids: tuple[jax.Array, ...], weights: jax.Array, packed: PackedExperts) -> jax.Array:
        for index in range(calls):
            x = gates.run(implementation, x, ids[index % len(ids)], weights, packed)
        return x

    return jax.jit(run)


def arguments(line: Line, packed: PackedExperts) -> tuple[Any, ...]:
    """Random tokens, with weights that keep a chain of calls bounded; few tokens choose anew in every call."""
    choices = line.calls if line.tokens <= 16 else 1
    drawn = [gates.random_tokens(line.tokens, EXPERTS, LATENT, CHOSEN, seed) for seed in range(choices)]
    x, _, weights = drawn[0]
    return x, tuple(ids for _, ids, _ in drawn), weights / (100 * CHOSEN), packed


def floor_us(line: Line, args: tuple[Any, ...]) -> tuple[float, float]:
    """(microseconds at least, distinct experts): their bytes, or the products' arithmetic if that takes longer."""
    _, ids, _, packed = args
    distinct = float(np.mean([len(np.unique(np.asarray(choice))) for choice in ids]))
    moved = sum(array.nbytes for array in packed) / EXPERTS * distinct
    operations = 2.0 * line.tokens * CHOSEN * 3 * LATENT * line.inner
    return max(moved / BANDWIDTH, operations / FLOPS) * 1e6, distinct


def measure() -> Iterator[Measurement]:
    """Times every line on the present GPU, long ones as soon as their programs are ready, short ones when all are."""
    layers = {inner: gates.random_experts(EXPERTS, LATENT, inner) for inner in {line.inner for line in LINES}}
    inputs = {line: arguments(line, layers[line.inner]) for line in LINES}
    programs: dict[Any, tuple[Any, tuple]] = {}
    for line in sorted(LINES, key=lambda line: line.tokens, reverse=True):
        kinds = (None, "xla") if (line.tokens, line.inner) in PORTABLE else (None,)
        programs |= {(line, kind): (chain(line.calls, kind), inputs[line]) for kind in kinds}
    runs = compiling(programs)
    fronts = bench_front.programs()

    def time(line: Line, kind: str | None) -> float:
        run, (x, *rest) = runs[line, kind].result(), inputs[line]
        return timing.device_call_us(lambda carry: run(carry, *rest), x, line.calls)

    for line in sorted(LINES, key=lambda line: line.tokens, reverse=True):
        if line.tokens <= SHORT:
            wait([*runs.values(), *fronts.values()])
        floor, distinct = floor_us(line, inputs[line])
        measured, others = time(line, None), [line.published]
        if (line, "xla") in runs:
            others.append(measured_peer("XLA, same weights", partial(time, line, "xla")))
        width = "" if line.inner == INNER else ", slice of 1/8"
        name = f"{line.tokens} tokens, {distinct:.0f} experts{width}"
        yield Measurement(name, measured, floor, line.goal, tuple(others))
    del layers, inputs, programs, runs
    yield from bench_front.lines(fronts)
    yield from peers.grouped_lines()
