"""Grouped products with bfloat16 weights, for comparison: as many bytes as fit, so 64 experts of a layer."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from pallas import timing
from pallas.benchmark import FLOPS, Measurement, measured_peer
from pallas.moe import gate as gates
from pallas.moe.shapes import CHOSEN, INNER, LATENT

EXPERTS, ROWS = 64, 146
"""146 rows are an expert's even share of 8192 tokens times sixteen."""


@jax.jit
def library(rows: jax.Array, up: jax.Array, down: jax.Array, sizes: jax.Array) -> jax.Array:
    """`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu` for both products, without an activation."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    tiles = {"block_m": 128, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 4}
    run = partial(ragged_dot, group_sizes=sizes, transpose_rhs=True, **tiles)
    return run(run(rows, up)[:, :INNER], down)


@jax.jit
def ours(x: jax.Array, ids: jax.Array, weights: jax.Array, packed: gates.PackedExperts) -> jax.Array:
    """The same rows through our kernels, with gathering, activation and weighted sum."""
    return gates.run(None, x, ids, weights, packed)


def grouped_lines() -> Iterator[Measurement]:
    """One line: 9344 rows of 64 experts."""
    rows = EXPERTS * ROWS
    tokens = rows // CHOSEN
    packed = gates.random_experts(EXPERTS, LATENT, INNER)
    x, _, weights = gates.random_tokens(tokens, EXPERTS, LATENT, CHOSEN)
    first = jnp.arange(tokens, dtype=jnp.int32)[:, None] * CHOSEN
    ids = (first + jnp.arange(CHOSEN, dtype=jnp.int32)[None]) % EXPERTS
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (rows, LATENT), (EXPERTS, 2 * INNER, LATENT), (EXPERTS, LATENT, INNER)
    wide = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes)]
    sizes = jnp.full(EXPERTS, ROWS, jnp.int32)
    mine = x, ids, weights / CHOSEN, packed
    measured = timing.median_call_us(lambda carry: ours(carry, *mine[1:]), x, 1, repeats=5, enqueued=3)
    floor = 2.0 * rows * 3 * LATENT * INNER / FLOPS * 1e6

    def theirs() -> float:
        return timing.median_call_us(lambda carry: library(carry, *wide[1:], sizes), wide[0], 1, repeats=3, enqueued=2)

    other = measured_peer("ragged_dot_mgpu, bfloat16, products only", theirs)
    yield Measurement(f"{rows} rows of {EXPERTS} experts", measured, floor, None, (other,))
