"""Benchmark of the Markov walk: a gate, then the time of a draft's block at Kimi K3's shapes."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas import gemv, timing
from pallas.benchmark import Check, Measurement, compiling, floor_us, measured_peer
from pallas.dispatch import Implementation
from pallas.markov import api, mosaic

CALLS = 8
"""Of a program, each from the last token of the one before."""


class Shape(NamedTuple):
    """Tokens, vocabulary and rank of a walk."""

    tokens: int
    vocabulary: int
    rank: int

    @property
    def bytes_moved(self) -> int:
        """Head and scales read once for each token, as for one alone; logits and noise read, scores written."""
        return self.tokens * self.vocabulary * (self.rank + 16)


K3, SMALL = Shape(7, 163840, 256), Shape(3, 328, 128)


@functools.partial(jax.jit, static_argnums=0)
def draw(shape: Shape, seed: int = 0) -> tuple[Any, ...]:
    """Random arguments of `walk`: logits, noise and biases of about the same size."""
    keys = jax.random.split(jax.random.key(seed), 4)
    logits = jax.random.normal(keys[3], (shape.tokens + 1, shape.vocabulary)) * 16
    noise = jax.random.gumbel(keys[0], (shape.tokens, shape.vocabulary))
    table, head = (jax.random.normal(key, (shape.vocabulary, shape.rank), jnp.bfloat16) for key in keys[1:3])
    return logits, noise, jnp.float32(shape.rank**-0.5), jnp.int32(shape.vocabulary - 1), table, gemv.quantize(head)


def interpreted(*arguments: Any) -> api.Walk:
    """`api.walk` by the kernel without a GPU."""
    *rest, head = arguments
    cut = mosaic.Settings(groups=2, blocks=1, slots=2)
    return api.Walk(*mosaic.walk(*rest, *head, interpret=plgpu.InterpretGPUParams(), settings=cut))


def gate(implementation: Implementation = None) -> list[Check]:
    """Tokens and scores against the portable walk.

    Without a GPU and a named implementation the kernel is interpreted.
    """
    gpu = jax.default_backend() == "gpu"
    shape, checks = K3 if gpu else SMALL, []
    walk = functools.partial(api.walk, implementation=implementation) if gpu or implementation else interpreted
    runs = jax.jit(walk), jax.jit(functools.partial(api.walk, implementation="xla"))
    for seed in range(3):
        inputs = draw(shape, seed)
        ours, other = (run(*inputs) for run in runs)
        checks.append(Check(f"scores, draw {seed}", timing.relative_rms(ours.score, other.score), 1e-5))
        checks.append(Check(f"tokens, draw {seed}", float(jnp.sum(ours.token != other.token)), 0.0))
    return checks


def chain(implementation: Implementation) -> Callable[..., jax.Array]:
    """A program of walks, each of which begins where the last one ended."""

    def run(anchor: jax.Array, logits: Any, noise: Any, scale: Any, table: Any, head: Any) -> jax.Array:
        for _ in range(CALLS):
            anchor = api.walk(logits, noise, scale, anchor, table, head, implementation=implementation).token[-1]
        return anchor

    return jax.jit(run)


def measure() -> Iterator[Measurement]:
    """Times the walk on the present GPU, beside one product and one argmax at a time."""
    logits, noise, scale, anchor, table, head = draw(K3)
    rest = logits, noise, scale, table, head
    runs = compiling({kind: (chain(kind), (anchor, *rest)) for kind in (None, "xla")})

    def time(kind: Implementation) -> float:
        run = runs[kind].result()
        return timing.device_call_us(lambda carry: run(carry, *rest), anchor, CALLS)

    name = f"{K3.tokens} tokens, {K3.rank} -> {K3.vocabulary}, int8"
    peer = measured_peer("XLA, token by token", lambda: time("xla"))
    yield Measurement(name, time(None), floor_us(float(K3.bytes_moved)), None, (peer,))
