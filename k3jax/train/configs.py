"""Configurations that the trainer knows by name."""

from collections.abc import Callable, Mapping

from k3jax.config import K3Config, KdaConfig, MlaConfig, MoeConfig, nano


def tiny(vocab_size: int = 768) -> K3Config:
    """Every feature of K3 in a model that trains on one CPU core within seconds."""
    base = vocab_size - 256
    return K3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        num_layers=5,
        intermediate_size=96,
        mla_layers=(3, 4),
        attn_res_block_size=2,
        kda=KdaConfig(num_heads=2, head_dim=16),
        mla=MlaConfig(
            num_heads=2, q_lora_rank=32, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
        ),
        moe=MoeConfig(
            num_experts=8, num_experts_per_token=2, num_shared_experts=2, intermediate_size=32, latent_size=32
        ),
        max_position_embeddings=4096,
        bos_token_id=base,
        eos_token_id=base + 2,
        pad_token_id=base + 255,
    )


CONFIGS: Mapping[str, Callable[[], K3Config]] = {"nano": nano, "tiny": tiny}
