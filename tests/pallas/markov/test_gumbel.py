"""Noise made in a kernel is the noise of `jax.random`, interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas.markov import gumbel

STREAM, SHAPE = 3, (2, 300)


@functools.cache
def program():
    return jax.jit(functools.partial(gumbel.noise, stream=STREAM, shape=SHAPE, interpret=plgpu.InterpretGPUParams()))


@pytest.mark.parametrize(("seed", "position", "temperature"), [(0, 0, 1.0), (2**32 - 1, 40, 0.5), (7, 1 << 20, 0.0)])
def test_noise(seed, position, temperature):
    """Three blocks share 300 tokens, so the last one overlaps."""
    one = lambda x, kind: jnp.asarray([x], kind)  # noqa: E731
    noise, scale = program()(one(seed, jnp.uint32), one(position, jnp.int32), one(temperature, jnp.float32))
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(jnp.uint32(seed)), position), STREAM)
    rows = [jax.random.gumbel(jax.random.fold_in(key, place), SHAPE[1:]) for place in range(SHAPE[0])]
    np.testing.assert_allclose(noise, np.stack(rows) * (temperature > 0), rtol=1e-6, atol=1e-6)
    assert float(scale[0]) == (1 / temperature if temperature else 1.0)


@pytest.mark.slow
def test_lowers_for_cuda(monkeypatch):
    monkeypatch.setattr(gumbel, "require_capability", lambda *_: None)
    given = [jax.ShapeDtypeStruct((1,), kind) for kind in (jnp.uint32, jnp.int32, jnp.float32)]
    run = jax.jit(functools.partial(gumbel.noise, stream=STREAM, shape=(7, 163840)))
    assert "markov_noise" in run.trace(*given).lower(lowering_platforms=("cuda",)).as_text()


def test_refusals_name_the_reason():
    with pytest.raises(NotImplementedError, match="GPU"):
        gumbel.noise(*(jnp.zeros(1, kind) for kind in (jnp.uint32, jnp.int32, jnp.float32)), STREAM, SHAPE)
