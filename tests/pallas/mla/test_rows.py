"""Latents of several layers stored in one launch, interpreted, against their definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas.mla import mosaic_rows
from tests.pallas.comparison import relative

LAYERS, TOKENS, RANK, SHARED, PAGE, EPS = 2, 8, 512, 64, 4, 1e-5


def definition(product, weights, position, frequencies, interleaved):
    line = np.asarray(product, np.float64).sum(axis=0)
    latent = line[:, :RANK] / np.sqrt(np.mean(line[:, :RANK] ** 2, axis=-1, keepdims=True) + EPS)
    angle = position[:, None] * frequencies
    pairs = line[:, RANK:].reshape(TOKENS, -1, 2) if interleaved else np.stack(np.split(line[:, RANK:], 2, -1), -1)
    turned = 2.0 * (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)
    key = np.stack([turned.real, turned.imag], axis=-1 if interleaved else -2).reshape(TOKENS, SHARED)
    return np.concatenate([latent * np.asarray(weights, np.float64), key], axis=-1)


@pytest.mark.parametrize("interleaved", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_block_over_pages(interleaved):
    """Six of eight tokens are stored, from the last row of a page over another one onto the dummy page."""
    rng = np.random.default_rng(0)
    f32, bf16 = ((lambda x, kind=kind: jnp.asarray(x, kind)) for kind in (jnp.float32, jnp.bfloat16))
    products = [f32(rng.standard_normal((2, TOKENS, RANK + SHARED))) for _ in range(LAYERS)]
    norms = [bf16(rng.uniform(0.5, 2, RANK)) for _ in range(LAYERS)]
    pools = [bf16(rng.standard_normal((5, PAGE, RANK + SHARED))) for _ in range(LAYERS)]
    before = [np.asarray(pool, np.float64) for pool in pools]
    places = mosaic_rows.Places(*(jnp.asarray(x, jnp.int32) for x in ([4, 2, 0], [3], [6])))
    rotation = mosaic_rows.Rotation(100.0 ** -np.linspace(0, 1, SHARED // 2), 2.0, interleaved)
    run = jax.jit(lambda *given: mosaic_rows.store(*given, rotation, EPS, interpret=plgpu.InterpretGPUParams()))
    for product, norm, pool, after in zip(products, norms, before, run(products, norms, pools, places), strict=True):
        line = definition(product, norm, 3.0 + np.arange(TOKENS), rotation.frequencies, interleaved)
        expected = pool.copy()
        expected[4, 3], expected[2] = line[0], line[1:5]
        after = np.asarray(after, np.float64)
        assert relative(after[[4, 2]], expected[[4, 2]]) < 5e-3
        np.testing.assert_array_equal(after[[0, 1, 3]], pool[[0, 1, 3]])
        np.testing.assert_array_equal(after[4, :3], pool[4, :3])


def test_refusals_name_the_reason():
    with pytest.raises(NotImplementedError, match="bfloat16 of ranks in multiples of 512"):
        mosaic_rows.require_supported(jnp.zeros((2, 8, 320)), jnp.zeros((1, 1, 320), jnp.bfloat16), 256)
