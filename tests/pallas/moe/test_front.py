"""The front of the layer: one call for routing and all products of its input."""

import jax.numpy as jnp
import numpy as np

from pallas import moe
from tests.pallas.comparison import relative


def draw(tokens, sizes, width):
    rng = np.random.default_rng(6)
    x = rng.standard_normal((tokens, width))
    matrices = [rng.standard_normal((size, width)) / 16 for size in sizes]
    return jnp.asarray(x, jnp.bfloat16), [jnp.asarray(matrix, jnp.bfloat16) for matrix in matrices]


def test_front_is_products_and_a_choice():
    """Any leading axes; the choice is that of `choose`."""
    x, matrices = draw(2, (16, 8, 12), 32)
    bias = jnp.zeros(16)
    gate_up = matrices[2].reshape(2, 6, 32)
    routing, (latent, hidden) = moe.front(x, matrices[0], bias, (matrices[1], gate_up), k=3, scaling=2.0)
    logits = jnp.einsum("nd,ed->ne", x.astype(jnp.float32), matrices[0].astype(jnp.float32), precision="highest")
    expected = moe.choose(logits, bias, k=3, scaling=2.0)
    np.testing.assert_array_equal(routing.ids, expected.ids)
    np.testing.assert_allclose(routing.weights, expected.weights, rtol=1e-6)
    assert latent.shape == (2, 8)
    wanted = np.einsum("nd,ifd->nif", *(np.asarray(array.astype(jnp.float32)) for array in (x, gate_up)))
    assert relative(np.asarray(hidden.astype(jnp.float32)), wanted) < 4e-3
