"""Skinny-product benchmark: a gate, then device times at Kimi K3's shapes; each call reads other weights."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas import timing
from pallas.benchmark import Check, Measurement, compiled, floor_us, measured_peer
from pallas.dispatch import Implementation
from pallas.gemv import api

WIDTH = 7168
COPIES_OF = 1.5e9
"""Bytes of all copies of a matrix together: many times the L2 cache."""


class Line(NamedTuple):
    """Name, rows of activations, outputs, inputs, whether the issue's goal of 90 % of the bandwidth is set for it."""

    name: str
    tokens: int
    outputs: int
    inputs: int
    goal: bool


LINES = (
    Line("KDA in-projection", 1, 49376, WIDTH, True),
    Line("KDA in-projection", 8, 49376, WIDTH, True),
    Line("KDA o_proj", 1, WIDTH, 12288, True),
    Line("MLA in-projection", 1, 2112, WIDTH, False),
    Line("lm_head", 1, 163840, WIDTH, True),
    Line("lm_head", 16, 163840, WIDTH, True),
    Line("KDA in-projection, slice of 1/8", 1, 6288, WIDTH, False),
    Line("MoE front, slice of 1/8", 1, 6016, WIDTH, False),
)


@functools.partial(jax.jit, static_argnums=0)
def draw(line: Line, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Random activations and weights."""
    keys = jax.random.split(jax.random.key(seed), 2)
    x = jax.random.normal(keys[0], (line.tokens, line.inputs), jnp.bfloat16)
    return x, jax.random.normal(keys[1], (line.outputs, line.inputs), jnp.bfloat16)


CHECKED = (
    Line("KDA in-projection", 1, 49376, WIDTH, False),
    Line("KDA o_proj", 16, WIDTH, 12288, False),
    Line("MLA in-projection", 8, 2112, WIDTH, False),
)


def gate(implementation: Implementation = None) -> list[Check]:
    """Three ways to cut a matrix against the product in float32; a small one where there is no GPU."""
    gpu = jax.default_backend() == "gpu"
    checks = []
    for line in CHECKED if gpu else (Line("small", 3, 72, 256, False),):
        x, weights = draw(line)
        highest = jax.lax.Precision.HIGHEST
        expected = jnp.einsum("mk,nk->mn", x.astype(jnp.float32), weights.astype(jnp.float32), precision=highest)
        error = timing.relative_rms(api.matmul(x, weights, implementation=implementation), expected)
        checks.append(Check(f"{line.name}, {line.tokens} rows", error, 3e-3))
    return checks


def copies_of(line: Line) -> int:
    """Copies of the weights that the calls of a program walk over."""
    return max(2, round(COPIES_OF / (2 * line.outputs * line.inputs)))


def chain(implementation: Implementation) -> Callable[..., jax.Array]:
    """A program of dependent products, one with each copy of the weights."""

    def run(x: jax.Array, *weights: jax.Array) -> jax.Array:
        for matrix in weights:
            x = x + 0 * api.matmul(x, matrix, implementation=implementation)[:, :1]
        return x

    return jax.jit(run)


def measure() -> Iterator[Measurement]:
    """Times every line on the present GPU, one by one."""

    def shape(*size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, jnp.bfloat16)

    programs: dict[Any, tuple[Any, tuple]] = {}
    for line in LINES:
        shapes = shape(line.tokens, line.inputs), *(shape(line.outputs, line.inputs),) * copies_of(line)
        for kind in ("ours", "xla"):
            programs[line, kind] = chain(None if kind == "ours" else "xla"), shapes
    runs = compiled(programs)
    for line in LINES:
        x, _ = draw(line)
        weights = tuple(draw(line, seed)[1] for seed in range(copies_of(line)))

        def time(kind: str, line: Line = line, x: jax.Array = x, weights: tuple = weights) -> float:
            return timing.median_call_us(lambda carry: runs[line, kind](carry, *weights), x, len(weights), repeats=5)

        moved = 2.0 * (line.outputs * line.inputs + line.tokens * (line.outputs + line.inputs))
        name = f"{line.name}, {line.tokens} x {line.inputs} -> {line.outputs}"
        floor = floor_us(moved)
        peer = measured_peer("XLA", lambda time=time: time("xla"))
        yield Measurement(name, time("ours"), floor, floor / 0.9 if line.goal else None, (peer,))
