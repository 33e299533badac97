"""The layer's front for one token as one kernel: interpreted on small shapes, lowered for CUDA at Kimi K3's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas import moe
from pallas.moe import mosaic_front
from tests.pallas.comparison import relative

INTERPRET = plgpu.InterpretGPUParams()


def draw(sizes, width, tokens=1):
    rng = np.random.default_rng(6)
    x = rng.standard_normal((tokens, width))
    matrices = [rng.standard_normal((size, width)) / 16 for size in sizes]
    return jnp.asarray(x, jnp.bfloat16), [jnp.asarray(matrix, jnp.bfloat16) for matrix in matrices]


def test_interpreted():
    """Tiles of the router are lower; the last tile of a matrix overlaps the one before."""
    x, matrices = draw((128, 72), 512)
    bias = jnp.asarray(np.random.default_rng(7).standard_normal(128), jnp.float32)
    settings = mosaic_front.Settings(height=48, stages=2, calm=1, blocks=1)
    run = partial(mosaic_front.front, k=4, scaling=2.5, interpret=INTERPRET, settings=settings)
    routing, products = jax.jit(run)(x, matrices, bias)
    wide, *others = (np.asarray(array.astype(jnp.float32), np.float64) for array in (x, *matrices))
    logits, expected = (wide @ matrix.T for matrix in others)
    assert relative(np.asarray(products[0].astype(jnp.float32)), expected) < 3e-3
    scores = 1 / (1 + np.exp(-logits))
    ids = np.argsort(-(scores + np.asarray(bias)), axis=1)[:, :4]
    np.testing.assert_array_equal(routing.ids, ids)
    chosen = np.take_along_axis(scores, ids, 1)
    np.testing.assert_allclose(routing.weights, 2.5 * chosen / chosen.sum(1, keepdims=True), rtol=1e-5)


def test_lowers_for_cuda_in_one_turn():
    spec = jax.ShapeDtypeStruct
    sizes = (896, 3584, 1536)
    settings = mosaic_front.settings_for(sizes)
    assert settings is not None
    assert settings.height == 48
    assert mosaic_front.settings_for((896, 3584, 12288)) is None
    matrices = [spec((rows, 7168), jnp.bfloat16) for rows in sizes]
    run = jax.jit(partial(mosaic_front.front, k=16, scaling=2.5))
    traced = run.trace(spec((1, 7168), jnp.bfloat16), matrices, spec((896,), jnp.float32))
    assert "moe_front" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("tokens", "sizes", "width", "reason"),
    [
        (2, (128, 64), 512, "one row, got 2"),
        (1, (128, 60), 512, "multiples of 8"),
        (1, (128, 64), 320, "multiples of 256"),
        (1, (96, 64), 512, "multiples of 128, got 96"),
        (1, (128, 9000), 256, "one tile a multiprocessor, got 9128"),
    ],
)
def test_refusals_name_the_reason(tokens, sizes, width, reason):
    x, matrices = draw(sizes, width, tokens)
    with pytest.raises(NotImplementedError, match=reason):
        mosaic_front.require_supported(x, matrices, 4)


def test_gradients_are_those_of_the_portable_form(monkeypatch):
    def kernel(x, matrices, bias, *, k, scaling):
        return moe.front(x, matrices[0], bias, tuple(matrices[1:]), k=k, scaling=scaling)

    monkeypatch.setattr(mosaic_front, "front", kernel)
    x, (router, *matrices) = draw((16, 8, 12), 32)
    x, router, *matrices = (array.astype(jnp.float32) for array in (x, router, *matrices))
    bias = jnp.zeros(16)

    def loss(x, router, matrices, run):
        routing, products = run(x, router, matrices)
        return jnp.sum(routing.weights**3) + sum(jnp.sum(product**2) for product in products)

    run = jax.grad(loss, argnums=(0, 1, 2))
    actual = run(x, router, tuple(matrices), lambda x, r, m: mosaic_front.differentiable(x, r, bias, m, 3, 2.0))
    expected = run(x, router, tuple(matrices), lambda x, r, m: moe.front(x, r, bias, m, k=3, scaling=2.0))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), actual, expected)
