"""Checkpoints written by the safetensors library, not by the code under test."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from k3jax.config import K3Config, KdaConfig, MlaConfig, MoeConfig

Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="session")
def config() -> K3Config:
    """Three layers (dense KDA, LatentMoE KDA, LatentMoE MLA) whose heads, experts and widths divide by 8."""
    return K3Config(
        vocab_size=64,
        hidden_size=32,
        num_layers=3,
        intermediate_size=48,
        mla_layers=(2,),
        attn_res_block_size=2,
        kda=KdaConfig(num_heads=8, head_dim=4),
        mla=MlaConfig(
            num_heads=8, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12
        ),
        moe=MoeConfig(
            num_experts=8, num_experts_per_token=2, num_shared_experts=2, intermediate_size=96, latent_size=64
        ),
        bos_token_id=60,
        eos_token_id=61,
        pad_token_id=63,
    )


@pytest.fixture(scope="session")
def tensors(config: K3Config) -> Tensors:
    """Random released tensors of `config`, listed by hand from the released inventory (specification section 5)."""
    rng = np.random.default_rng(1)
    kda, mla, moe, width = config.kda, config.mla, config.moe, config.hidden_size
    out: Tensors = {}

    def add(name: str, *shape: int, dtype: type = ml_dtypes.bfloat16) -> None:
        out[f"language_model.{name}"] = rng.standard_normal(shape).astype(np.float32).astype(dtype)

    def add_mlp(name: str, size: int) -> None:
        add(f"{name}.gate_proj.weight", size, width)
        add(f"{name}.up_proj.weight", size, width)
        add(f"{name}.down_proj.weight", width, size)

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        add(name, config.vocab_size, width)
    add("model.norm.weight", width)
    add("model.output_attn_res_norm.weight", width)
    add("model.output_attn_res_proj.weight", 1, width)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            add(f"{prefix}.{norm}.weight", width)
        for query in ("self_attention_res_proj", "mlp_res_proj"):
            add(f"{prefix}.{query}.weight", 1, width)
        attention = f"{prefix}.self_attn"
        if layer in config.mla_layers:
            add(f"{attention}.q_a_proj.weight", mla.q_lora_rank, width)
            add(f"{attention}.q_a_layernorm.weight", mla.q_lora_rank)
            add(f"{attention}.q_b_proj.weight", mla.num_heads * 12, mla.q_lora_rank)
            add(f"{attention}.kv_a_proj_with_mqa.weight", mla.kv_lora_rank + mla.qk_rope_head_dim, width)
            add(f"{attention}.kv_a_layernorm.weight", mla.kv_lora_rank)
            add(f"{attention}.kv_b_proj.weight", mla.num_heads * 20, mla.kv_lora_rank)
            add(f"{attention}.g_proj.weight", mla.num_heads * mla.v_head_dim, width)
            add(f"{attention}.o_proj.weight", width, mla.num_heads * mla.v_head_dim)
        else:
            inner = kda.num_heads * kda.head_dim
            for stream in "qkvg":
                add(f"{attention}.{stream}_proj.weight", inner, width)
            for stream in "qkv":
                add(f"{attention}.{stream}_conv1d.weight", inner, 1, 4, dtype=np.float32)
            add(f"{attention}.o_proj.weight", width, inner)
            add(f"{attention}.f_a_proj.weight", kda.head_dim, width)
            add(f"{attention}.f_b_proj.weight", inner, kda.head_dim)
            add(f"{attention}.b_proj.weight", kda.num_heads, width)
            add(f"{attention}.A_log", 128, dtype=np.float32)
            out[f"language_model.{attention}.A_log"][kda.num_heads :] = 0
            add(f"{attention}.dt_bias", inner, dtype=np.float32)
            add(f"{attention}.o_norm.weight", kda.head_dim, dtype=np.float32)
        if layer == 0:
            add_mlp(f"{prefix}.mlp", config.intermediate_size)
            continue
        block = f"{prefix}.block_sparse_moe"
        add(f"{block}.gate.weight", moe.num_experts, width)
        add(f"{block}.gate.e_score_correction_bias", moe.num_experts, dtype=np.float32)
        add(f"{block}.routed_expert_down_proj.weight", moe.latent_size, width)
        add(f"{block}.routed_expert_up_proj.weight", width, moe.latent_size)
        add(f"{block}.routed_expert_norm.weight", moe.latent_size)
        add_mlp(f"{block}.shared_experts", 2 * moe.intermediate_size)
        for expert in range(moe.num_experts):
            for part, rows, cols in (("w1", 96, 64), ("w3", 96, 64), ("w2", 64, 96)):
                name = f"language_model.{block}.experts.{expert}.{part}"
                out[f"{name}.weight_packed"] = rng.integers(0, 256, (rows, cols // 2), np.uint8)
                out[f"{name}.weight_scale"] = rng.integers(0, 253, (rows, cols // 32), np.uint8)
    return out


def write(path: Path, config: K3Config, tensors: Tensors, shards: int = 1) -> Path:
    """A checkpoint in the released layout: `model.safetensors`, or an index and `shards` files."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config.to_hf()))
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    weight_map = {name: f"part-{number % shards}.safetensors" for number, name in enumerate(tensors)}
    for file in sorted(set(weight_map.values())):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, path / file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.fixture(scope="session")
def _pristine(tmp_path_factory: pytest.TempPathFactory, config: K3Config, tensors: Tensors) -> Path:
    return write(tmp_path_factory.mktemp("pristine") / "checkpoint", config, tensors, shards=3)


@pytest.fixture
def checkpoint(_pristine: Path, tmp_path: Path) -> Path:
    """A sound checkpoint in three shards that a test may damage."""
    return Path(shutil.copytree(_pristine, tmp_path / "checkpoint"))


@pytest.fixture(scope="session")
def write_checkpoint() -> Callable[..., Path]:
    """The function `write`."""
    return write


@pytest.fixture
def edit() -> Callable[[Path, str, Callable[[np.ndarray], np.ndarray | None]], None]:
    """Replaces (or, with None, removes) one tensor in whatever shard has it, leaving the index alone."""

    def change(path: Path, name: str, function: Callable[[np.ndarray], np.ndarray | None]) -> None:
        for file in path.glob("*.safetensors"):
            content = load_file(file)
            if name in content:
                replacement = function(content.pop(name))
                save_file(content if replacement is None else {**content, name: replacement}, file)
                return
        raise AssertionError(f"{name} is in no shard")

    return change


@pytest.fixture(scope="session")
def same_bits() -> Callable[[object, object], None]:
    """Asserts that two trees of arrays are equal in structure, dtype and every bit."""

    def compare(left: object, right: object) -> None:
        def leaf(a: jax.Array, b: jax.Array) -> None:
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

        jax.tree.map(leaf, left, right)

    return compare


@pytest.fixture(scope="session")
def wider(config: K3Config) -> K3Config:
    """A configuration that differs from `config` in one width."""
    return dataclasses.replace(config, intermediate_size=64)
