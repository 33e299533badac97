"""What must hold before the times of routing and of the layer's front mean anything."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from pallas import timing
from pallas.benchmark import Check, compiled
from pallas.dispatch import Implementation
from pallas.moe import api
from pallas.moe.shapes import CHOSEN, EXPERTS, LATENT, RANK_SHARED, WIDTH
from pallas.moe.types import Routing

SCALING = 2.5


@jax.jit
def draw(tokens: jax.Array, router: jax.Array, *matrices: jax.Array) -> tuple[jax.Array, ...]:
    """Random bfloat16 arrays of the arguments' shapes, and a correction bias."""
    keys = jax.random.split(jax.random.key(3), 3 + len(matrices))
    made = [jax.random.normal(key, a.shape, jnp.bfloat16) for key, a in zip(keys, (tokens, router, *matrices))]
    bias = jax.random.normal(keys[-1], (router.shape[0],), jnp.float32) / 8
    return bias, made[0], *(matrix / jnp.bfloat16(64) for matrix in made[1:])


@jax.jit
def expected_routing(logits: jax.Array, bias: jax.Array) -> Routing:
    """By a sort; the lower expert first among equals."""
    scores = jax.nn.sigmoid(logits)
    _, ids = jax.lax.top_k(scores + bias[None], CHOSEN)
    chosen = jnp.take_along_axis(scores, ids, axis=1)
    return Routing(ids, SCALING * chosen / jnp.sum(chosen, axis=1, keepdims=True))


@jax.jit
def definition(bias: jax.Array, x: jax.Array, router: jax.Array, *matrices: jax.Array) -> tuple:
    """Routing and products in float32 at full precision."""
    product = partial(jnp.einsum, "nd,ed->ne", x.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    logits, *products = (product(matrix.astype(jnp.float32)) for matrix in (router, *matrices))
    return expected_routing(logits, bias), products


def _routing_checks(name: str, actual: Routing, expected: Routing) -> Iterator[Check]:
    yield Check(f"{name}: other experts", float(jnp.sum(actual.ids != expected.ids)), 0.0)
    yield Check(f"{name}: weights", timing.relative_rms(actual.weights, expected.weights), 1e-5)


def checks(implementation: Implementation, gpu: bool) -> Iterator[Check]:
    """Forced ties, many tokens, and the front with few; smaller matrices where there is no GPU."""
    options = {"k": CHOSEN, "scaling": SCALING, "implementation": implementation}
    ties = jax.random.randint(jax.random.key(1), (64, EXPERTS), -3, 4).astype(jnp.float32)
    none = jnp.zeros(EXPERTS, jnp.float32)
    yield from _routing_checks("routing, ties", api.choose(ties, none, **options), expected_routing(ties, none))
    width, *sizes = (WIDTH, EXPERTS, LATENT, 2 * RANK_SHARED) if gpu else (256, 128, 64, 64)
    spec = jax.ShapeDtypeStruct

    def front(bias: jax.Array, x: jax.Array, router: jax.Array, *matrices: jax.Array) -> tuple:
        return tuple(api.front(x, router, bias, matrices, **options))

    def shapes_for(tokens: int) -> tuple:
        return jax.eval_shape(draw, *(spec((rows, width), jnp.bfloat16) for rows in (tokens, *sizes)))

    cases = {tokens: shapes_for(tokens) for tokens in ((1, 3, 8) if gpu else (3,))}
    programs = {(tokens, "run"): (jax.jit(front), shapes) for tokens, shapes in cases.items()}
    programs |= {(tokens, "definition"): (definition, shapes) for tokens, shapes in cases.items()}
    done = compiled(programs)
    for tokens, (_, *shapes) in cases.items():
        arrays = draw(*(jnp.zeros(shape.shape, shape.dtype) for shape in shapes))
        (routing, products), (wanted, others) = (done[tokens, what](*arrays) for what in ("run", "definition"))
        yield from _routing_checks(f"front, {tokens} rows", routing, wanted)
        for product, other in zip(products, others, strict=True):
            yield Check(f"front, {tokens} rows, {other.shape[1]} columns", timing.relative_rms(product, other), 3e-3)
