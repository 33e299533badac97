"""Lines of the benchmark for the front of the layer and for routing alone, on the slice of one of eight devices."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas import timing
from pallas.benchmark import Measurement, compiling, floor_us, measured_peer
from pallas.dispatch import Implementation
from pallas.moe import api
from pallas.moe.shapes import CHOSEN, EXPERTS, LATENT, RANK_SHARED, WIDTH
from pallas.moe.types import Routing

SIZES = EXPERTS, LATENT, 2 * RANK_SHARED
COPIES = 16
"""Copies of the weights that a program walks over, 1.4 GB: many times the L2 cache."""
FRONT = ((1, 26.0), (8, None))
"""Tokens and goal of a line."""
ROUTING = ((1, 3.0), (8, 3.0))


@jax.jit
def draw(seed: int) -> tuple[jax.Array, ...]:
    """Router, latent down-projection, shared gate and up."""
    keys = jax.random.split(jax.random.key(seed), len(SIZES))
    return tuple(jax.random.normal(key, (size, WIDTH), jnp.bfloat16) / 64 for key, size in zip(keys, SIZES))


def inputs(tokens: int, width: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Random activations or logits, and a correction bias."""
    keys = jax.random.split(jax.random.key(tokens), 2)
    return jax.random.normal(keys[0], (tokens, width), dtype), jax.random.normal(keys[1], (EXPERTS,), jnp.float32) / 8


def _linked(x: jax.Array, routing: Routing, *products: jax.Array) -> jax.Array:
    """`x`, as something that needs all results."""
    needed = [routing.ids, routing.weights, *products]
    return x + 0 * sum(array[:, :1].astype(x.dtype) for array in needed)


def fronts(implementation: Implementation) -> Callable[..., jax.Array]:
    """A program of dependent calls, one with each copy of the weights."""

    def run(x: jax.Array, bias: jax.Array, *copies: tuple[jax.Array, ...]) -> jax.Array:
        for router, *matrices in copies:
            options = {"k": CHOSEN, "scaling": 2.5, "implementation": implementation}
            routing, products = api.front(x, router, bias, tuple(matrices), **options)
            x = _linked(x, routing, *products)
        return x

    return jax.jit(run)


def routings(implementation: Implementation) -> Callable[..., jax.Array]:
    """A program of dependent calls."""

    def run(logits: jax.Array, bias: jax.Array) -> jax.Array:
        for _ in range(COPIES):
            routing = api.choose(logits, bias, k=CHOSEN, scaling=2.5, implementation=implementation)
            logits = _linked(logits, routing)
        return logits

    return jax.jit(run)


def programs() -> Mapping[Any, Future[Callable[..., Any]]]:
    """Everything that `lines` needs, being compiled, by what is timed, tokens and backend."""
    spec = jax.ShapeDtypeStruct
    bias = spec((EXPERTS,), jnp.float32)
    copies = (tuple(spec((size, WIDTH), jnp.bfloat16) for size in SIZES),) * COPIES
    wanted: dict[Any, tuple[Any, tuple]] = {}
    for kind in (None, "xla"):
        for tokens, _ in ROUTING:
            wanted["routing", tokens, kind] = routings(kind), (spec((tokens, EXPERTS), jnp.float32), bias)
        for tokens, _ in FRONT:
            wanted["front", tokens, kind] = fronts(kind), (spec((tokens, WIDTH), jnp.bfloat16), bias, *copies)
    return compiling(wanted)


def lines(ready: Mapping[Any, Future[Callable[..., Any]]]) -> Iterator[Measurement]:
    """One small XLA kernel between two calls is included."""

    def time(key: tuple[str, int, Implementation], x: jax.Array, *rest: Any) -> float:
        run = ready[key].result()
        return timing.device_call_us(lambda carry: run(carry, *rest), x, COPIES)

    for tokens, goal in ROUTING:
        x, bias = inputs(tokens, EXPERTS, jnp.float32)
        measured = time(("routing", tokens, None), x, bias)
        other = measured_peer("XLA", partial(time, ("routing", tokens, "xla"), x, bias))
        yield Measurement(f"routing, {tokens} tokens", measured, floor_us(4.0 * tokens * EXPERTS), goal, (other,))
    copies = tuple(draw(seed) for seed in range(COPIES))
    for tokens, goal in FRONT:
        args = *inputs(tokens, WIDTH, jnp.bfloat16), *copies
        measured = time(("front", tokens, None), *args)
        other = measured_peer("XLA", partial(time, ("front", tokens, "xla"), *args))
        name = f"front with routing, {tokens} tokens, slice of 1/8"
        yield Measurement(name, measured, floor_us(2.0 * WIDTH * sum(SIZES)), goal, (other,))
