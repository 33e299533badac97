"""The best alternatives of a large vocabulary, found without sorting it."""

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import logprobs


@pytest.mark.parametrize("size", [700, 5000])
def test_the_best_are_those_of_a_sort(size):
    """With many equal values, which come in the order of their ids, some rows flat and one full of minus infinity."""
    rng = np.random.default_rng(size)
    values = np.round(rng.standard_normal((5, size)) * 4).astype(np.float32) / 2
    values[1, :] = 1.0
    values[2, : size // 2] = -np.inf
    values[3, :] = -np.inf
    values[3, 650] = 0.5
    best, ids = logprobs.top(jnp.asarray(values), 4)
    order = np.argsort(-values, axis=1, kind="stable")[:, :4]
    np.testing.assert_array_equal(ids[:3], order[:3])
    np.testing.assert_array_equal(best, np.take_along_axis(values, order, axis=1))
    assert int(ids[3, 0]) == 650
