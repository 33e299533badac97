"""The small model of the training tests, as fixtures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import K3Config, KdaConfig, MlaConfig, MoeConfig
from k3jax.train import specs
from k3jax.train.forward import Batch

LENGTH = 16


@pytest.fixture(scope="session")
def small_model() -> K3Config:
    """KDA with a dense MLP, then two MLA layers with experts, in two AttnRes blocks: compiles within seconds."""
    return K3Config(
        vocab_size=600,
        hidden_size=32,
        num_layers=3,
        intermediate_size=48,
        mla_layers=(1, 2),
        attn_res_block_size=2,
        kda=KdaConfig(num_heads=2, head_dim=16),
        mla=MlaConfig(
            num_heads=2, q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
        ),
        moe=MoeConfig(
            num_experts=8, num_experts_per_token=2, num_shared_experts=1, intermediate_size=32, latent_size=32
        ),
        bos_token_id=344,
        eos_token_id=346,
        pad_token_id=599,
    )


@pytest.fixture(scope="session")
def batch(small_model: K3Config) -> Batch:
    """Sixteen rows of random ids; the last row ends in padding."""
    ids = np.random.default_rng(0).integers(0, small_model.bos_token_id, (16, LENGTH + 1)).astype(np.int32)
    ids[-1, -5:] = small_model.pad_token_id
    weight = (ids[:, 1:] != small_model.pad_token_id).astype(np.float32)
    return Batch(jnp.asarray(ids), jnp.asarray(weight))


@pytest.fixture(scope="session")
def awake(small_model: K3Config) -> dict:
    """Master parameters moved off their special initial values (zeros, ones), so that every path carries gradient."""
    start = jax.jit(lambda key: specs.initialize(small_model, key))(jax.random.key(0))
    generator = np.random.default_rng(1)
    # In NumPy: JAX would compile a sum for every shape.
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf + generator.normal(0, 0.1, leaf.shape).astype(np.float32)), jax.device_get(start)
    )
