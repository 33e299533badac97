"""Activations as pairs of 8-bit floats: exact for bfloat16, in the order of the products, on a scale of each token."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas.moe import mosaic_pair

split = jax.jit(mosaic_pair.split, static_argnums=1)
"""A compiler that drops conversions would leave the low parts empty."""


def joined(pairs, tokens):
    """What `pairs` stand for, inputs in order, in float64."""
    rows = np.asarray(pairs.rows.astype(jnp.float32), np.float64).reshape(-1, 2, pairs.rows.shape[1])
    values = (rows[:, 0] + rows[:, 1] / 16) * np.asarray(pairs.unit, np.float64)[:, None]
    return values[:tokens, mosaic_pair.place(np.arange(values.shape[1]))]


def test_interleave_and_place_agree():
    x = np.arange(3 * 64.0, dtype=np.float32).reshape(3, 64)
    where = mosaic_pair.place(np.arange(64))
    np.testing.assert_array_equal(np.sort(where), np.arange(64))
    np.testing.assert_array_equal(np.asarray(mosaic_pair.interleave(jnp.asarray(x)))[:, where], x)


@pytest.mark.parametrize("size", [2.0**-100, 1.0, 2.0**100])
def test_bfloat16_values_are_exact(size):
    """All eight significant bits, down to 2^-12 of the token's largest value."""
    rng = np.random.default_rng(3)
    x = rng.uniform(1, 2, (2, 256)) * 2.0 ** -rng.integers(0, 13, (2, 256)) * rng.choice([-1, 1], (2, 256)) * size
    x = jnp.asarray(x, jnp.bfloat16).at[1, :9].set(0)
    np.testing.assert_array_equal(joined(split(x, 4), 2), np.asarray(x.astype(jnp.float32), np.float64))


def test_small_values_are_rounded_on_the_tokens_scale():
    x = jnp.asarray(np.r_[np.full(31, 3e-6), 1.0][None], jnp.bfloat16)
    error = np.abs(joined(split(x, 1), 1) - np.asarray(x.astype(jnp.float32), np.float64))
    assert 0 < error.max() <= 2.0**-20


def test_tokens_do_not_touch_each_other():
    x = np.random.default_rng(5).standard_normal((4, 32)).astype(np.float32)
    x[1, 3], x[2, 4], x[3] = np.nan, np.inf, 0
    values = joined(split(jnp.asarray(x, jnp.bfloat16), 4), 4)
    assert not np.isfinite(values[1:3]).any()
    np.testing.assert_array_equal(values[0], np.asarray(jnp.asarray(x[0], jnp.bfloat16).astype(jnp.float32)))
    assert not values[3].any()


def test_both_parts_are_what_e4m3_rounds_to():
    x = (np.random.default_rng(7).standard_normal((1, 128)) * 2.0 ** -np.arange(0, 16, 0.125)).astype(np.float32)
    pairs = split(jnp.asarray(x), 1)
    scaled = np.asarray(mosaic_pair.interleave(jnp.asarray(x)), np.float64)[0] / float(pairs.unit[0])
    high = scaled.astype(ml_dtypes.float8_e4m3fn)
    low = ((scaled - high.astype(np.float64)) * 16).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(pairs.rows).astype(np.float32), np.stack([high, low]).astype(np.float32))
