"""Drafts on disk: DeepSpec's layout, one safetensors file and a `config.json`."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from k3jax import params
from k3jax.config import ConfigError
from k3jax.dspark.config import DraftGqa, DSparkConfig
from k3jax.dspark.model import TARGET_IDS
from k3jax.dspark.tensors import TARGET_OFFSETS, draft_specs

WEIGHTS = "model.safetensors"


def config_json(config: DSparkConfig) -> dict[str, Any]:
    """The `config.json` of a GQA draft without rotary scaling; `DSparkConfig.from_hf` reads it back."""
    attention = config.attention
    if not isinstance(attention, DraftGqa) or config.rope.yarn is not None:
        raise ValueError("only GQA drafts without rotary scaling are written, this one is of another kind")
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "layer_types": ["full_attention"] * config.num_layers,
        "is_causal": config.causal,
        "target_layer_ids": list(config.target_layer_ids),
        "aux_hidden_stream": config.tap_stream,
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_kind,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
    }


def save(path: Path, config: DSparkConfig, parameters: params.Tree) -> None:
    """Writes `parameters` (the tree of `draft_specs`, and the ids of a reduced vocabulary) in bfloat16.

    float32 masters are rounded.
    """
    from safetensors.numpy import save_file

    path.mkdir(parents=True, exist_ok=True)
    arrays = dict(params.flatten(parameters))
    tensors: dict[str, np.ndarray] = {}
    for keys, spec in params.flatten(draft_specs(config)):
        values = np.asarray(jnp.asarray(arrays[keys]).astype(jnp.bfloat16))
        for part in spec.pieces:
            tensor = tensors.setdefault(part.name, np.zeros(part.shape, values.dtype))
            view = tensor.reshape(part.view)[part.take].transpose(part.permutation)
            view[...] = values[part.index]
    if (ids := parameters.get(TARGET_IDS)) is not None:
        tensors[TARGET_OFFSETS] = np.asarray(ids, np.int64) - np.arange(len(ids))
    save_file(tensors, path / WEIGHTS)
    (path / "config.json").write_text(json.dumps(config_json(config), indent=2) + "\n", encoding="utf-8")


def target_ids(file: Path, name: str, config: DSparkConfig) -> np.ndarray:
    """int32 [draft vocabulary]: the target's id of each of the draft's, from the offsets `name` in a safetensors file.

    Raises `ConfigError` unless they are distinct ids below `vocab_size`.
    """
    from safetensors import safe_open

    with safe_open(file, "numpy") as tensors:
        offsets = tensors.get_tensor(name)
    size, vocab = config.draft_vocab_size, config.vocab_size
    if offsets.shape != (size,) or not np.issubdtype(offsets.dtype, np.integer):
        problem = f"{name} is {offsets.dtype} {list(offsets.shape)}, expected integers [{size}] (draft_vocab_size)"
        raise ConfigError(f"{file} cannot be used", [problem])
    ids = np.arange(size, dtype=np.int64) + offsets.astype(np.int64)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if outside.size:
        at = int(outside[0])
        problem = f"{name}[{at}] gives the target's id {ids[at]}, expected 0 to {vocab - 1}"
        raise ConfigError(f"{file} cannot be used", [problem])
    if np.unique(ids).size < size:
        raise ConfigError(
            f"{file} cannot be used", [f"{name} gives a target id to two draft ids, expected distinct ids"]
        )
    return ids.astype(np.int32)
