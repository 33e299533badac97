"""DSpark drafts against DeepSpec's stored outputs, and every public layout against its manifest."""

import copy
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.source import find_source
from checkpoints.streaming import load_tree
from k3jax import params
from k3jax.cache import Rows
from k3jax.config import ConfigError
from k3jax.dspark import model as dspark
from k3jax.dspark.config import DraftMla, DSparkConfig, Rope, Yarn
from k3jax.dspark.tensors import draft_specs
from k3jax.layers.rope import frequencies, rotate

INFERACT = {
    "model_type": "k3_dspark",
    "architectures": ["K3DSparkModel"],
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 1048576,
    "rope_theta": 50000,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32,
        "original_max_position_embeddings": 32768,
        "rope_theta": 50000,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "num_target_layers": 5,
    "target_hidden_size": 7168,
    "target_num_hidden_layers": 93,
    "target_layer_ids": [2, 23, 47, 71, 89],
    "mask_token_id": 163837,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
RADIXARK = {
    "model_type": "qwen3",
    "architectures": ["DSparkDraftModel"],
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "vocab_size": 163840,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "block_size": 7,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 65536,
    "rope_theta": 10000,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 4096},
    "num_target_layers": 93,
    "dflash_config": {
        "attention_mode": "gqa",
        "mask_token_id": 163824,
        "target_layer_ids": [7, 23, 51, 67, 83],
        "projector_type": "dspark",
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "confidence_head_alpha": 1.0,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}
QWEN = {
    "model_type": "qwen3",
    "architectures": ["Qwen3DSparkModel"],
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "block_size": 7,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "mask_token_id": 151669,
    "num_anchors": 512,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "num_target_layers": 36,
    "tie_word_embeddings": False,
}


def relative(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.isfinite(actual).all()
    return np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))


def count(config, present=None):
    return sum(math.prod(shape) for shape, _ in params.hf_tensors(draft_specs(config, present)).values())


@pytest.mark.parametrize("kind", ["rnn"])
def test_golden_drafts(shared, kind):
    """Four steps of DeepSpec: context grows by what each step committed, the block is drafted greedily."""
    path = shared / "golden" / f"dspark_{kind}"
    config = DSparkConfig.from_file(path)
    source, problems = find_source(path)
    assert not problems
    draft = dspark.DSpark(config, load_tree(source, draft_specs(config, set(source.tensors)), dtype=jnp.float32))
    golden = np.load(path / "golden.npz")
    pools = tuple(jnp.zeros((9, 16, config.attention.row_width)) for _ in range(config.num_layers))

    @jax.jit
    def run(pools, features, rows, anchor):
        pools = draft.extend(pools, features, rows)
        block = draft.draft(pools, anchor, rows.advance())
        return pools, block, draft.sample(block, anchor, dspark.greedy)

    committed = 0
    for step in range(4):
        features = golden[f"{step}.target_features"]
        table = jnp.asarray([[3, 1, 8, 2, 5, 4, 7, 6]], jnp.int32)
        lengths = (jnp.asarray([number], jnp.int32) for number in (committed, len(features)))
        rows = Rows(jnp.asarray([1], jnp.int32), table, *lengths)
        padded = np.full((1, 32, config.features), np.nan, np.float32)
        padded[0, : len(features)] = features
        anchor = jnp.asarray(golden[f"{step}.anchor"].reshape(1), jnp.int32)
        pools, block, drafted = run(pools, jnp.asarray(padded), rows, anchor)
        committed += len(features)
        assert relative(block.logits[0], golden[f"{step}.base_logits"]) < 2e-4
        np.testing.assert_array_equal(drafted.token[0], golden[f"{step}.tokens"])
        assert relative(drafted.logits[0], golden[f"{step}.logits"]) < 2e-4
        assert relative(drafted.confidence[0], golden[f"{step}.confidence_logits"]) < 2e-4


def test_inferact_manifest():
    """68 tensors; the embedding is a copy of the target's and is not read."""
    config = DSparkConfig.from_hf(INFERACT)
    tensors = params.hf_tensors(draft_specs(config))
    embedding = 163840 * 7168
    assert count(config) + embedding == 3_562_312_961
    assert count(config) == 2_387_907_841
    assert len(tensors) + 1 == 68
    assert tensors["layers.4.self_attn.kv_b_proj.weight"] == ((16384, 512), "BF16")
    assert tensors["context_proj.weight"] == ((7168, 35840), "BF16")
    assert tensors["confidence_head.proj.weight"] == ((1, 7424), "BF16")
    assert (config.block_size, config.causal, config.tap_stream) == (7, False, "prefix")


def test_inferact_softmax_scale_counts_mscale_twice():
    config = DSparkConfig.from_hf(INFERACT)
    assert config.rope.interleaved
    scale = 192**-0.5 * config.rope.yarn.softmax_factor
    assert scale == pytest.approx((0.1 * math.log(32) + 1) ** 2 / math.sqrt(192))
    assert scale == pytest.approx(0.13086, rel=1e-5)
    assert config.rope.yarn.attention_factor == 1.0


def test_inferact_module_takes_the_specs():
    config = DSparkConfig.from_hf(INFERACT)
    tree = params.map_tree(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.array_dtype(jnp.bfloat16)), draft_specs(config)
    )
    draft = jax.eval_shape(lambda arrays: dspark.DSpark(config, arrays), tree)
    assert isinstance(draft.config.attention, DraftMla)
    assert config.attention.row_width == 576


def test_radixark_manifest():
    config = DSparkConfig.from_hf(RADIXARK)
    tensors = params.hf_tensors(draft_specs(config))
    assert (len(tensors), count(config)) == (62, 2_249_289_601)
    assert "fc.weight" in tensors
    assert tensors["layers.0.self_attn.k_proj.weight"] == ((1024, 7168), "BF16")
    assert not config.rope.interleaved


def test_qwen_manifest_with_its_own_embedding_and_head():
    config = DSparkConfig.from_hf(QWEN)
    assert count(config) == 615_221_249
    bare = set(params.hf_tensors(draft_specs(config)))
    whole = bare | {"embed_tokens.weight", "lm_head.weight"}
    assert count(config, whole) == 1_393_133_569


def test_lightseek_kind():
    """Taps are normed one by one and read from the mixed stream."""
    config = DSparkConfig.from_hf({**INFERACT, "fc_norm": True, "aux_hidden_stream": "attn_res"})
    assert config.tap_stream == "attn_res"
    assert {f"fc_norm.{i}.weight" for i in range(5)} < set(params.hf_tensors(draft_specs(config)))


@pytest.mark.parametrize("key", [{"is_causal": True}, {"dflash_config": {"causal": True}}])
def test_causal_kind(key):
    assert DSparkConfig.from_hf({**INFERACT, **key}).causal


def test_names_may_have_a_prefix():
    config = DSparkConfig.from_hf(RADIXARK)
    present = {f"model.{name}" for name in params.hf_tensors(draft_specs(config))}
    assert set(params.hf_tensors(draft_specs(config, present))) == present


def test_every_key_is_consumed_or_refused():
    raw = copy.deepcopy(INFERACT)
    raw |= {"sparkle": 1, "hidden_act": "gelu", "target_layer_ids": [5, 2], "markov_head_type": "cubic"}
    raw["rope_parameters"]["rope_type"] = "spiral"
    del raw["intermediate_size"]
    with pytest.raises(ConfigError) as caught:
        DSparkConfig.from_hf(raw)
    for word in ("sparkle", "hidden_act", "target_layer_ids", "cubic", "spiral", "intermediate_size"):
        assert word in str(caught.value)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_depends_on_distance_only(interleaved):
    rope = Rope(theta=100.0, interleaved=interleaved)
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.standard_normal((1, 1, 2, 8)), jnp.float32) for _ in range(2))

    def product(p, q):
        at = [jnp.full((1, 1), position, jnp.int32) for position in (p, q)]
        return float(jnp.sum(rotate(query, at[0], rope) * rotate(key, at[1], rope)))

    assert product(3, 1) == pytest.approx(product(12, 10), rel=1e-4)
    assert abs(product(3, 1) - product(3, 2)) > 1e-3
    np.testing.assert_allclose(rotate(query, jnp.zeros((1, 1), jnp.int32), rope), query, rtol=1e-6)


def test_yarn_keeps_fast_pairs_and_slows_the_rest():
    plain = frequencies(Rope(theta=50000.0, interleaved=True), 64)
    scaled = frequencies(Rope(theta=50000.0, interleaved=True, yarn=Yarn(factor=32.0, original_positions=32768)), 64)
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 32)
    assert (np.diff(scaled / plain) <= 1e-12).all()
