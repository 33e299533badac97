import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.train.quantize import fake_quantize, pack

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def decode(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The released format by its definition, in float64."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values = np.where(codes & 8, -1.0, 1.0) * GRID[codes & 7]
    return values * np.repeat(2.0 ** (scale.astype(float) - 127), 32, axis=-1)


def weights(seed: int = 0, shape: tuple[int, ...] = (5, 7, 96)) -> jnp.ndarray:
    generator = np.random.default_rng(seed)
    return jnp.asarray(generator.normal(size=shape) * 10.0 ** generator.uniform(-6, 3, (*shape[:-1], 1)), jnp.float32)


def test_packed_bytes_decode_to_the_values_of_training_bit_for_bit() -> None:
    values = weights()
    packed, scale = pack(values)
    assert packed.shape == (5, 7, 48)
    assert scale.shape == (5, 7, 3)
    np.testing.assert_array_equal(
        decode(np.asarray(packed), np.asarray(scale)), np.asarray(fake_quantize(values), np.float64)
    )


def test_quantising_twice_changes_nothing() -> None:
    once = fake_quantize(weights(1))
    np.testing.assert_array_equal(fake_quantize(once), once)
    np.testing.assert_array_equal(once.astype(jnp.bfloat16).astype(jnp.float32), once)


def test_values_go_to_the_nearest_code_of_their_scale() -> None:
    values = np.asarray(weights(2), np.float64)
    packed, scale = pack(jnp.asarray(values, jnp.float32))
    step = np.repeat(2.0 ** (np.asarray(scale, float) - 127), 32, axis=-1)
    error = np.abs(values - decode(np.asarray(packed), np.asarray(scale)))
    nearest = np.abs(np.abs(values)[..., None] - GRID * step[..., None]).min(axis=-1)
    np.testing.assert_allclose(error, nearest, rtol=1e-6, atol=1e-12)
    assert (np.abs(values) / step).max() <= 7.0
    assert (np.abs(values) / step).reshape(5, 7, 3, 32).max(axis=-1).min() > 3.0


def test_known_codes() -> None:
    values = np.zeros(32, np.float32)
    values[:8] = [1, 2, 3, 4, -12, 12, 0.5, -0.5]
    packed, scale = pack(jnp.asarray(values * 1.0))
    assert int(scale[0]) == 128
    assert np.asarray(packed[:3]).tolist() == [0x21, 0x43, 0x7F]
    assert decode(np.asarray(packed), np.asarray(scale))[:8].tolist() == [1, 2, 3, 4, -12, 12, 0, 0]


def test_gradient_passes_through() -> None:
    gradient = jax.grad(lambda w: jnp.sum(fake_quantize(w) * jnp.arange(64, dtype=jnp.float32)[None]))(
        weights(3, (2, 64))
    )
    np.testing.assert_array_equal(gradient, np.broadcast_to(np.arange(64, dtype=np.float32), (2, 64)))


def test_zeros_and_extremes_stay_finite() -> None:
    values = jnp.asarray(np.stack([np.zeros(32), np.full(32, 1e-44), np.full(32, 3e38)]), jnp.float32)
    packed, scale = pack(values)
    assert np.asarray(scale).max() <= 252
    assert np.asarray(scale).min() >= 1
    assert np.isfinite(np.asarray(fake_quantize(values))).all()
    assert not np.asarray(packed[0]).any()


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="last axis has 40 inputs, expected a multiple of 32"):
        pack(jnp.zeros((2, 40)))
