"""The MoE layer as a module: expert parallelism over eight devices against one device."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import sharding
from k3jax.config import K3Config
from k3jax.layers.moe import LatentMoe, expert_parallel
from k3jax.params import layer_specs, map_tree


@pytest.fixture(scope="module")
def layer(tiny_config):
    moe = dataclasses.replace(tiny_config.moe, num_experts=16)
    config: K3Config = dataclasses.replace(tiny_config, moe=moe)
    rng = np.random.default_rng(0)

    def draw(spec):
        if spec.dtype == "uint8":
            low, high = (0, 256) if spec.init == "packed" else (121, 125)
            return jnp.asarray(rng.integers(low, high, spec.shape), jnp.uint8)
        return jnp.asarray(0.2 * rng.standard_normal(spec.shape), jnp.float32)

    return LatentMoe(config, map_tree(draw, layer_specs(config, 1)["ffn"]), None)


def test_expert_parallel_equals_one_device(layer, tiny_config):
    mesh = sharding.layout("dep8").mesh
    x = jnp.asarray(np.random.default_rng(1).standard_normal((8, 3, tiny_config.hidden_size)), jnp.float32)
    expected, _ = layer(x)
    actual = expert_parallel(layer, mesh, "expert")(x)
    assert len(actual.sharding.device_set) == 8
    assert np.abs(np.asarray(expected)).max() > 0.1
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)
