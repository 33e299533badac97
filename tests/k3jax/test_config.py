import copy
import dataclasses

import pytest

from k3jax.config import ConfigError, K3Config, k3, nano, rank_slice, read_json

RELEASED = {
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 93,
    "num_attention_heads": 96,
    "num_key_value_heads": 96,
    "intermediate_size": 33792,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
    "routed_scaling_factor": 1.0,
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 12,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
}


def test_k3_equals_the_released_numbers():
    text = k3().to_hf()["text_config"]
    assert {key: text[key] for key in RELEASED} == RELEASED
    linear = text["linear_attn_config"]
    assert linear["full_attn_layers"] == [*range(4, 93, 4), 93]
    assert linear["kda_layers"] == [layer for layer in range(1, 93) if layer % 4]
    assert (linear["num_heads"], linear["head_dim"], linear["gate_lower_bound"]) == (96, 128, -5.0)
    assert k3().mla.norm_eps == 1e-6
    assert k3().mla.scale == pytest.approx(0.0721687836, rel=1e-9)


def test_k3_layer_kinds():
    config = k3()
    assert len(config.kda_layers) == 69
    assert config.mla_layers[-3:] == (87, 91, 92)
    assert config.moe_layers == tuple(range(1, 93))
    assert [layer for layer in range(93) if config.starts_block(layer)] == [0, 12, 24, 36, 48, 60, 72, 84]
    assert config.num_attn_res_blocks == 8


@pytest.mark.parametrize("config", [k3(), nano(), rank_slice(8, 256)], ids=["k3", "nano", "slice"])
def test_round_trip(config):
    assert K3Config.from_hf(config.to_hf()) == config


def test_mla_norm_eps_has_its_own_key():
    config = dataclasses.replace(nano(), mla=dataclasses.replace(nano().mla, norm_eps=1e-5))
    assert "mla_norm_eps" not in nano().to_hf()["text_config"]
    assert K3Config.from_hf(config.to_hf()).mla.norm_eps == 1e-5


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_golden_configurations(shared, name):
    path = shared / "golden" / name
    config = K3Config.from_file(path)
    written = config.to_hf()
    original = read_json(path, "config.json")
    assert {key: written["text_config"][key] for key in original["text_config"]} == original["text_config"]


def test_inner_configuration_alone():
    assert K3Config.from_hf(nano().to_hf()["text_config"]) == nano()


def test_boilerplate_is_accepted():
    raw = nano().to_hf()
    raw["text_config"] |= {"top_k": 50, "rope_theta": 10000, "head_dim": 74, "output_attentions": False}
    raw |= {"transformers_version": "4.56.2", "vision_config": {"patch_size": 14}}
    assert K3Config.from_hf(raw) == nano()


def test_every_problem_is_named_at_once():
    raw = copy.deepcopy(nano().to_hf())
    text = raw["text_config"]
    text |= {"sparkle": 3, "hidden_act": "silu", "hidden_size": "wide"}
    text["quantization_config"] = {**text["quantization_config"], "format": "int4"}
    del text["num_experts"]
    text["linear_attn_config"] |= {"kda_layers": [1, 2], "surprise": 1}
    raw["novelty"] = True
    with pytest.raises(ConfigError) as caught:
        K3Config.from_hf(raw)
    message = str(caught.value)
    for word in ("sparkle", "hidden_act", "'wide'", "int4", "num_experts: missing", "partition", "surprise", "novelty"):
        assert word in message


def test_inconsistent_fields_are_listed():
    moe = dataclasses.replace(nano().moe, num_experts_per_token=99, latent_size=40)
    with pytest.raises(
        ConfigError, match=r"(?s)num_experts_per_token is 99.*latent_size is 40.*eos_token_id is 9999999"
    ):
        dataclasses.replace(nano(), moe=moe, eos_token_id=9999999)


def test_unknown_keys_do_not_hide_inconsistencies():
    raw = copy.deepcopy(nano().to_hf())
    raw["text_config"] |= {"sparkle": 3, "num_experts_per_token": 99, "first_k_dense_replace": -1}
    raw["text_config"]["activation_situ_beta"] = float("inf")
    raw["bos_token_id"] = 7
    with pytest.raises(ConfigError) as caught:
        K3Config.from_hf(raw)
    for word in ("sparkle", "num_experts_per_token is 99", "first_k_dense_replace is -1", "beta is inf", "is 7, but"):
        assert word in str(caught.value)


def test_a_missing_part_does_not_hide_the_rest():
    raw = copy.deepcopy(nano().to_hf())
    del raw["text_config"]["linear_attn_config"], raw["text_config"]["hidden_size"]
    raw["text_config"]["quantization_config"]["config_groups"] = {"group_0": None}
    raw["text_config"]["foo"] = 1
    with pytest.raises(ConfigError) as caught:
        K3Config.from_hf(raw)
    for word in ("linear_attn_config is None", "hidden_size: missing", "foo: unknown", "num_bits is None"):
        assert word in str(caught.value)


@pytest.mark.parametrize("heads", [("num_key_value_heads", 1)])
def test_grouped_heads_are_refused(heads):
    raw = nano().to_hf()
    raw["text_config"][heads[0]] = heads[1]
    with pytest.raises(ConfigError, match="num_key_value_heads is 1"):
        K3Config.from_hf(raw)


def test_unreadable_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        K3Config.from_file(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        K3Config.from_file(tmp_path)


def test_rank_slice():
    assert rank_slice(8).kda.num_heads == 12
    with pytest.raises(ConfigError, match="tp is 7"):
        rank_slice(7)
