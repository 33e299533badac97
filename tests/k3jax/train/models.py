"""A model that compiles within seconds and still has every kind of layer."""

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config, KdaConfig, MlaConfig, MoeConfig
from k3jax.train.forward import Batch

LENGTH = 16


def small(vocab_size: int = 320) -> K3Config:
    """KDA with a dense MLP, then two MLA layers with experts, in two AttnRes blocks."""
    base = vocab_size - 256
    return K3Config(
        vocab_size=vocab_size,
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
        bos_token_id=base,
        eos_token_id=base + 2,
        pad_token_id=base + 255,
    )


def batch(config: K3Config, rows: int, seed: int = 0) -> Batch:
    """Random ids; the last row ends in padding."""
    ids = np.random.default_rng(seed).integers(0, config.bos_token_id, (rows, LENGTH + 1)).astype(np.int32)
    ids[-1, -5:] = config.pad_token_id
    weight = (ids[:, 1:] != config.pad_token_id).astype(np.float32)
    return Batch(jnp.asarray(ids), jnp.asarray(weight))


def awake(masters: dict, seed: int = 1) -> dict:
    """Parameters moved off their special initial values (zeros, ones), so that every path carries gradient."""
    leaves, structure = jax.tree.flatten(masters)
    generator = np.random.default_rng(seed)
    moved = [leaf + jnp.asarray(generator.normal(0, 0.1, leaf.shape), leaf.dtype) for leaf in leaves]
    return jax.tree.unflatten(structure, moved)
