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
from pallas.gemv.int8 import Int8Matrix, restore

WIDTH = 7168
COPIES_OF, MOST_COPIES = 1e9, 16
"""Bytes of all copies of a matrix together, many times the L2 cache; and how many there may be."""
FEWEST_CALLS = 8
"""Of a program."""


class Line(NamedTuple):
    """Name, rows of activations, outputs, inputs; what share of the bandwidth is the goal; weights of 8 bits or 16."""

    name: str
    tokens: int
    outputs: int
    inputs: int
    goal: float | None = None
    int8: bool = False

    @property
    def weight_bytes(self) -> int:
        """Bytes of a copy of the matrix."""
        return self.outputs * self.inputs + 4 * self.outputs if self.int8 else 2 * self.outputs * self.inputs

    @property
    def bytes_moved(self) -> int:
        """Bytes of a call: the matrix, the activations and the products."""
        return self.weight_bytes + 2 * self.tokens * (self.outputs + self.inputs)


LINES = (
    Line("KDA in-projection", 1, 49376, WIDTH, 0.9),
    Line("KDA in-projection", 8, 49376, WIDTH, 0.9),
    Line("KDA o_proj", 1, WIDTH, 12288, 0.9),
    Line("MLA in-projection", 1, 2112, WIDTH),
    Line("lm_head", 1, 163840, WIDTH, 0.9),
    Line("lm_head", 16, 163840, WIDTH, 0.9),
    Line("KDA in-projection, slice of 1/8", 1, 6288, WIDTH),
    Line("MoE front, slice of 1/8", 1, 6016, WIDTH),
    Line("draft's gate and up, int8", 8, 28672, WIDTH, 0.85, int8=True),
    Line("draft's down, int8", 8, WIDTH, 14336, 0.85, int8=True),
    Line("draft's context, int8", 8, WIDTH, 35840, 0.85, int8=True),
    Line("draft's head, int8", 8, 163840, WIDTH, 0.85, int8=True),
    Line("Markov head, int8", 1, 163840, 256, int8=True),
)


@functools.partial(jax.jit, static_argnums=0)
def draw(line: Line, seed: int = 0) -> tuple[jax.Array, jax.Array | Int8Matrix]:
    """Random activations and weights."""
    keys = jax.random.split(jax.random.key(seed), 2)
    x = jax.random.normal(keys[0], (line.tokens, line.inputs), jnp.bfloat16)
    if not line.int8:
        return x, jax.random.normal(keys[1], (line.outputs, line.inputs), jnp.bfloat16)
    codes = jax.random.bits(keys[1], (line.outputs, line.inputs), jnp.uint8)
    scale = jnp.linspace(0.5, 1.5, line.outputs, dtype=jnp.float32) / 64
    return x, Int8Matrix(jax.lax.bitcast_convert_type(codes, jnp.int8), scale)


CHECKED = (
    Line("KDA in-projection", 1, 49376, WIDTH),
    Line("KDA o_proj", 16, WIDTH, 12288),
    Line("MLA in-projection", 8, 2112, WIDTH),
    Line("draft's down, int8", 8, WIDTH, 14336, int8=True),
    Line("draft's gate and up, int8", 3, 28672, WIDTH, int8=True),
    Line("Markov head, int8", 1, 163840, 256, int8=True),
)
SMALL = (Line("small", 3, 72, 256), Line("small, int8", 3, 72, 256, int8=True))


def gate(implementation: Implementation = None) -> list[Check]:
    """The ways to cut a matrix against the product in float32; small ones where there is no GPU."""
    checks = []
    for line in CHECKED if jax.default_backend() == "gpu" else SMALL:
        x, weights = draw(line)
        error = timing.relative_rms(api.matmul(x, weights, implementation=implementation), _expected(x, weights))
        checks.append(Check(f"{line.name}, {line.tokens} rows", error, 3e-3))
    return checks


@jax.jit
def _expected(x: jax.Array, weights: jax.Array | Int8Matrix) -> jax.Array:
    if isinstance(weights, Int8Matrix):
        weights = restore(weights.codes).astype(jnp.float32) * weights.scale[:, None]
    highest = jax.lax.Precision.HIGHEST
    return jnp.einsum("mk,nk->mn", x.astype(jnp.float32), weights.astype(jnp.float32), precision=highest)


def copies_of(line: Line) -> int:
    """Copies of the weights that the calls of a program walk over."""
    return max(2, min(MOST_COPIES, round(COPIES_OF / line.weight_bytes)))


def rounds(copies: int) -> int:
    """How often a program walks over the copies: its calls outlast the host's part in starting it."""
    return -(-FEWEST_CALLS // copies)


def chain(implementation: Implementation) -> Callable[..., jax.Array]:
    """A program of dependent products, with each copy of the weights in turn."""

    def run(x: jax.Array, *weights: jax.Array | Int8Matrix) -> jax.Array:
        for matrix in weights * rounds(len(weights)):
            x = x + 0 * api.matmul(x, matrix, implementation=implementation)[:, :1]
        return x

    return jax.jit(run)


def measure() -> Iterator[Measurement]:
    """Times every line on the present GPU, one by one.

    All programs are compiled before: XLA tries its own products on the device meanwhile, and no clock can tell whose
    kernels those are.
    """
    programs: dict[Any, tuple[Any, tuple]] = {}
    for line in LINES:
        x, matrix = jax.eval_shape(functools.partial(draw, line), 0)
        for kind in ("ours", "xla"):
            programs[line, kind] = chain(None if kind == "ours" else "xla"), (x, *(matrix,) * copies_of(line))
    runs = compiled(programs)
    for line in LINES:
        x, _ = draw(line)
        weights = tuple(draw(line, seed)[1] for seed in range(copies_of(line)))

        def time(kind: str, line: Line = line, x: jax.Array = x, weights: tuple = weights) -> float:
            run, calls = runs[line, kind], len(weights) * rounds(len(weights))
            return timing.device_call_us(lambda carry: run(carry, *weights), x, calls)

        name = f"{line.name}, {line.tokens} x {line.inputs} -> {line.outputs}"
        floor = floor_us(float(line.bytes_moved))
        peer = measured_peer("XLA", lambda time=time: time("xla"))
        yield Measurement(name, time("ours"), floor, floor / line.goal if line.goal else None, (peer,))
