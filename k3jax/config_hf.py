"""The released `config.json`: which keys mean what, which are fixed, which are inert."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# Keys of `text_config` with the field that each one fills.
_TEXT: dict[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "intermediate_size": "intermediate_size",
    "attn_res_block_size": "attn_res_block_size",
    "first_k_dense_replace": "first_moe_layer",
    "moe_layer_freq": "moe_layer_freq",
    "activation_situ_beta": "situ_beta",
    "activation_situ_linear_beta": "situ_linear_beta",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "initializer_range": "initializer_range",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
}
_MLA: dict[str, str] = {
    "num_attention_heads": "num_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "mla_norm_eps": "norm_eps",
}
_MOE: dict[str, str] = {
    "num_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_token",
    "num_shared_experts": "num_shared_experts",
    "moe_intermediate_size": "intermediate_size",
    "routed_expert_hidden_size": "latent_size",
    "routed_scaling_factor": "routed_scaling_factor",
}
_KDA: dict[str, str] = {
    "num_heads": "num_heads",
    "head_dim": "head_dim",
    "short_conv_kernel_size": "conv_kernel_size",
    "gate_lower_bound": "gate_lower_bound",
}
_LAYER_LISTS = ("full_attn_layers", "kda_layers")
_OPTIONAL = frozenset(
    ["mla_norm_eps", "initializer_range", "max_position_embeddings", "first_k_dense_replace", "moe_layer_freq"]
)
_INTEGER = frozenset(
    key
    for table in (_TEXT, _MLA, _MOE, _KDA)
    for key in table
    if key
    not in [
        "activation_situ_beta",
        "activation_situ_linear_beta",
        "rms_norm_eps",
        "initializer_range",
        "mla_norm_eps",
        "routed_scaling_factor",
        "gate_lower_bound",
    ]
)

# Keys that select a variant of the model; this code is the variant given here.
_FIXED: dict[str, Any] = {
    "hidden_act": "situ",
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "dtype": "bfloat16",
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
}
_FIXED_KDA: dict[str, Any] = {"use_full_rank_gate": True}
_WRAPPER_FIXED: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
_MAY_DIFFER = frozenset({"dtype", "use_cache", "architectures", "use_grouped_topk"})
_WRAPPER_OTHER = frozenset(
    [
        "text_config",
        "vision_config",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "media_placeholder_token_id",
        "image_placeholder",
        "ignore_index",
        "transformers_version",
        "auto_map",
        "quantization_config",
    ]
)

# Defaults that Hugging Face writes into every configuration; none of them reaches the model.
INERT = frozenset(
    [
        "add_cross_attention",
        "attention_bias",
        "attention_dropout",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "prefix",
        "problem_type",
        "pruned_heads",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "use_bfloat16",
        "_name_or_path",
        "rope_theta",
        "head_dim",
    ]
)

_QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
                "dynamic": False,
                "scale_dtype": "torch.uint8",
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
}


def listing(title: str, problems: Iterable[str]) -> str:
    """One error text with every problem on a line of its own."""
    return "\n  - ".join([title + ":", *problems])


def read_text(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Field values for `K3Config` and every problem found in an HF configuration."""
    problems: list[str] = []
    text = config
    if "text_config" in config:
        problems += _wrapper_problems(config)
        text = config["text_config"]
    if not isinstance(text, Mapping):
        return {}, [*problems, f"text_config is {text!r}, expected an object"]
    linear = text.get("linear_attn_config")
    if not isinstance(linear, Mapping):
        problems.append(f"linear_attn_config is {linear!r}, expected an object with num_heads, head_dim, layers")
        linear = {}
    known = {*_TEXT, *_MLA, *_MOE, *_FIXED, *INERT} | {
        "linear_attn_config",
        "quantization_config",
        "num_key_value_heads",
    }
    problems += _unknown(text, known, "")
    problems += _unknown(linear, {*_KDA, *_FIXED_KDA, *_LAYER_LISTS}, "linear_attn_config.")
    problems += _fixed(text, _FIXED, "") + _fixed(linear, _FIXED_KDA, "linear_attn_config.")
    problems += _quantization_problems(text.get("quantization_config", config.get("quantization_config")))
    values: dict[str, Any] = _take(text, _TEXT, problems)
    values["mla"] = _take(text, _MLA, problems)
    values["moe"] = _take(text, _MOE, problems)
    values["kda"] = _take(linear, _KDA, problems, "linear_attn_config.")
    values["mla_layers"] = _mla_layers(linear, text.get("num_hidden_layers"), problems)
    if (kv_heads := text.get("num_key_value_heads", text.get("num_attention_heads"))) != text.get(
        "num_attention_heads"
    ):
        problems.append(f"num_key_value_heads is {kv_heads!r}, expected num_attention_heads (MLA shares no heads)")
    return values, problems


def _unknown(config: Mapping[str, Any], known: Iterable[str], prefix: str) -> list[str]:
    return [f"{prefix}{key}: unknown key with value {config[key]!r}" for key in config if key not in set(known)]


def _fixed(config: Mapping[str, Any], fixed: Mapping[str, Any], prefix: str) -> list[str]:
    return [
        f"{prefix}{key} is {config[key]!r}, only {value!r} is implemented"
        for key, value in fixed.items()
        if key in config and config[key] != value and key not in _MAY_DIFFER
    ]


def _wrapper_problems(config: Mapping[str, Any]) -> list[str]:
    text = config["text_config"]
    twice = [
        f"{key} is {config[key]!r}, but text_config.{key} is {text[key]!r}"
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        if isinstance(text, Mapping) and key in config and key in text and config[key] != text[key]
    ]
    unknown = _unknown(config, {*_WRAPPER_FIXED, *_WRAPPER_OTHER, *INERT}, "")
    return unknown + _fixed(config, _WRAPPER_FIXED, "") + twice


def _quantization_problems(quantization: Any) -> list[str]:
    """Only the layout that the released experts have can be read."""
    if quantization is None:
        return ["quantization_config is missing, expected compressed-tensors mxfp4-pack-quantized experts"]
    if not isinstance(quantization, Mapping):
        return [f"quantization_config is {quantization!r}, expected an object"]
    problems = [
        f"quantization_config.{key} is {quantization.get(key)!r}, only {_QUANTIZATION[key]!r} is implemented"
        for key in ("quant_method", "format")
        if quantization.get(key) != _QUANTIZATION[key]
    ]
    weights: Any = quantization
    for key in ("config_groups", "group_0", "weights"):
        weights = weights.get(key) if isinstance(weights.get(key), Mapping) else {}
    for key in ("num_bits", "type", "group_size"):
        if (seen := weights.get(key)) != (wanted := _QUANTIZATION["config_groups"]["group_0"]["weights"][key]):
            problems.append(f"quantization_config.config_groups.group_0.weights.{key} is {seen!r}, expected {wanted!r}")
    return problems


def _take(config: Mapping[str, Any], table: Mapping[str, str], problems: list[str], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, field in table.items():
        value = config.get(key)
        if value is None:
            if key not in _OPTIONAL:
                problems.append(f"{prefix}{key}: missing")
        elif isinstance(value, bool) or not isinstance(value, int if key in _INTEGER else (int, float)):
            wanted = "an integer" if key in _INTEGER else "a number"
            problems.append(f"{prefix}{key} is {value!r}, expected {wanted}")
        else:
            values[field] = value if key in _INTEGER else float(value)
    return values


def _mla_layers(linear: Mapping[str, Any], num_layers: Any, problems: list[str]) -> tuple[int, ...]:
    """0-based MLA layers from the two 1-based lists, which must partition the layers."""
    lists = {key: linear.get(key) for key in _LAYER_LISTS}
    for key, value in lists.items():
        if not isinstance(value, list) or not all(type(layer) is int for layer in value):
            problems.append(f"linear_attn_config.{key} is {value!r}, expected a list of 1-based layer numbers")
            return ()
    full, kda = lists["full_attn_layers"], lists["kda_layers"]
    assert full is not None
    assert kda is not None
    if isinstance(num_layers, int) and sorted(full + kda) != list(range(1, num_layers + 1)):
        problems.append(
            f"linear_attn_config.full_attn_layers {full} and kda_layers {kda} (1-based) "
            f"do not partition 1..{num_layers}"
        )
    return tuple(layer - 1 for layer in sorted(full))


def inconsistencies(config: Any) -> Iterator[str]:
    """What is wrong with a `K3Config`, one sentence each."""
    positive = {
        **{name: getattr(config, name) for name in ("vocab_size", "hidden_size", "num_layers", "intermediate_size")},
        "attn_res_block_size": config.attn_res_block_size,
        "moe_layer_freq": config.moe_layer_freq,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "activation_situ_beta": config.situ_beta,
        "activation_situ_linear_beta": config.situ_linear_beta,
    }
    for part in ("kda", "mla", "moe"):
        fields = getattr(config, part)
        positive |= {f"{part}.{name}": getattr(fields, name) for name in fields.__slots__ if name != "gate_lower_bound"}
    for name, value in positive.items():
        if not 0 < value < math.inf:
            yield f"{name} is {value}, expected a finite number above 0"
    if config.first_moe_layer < 0:
        yield f"first_k_dense_replace is {config.first_moe_layer}, expected at least 0"
    outside = [layer + 1 for layer in config.mla_layers if not 0 <= layer < config.num_layers]
    if outside:
        yield f"full_attn_layers {outside} lie outside 1..{config.num_layers}"
    if not -math.inf < config.kda.gate_lower_bound < 0:
        yield f"gate_lower_bound is {config.kda.gate_lower_bound}, expected a negative number (K3: -5.0)"
    if config.kda.conv_kernel_size != 4:
        yield f"short_conv_kernel_size is {config.kda.conv_kernel_size}, only 4 is implemented"
    if (chosen := config.moe.num_experts_per_token) > config.moe.num_experts:
        yield f"num_experts_per_token is {chosen}, more than num_experts {config.moe.num_experts}"
    for name in ("latent_size", "intermediate_size"):
        if getattr(config.moe, name) % 32:
            yield f"moe.{name} is {getattr(config.moe, name)}, expected a multiple of the MXFP4 group size 32"
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if not 0 <= getattr(config, name) < config.vocab_size:
            yield f"{name} is {getattr(config, name)}, expected an id below vocab_size {config.vocab_size}"


def write(config: Any) -> dict[str, Any]:
    """The released layout of a `K3Config`."""
    ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    linear: dict[str, Any] = {key: getattr(config.kda, field) for key, field in _KDA.items()}
    linear |= _FIXED_KDA
    linear["full_attn_layers"] = [layer + 1 for layer in config.mla_layers]
    linear["kda_layers"] = [layer + 1 for layer in config.kda_layers]
    text = {key: getattr(config, field) for key, field in _TEXT.items()}
    text |= {key: getattr(config.mla, field) for key, field in _MLA.items()}
    text |= {key: getattr(config.moe, field) for key, field in _MOE.items()}
    text |= {"num_key_value_heads": config.mla.num_heads, **_FIXED}
    text |= {"linear_attn_config": linear, "quantization_config": _QUANTIZATION}
    if config.mla.norm_eps == 1e-6:  # the released file has no such key; the released code has this value
        del text["mla_norm_eps"]
    return {**_WRAPPER_FIXED, **ids, "text_config": text}
