"""The routing kernel: interpreted against a definition in float64, lowered for CUDA at Kimi K3's shapes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas import moe
from pallas.moe import mosaic_route

INTERPRET = plgpu.InterpretGPUParams()
EXPERTS = 128


def definition(logits, bias, k, scaling):
    """Experts by biased score, the lower id first among equals, and their share of the chosen scores."""
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    ids = np.lexsort((np.broadcast_to(np.arange(logits.shape[1]), logits.shape), -(scores + bias)), axis=1)[:, :k]
    chosen = np.take_along_axis(scores, ids, 1)
    return ids, scaling * chosen / chosen.sum(1, keepdims=True)


def draw(tokens, ties):
    rng = np.random.default_rng(4)
    logits = rng.integers(-3, 4, (tokens, EXPERTS)) if ties else rng.standard_normal((tokens, EXPERTS)) * 4
    return logits.astype(np.float32), np.zeros(EXPERTS) if ties else rng.standard_normal(EXPERTS)


@pytest.mark.parametrize("ties", [False, True])
def test_interpreted(ties):
    logits, bias = draw(3, ties)
    arrays = jnp.asarray(logits), jnp.asarray(bias, jnp.float32)
    routing = mosaic_route.choose(*arrays, k=5, scaling=2.5, interpret=INTERPRET)
    ids, weights = definition(logits, bias, 5, 2.5)
    np.testing.assert_array_equal(routing.ids, ids)
    np.testing.assert_allclose(routing.weights, weights, rtol=1e-6)


@pytest.mark.parametrize("tokens", [1, 16, 8192])
def test_lowers_for_cuda(tokens):
    spec = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    run = jax.jit(partial(mosaic_route.choose, k=16, scaling=2.5))
    assert "mosaic_gpu" in run.trace(spec((tokens, 896)), spec((896,))).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("experts", "k", "reason"), [(96, 4, "multiples of 128, got 96"), (256, 33, "1 to 32 experts a token, got 33")]
)
def test_refusals_name_the_reason(experts, k, reason):
    with pytest.raises(NotImplementedError, match=reason):
        mosaic_route.require_supported(experts, k)


def test_gradients_are_those_of_the_portable_form(monkeypatch):
    """The weights' gradient passes through the kernel; its choice is taken as it was made."""
    monkeypatch.setattr(mosaic_route, "choose", partial(mosaic_route.choose, interpret=INTERPRET))
    logits, bias = (jnp.asarray(array, jnp.float32) for array in draw(2, ties=False))

    def loss(logits, run):
        return jnp.sum(run(logits).weights * jnp.arange(1.0, 5.0)[None])

    actual = jax.grad(loss)(logits, lambda x: mosaic_route.differentiable(x, bias, 4, 2.5))
    expected = jax.grad(loss)(logits, lambda x: moe.choose(x, bias, k=4, scaling=2.5, implementation="xla"))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-8)
