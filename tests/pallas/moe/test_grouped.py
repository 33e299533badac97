"""Grouped experts for training: against a loop over pairs, its gradient, and the order of rows itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas.moe import grouped
from pallas.moe.types import DenseExperts

EXPERTS, K, LATENT, WIDTH = 6, 2, 8, 12
BETA, LINEAR_BETA = 1.5, 4.0


def problem(tokens: int, seed: int = 0, only: int = EXPERTS):
    """Inputs of a layer whose tokens use the first `only` experts."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(only)[:K] for _ in range(tokens)]).astype(np.int32)
    shapes = {"x": (tokens, LATENT), "gate_up": (EXPERTS, 2, WIDTH, LATENT), "down": (EXPERTS, LATENT, WIDTH)}
    arrays = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    return arrays["x"], ids, rng.uniform(0.1, 1, ids.shape).astype(np.float32), arrays["gate_up"], arrays["down"]


def by_pair(x, ids, weights, gate_up, down):
    """Every (token, expert) pair on its own, in float64."""
    x, weights, gate_up, down = (np.asarray(array, np.float64) for array in (x, weights, gate_up, down))
    output = np.zeros_like(x)
    for token, row in enumerate(ids):
        for expert, weight in zip(row, weights[token], strict=True):
            gate, linear = gate_up[expert] @ x[token]
            bounded = LINEAR_BETA * np.tanh(linear / LINEAR_BETA)
            activation = BETA * np.tanh(gate / BETA) / (1 + np.exp(-gate)) * bounded
            output[token] += weight * (down[expert] @ activation)
    return output


def run(x, ids, weights, gate_up, down):
    options = {"beta": BETA, "linear_beta": LINEAR_BETA}
    return grouped.experts(x, ids, weights, DenseExperts(gate_up, down), **options)


@pytest.mark.parametrize(("tokens", "only"), [(1, EXPERTS), (37, EXPERTS), (40, 2), (33, 3)])
def test_the_layer_equals_a_loop_over_pairs(tokens, only):
    arrays = problem(tokens, only=only)
    mine = jax.jit(run)(*map(jnp.asarray, arrays))
    np.testing.assert_allclose(mine, by_pair(*arrays), rtol=2e-5, atol=2e-6)


def test_the_gradient_is_the_slope_of_the_loop():
    x, ids, weights, gate_up, down = problem(9, seed=1)
    direction = [np.random.default_rng(2).normal(size=array.shape) for array in (x, weights, gate_up, down)]
    target = np.random.default_rng(3).normal(size=x.shape)

    def loop(step):
        moved = [a + step * d for a, d in zip((x, weights, gate_up, down), direction, strict=True)]
        return float(np.sum(target * by_pair(moved[0], ids, *moved[1:])))

    def loss(x, weights, gate_up, down):
        return jnp.sum(jnp.asarray(target, jnp.float32) * run(x, jnp.asarray(ids), weights, gate_up, down))

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*map(jnp.asarray, (x, weights, gate_up, down)))
    slope = sum(float(np.sum(np.asarray(g, np.float64) * d)) for g, d in zip(gradient, direction, strict=True))
    assert slope == pytest.approx((loop(1e-5) - loop(-1e-5)) / 2e-5, rel=1e-4)


@pytest.mark.parametrize(("tokens", "only"), [(5, EXPERTS), (64, EXPERTS), (50, 2)])
def test_every_pair_has_a_row_of_its_expert(tokens, only):
    _, ids, *_ = problem(tokens, only=only)
    block = grouped.block_size(ids.size, EXPERTS)
    plan = jax.jit(grouped.plan, static_argnums=(1, 2))(jnp.asarray(ids), EXPERTS, block)
    row, filled = np.asarray(plan.row).reshape(-1), np.asarray(plan.filled)
    assert len(set(row.tolist())) == ids.size == filled.sum()
    assert filled[row].all()
    np.testing.assert_array_equal(np.asarray(plan.pair)[row], np.arange(ids.size))
    np.testing.assert_array_equal(np.asarray(plan.expert)[row // block], ids.reshape(-1))


def test_blocks_grow_with_an_experts_share():
    sizes = [grouped.block_size(pairs, 32) for pairs in (8, 1 << 14, 1 << 17, 1 << 24)]
    assert sizes == [16, 32, 256, 512]


def test_taking_rows_adds_the_gradients_of_equal_indices():
    table, index = jnp.arange(12.0).reshape(4, 3), jnp.asarray([2, 0, 2, 3, 2], jnp.int32)
    np.testing.assert_array_equal(grouped.take_rows(table, index), np.asarray(table)[np.asarray(index)])
    weight = np.arange(15.0, dtype=np.float32).reshape(5, 3)
    gradient = jax.grad(lambda table: jnp.sum(grouped.take_rows(table, index) * weight))(table)
    expected = np.zeros((4, 3), np.float32)
    np.add.at(expected, np.asarray(index), weight)
    np.testing.assert_array_equal(gradient, expected)
