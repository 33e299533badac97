"""Compressed queries and latents of a block, interpreted, against their definition."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas.draft import latents
from tests.pallas.comparison import relative

TOKENS, QUERY, RANK, SHARED, PAGE = 8, 256, 128, 64, 4
CHANNELS, EPS = 1000, 1e-5


def norm(x, weights):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * weights


def test_block_over_pages():
    """Six of eight tokens are stored, from the last row of a page over another one onto the dummy page."""
    rng = np.random.default_rng(0)
    query, latent = rng.standard_normal((2, TOKENS, QUERY)), rng.standard_normal((2, TOKENS, RANK + SHARED))
    squares = rng.uniform(1, 20, (3, TOKENS))
    angle = rng.uniform(0, 6, (TOKENS, SHARED // 2))
    weights = [np.asarray(jnp.asarray(rng.uniform(0.5, 2, n), jnp.bfloat16), np.float64) for n in (QUERY, RANK)]
    pool = np.asarray(jnp.asarray(rng.standard_normal((5, PAGE, RANK + SHARED)), jnp.bfloat16), np.float64)

    f32 = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    norms = latents.Norms(*(jnp.asarray(x, jnp.bfloat16) for x in weights))
    places = latents.Places(*(jnp.asarray(x, jnp.int32) for x in ([4, 2, 0], [3], [6])))
    given = f32(query), f32(latent), f32(squares), f32(np.concatenate([np.cos(angle), np.sin(angle)])), places
    run = jax.jit(
        lambda pool, q, x, s, a, p: latents.store(q, x, s, CHANNELS, norms, a, pool, p, EPS, plgpu.InterpretGPUParams())
    )
    half, after = run(jnp.asarray(pool, jnp.bfloat16), *given)

    divide = 1 / np.sqrt(squares.sum(axis=0) / CHANNELS + EPS)[:, None]
    assert relative(np.asarray(half, np.float64) * 16, norm(query.sum(axis=0) * divide, weights[0])) < 5e-4
    line = latent.sum(axis=0) * divide
    line[:, :RANK] = norm(line[:, :RANK], weights[1])
    turned = (line[:, RANK::2] + 1j * line[:, RANK + 1 :: 2]) * np.exp(1j * angle)
    line[:, RANK::2], line[:, RANK + 1 :: 2] = turned.real, turned.imag
    expected = pool.copy()
    expected[4, 3], expected[2] = line[0], line[1:5]
    after = np.asarray(after, np.float64)
    assert relative(after[[4, 2]], expected[[4, 2]]) < 3e-3
    np.testing.assert_array_equal(after[[0, 1, 3]], pool[[0, 1, 3]])
    np.testing.assert_array_equal(after[4, :3], pool[4, :3])
