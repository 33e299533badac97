"""Loading: every parameter against the released tensors, placed by hand."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import checkpoints
from checkpoints import CheckpointError

TEXT = "language_model.model.layers"


@pytest.fixture
def loaded(checkpoint):
    return checkpoints.load(checkpoint)[1]


def _equal(array, expected):
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(array), expected)


def test_structure_is_that_of_the_specs(checkpoint, config):
    from k3jax import params

    found_config, tree = checkpoints.load(checkpoint)
    assert found_config == config
    abstract = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), tree)
    assert abstract == params.abstract(config)


def test_kda_layer(loaded, tensors, config):
    heads, dim = config.kda.num_heads, config.kda.head_dim
    for layer in (0, 1):
        name = f"{TEXT}.{layer}.self_attn"
        attention = loaded["layers"][str(layer)]["attention"]
        for i, stream in enumerate("qkvg"):
            _equal(attention["qkvz"][:, i], tensors[f"{name}.{stream}_proj.weight"].reshape(heads, dim, -1))
        for i, stream in enumerate("qkv"):
            taps = tensors[f"{name}.{stream}_conv1d.weight"]
            for tap in range(4):
                _equal(attention["conv"][tap, :, i], taps[:, 0, tap].reshape(heads, dim))
        _equal(attention["f_a"], tensors[f"{name}.f_a_proj.weight"])
        _equal(attention["f_b"], tensors[f"{name}.f_b_proj.weight"].reshape(heads, dim, dim))
        _equal(attention["beta"], tensors[f"{name}.b_proj.weight"])
        _equal(attention["a_log"], tensors[f"{name}.A_log"][:heads])
        _equal(attention["dt_bias"], tensors[f"{name}.dt_bias"].reshape(heads, dim))
        _equal(attention["norm"], tensors[f"{name}.o_norm.weight"])
        _equal(attention["out"], tensors[f"{name}.o_proj.weight"].reshape(-1, heads, dim))


def test_mla_layer(loaded, tensors, config):
    name, attention, heads = f"{TEXT}.2.self_attn", loaded["layers"]["2"]["attention"], config.mla.num_heads
    _equal(attention["in_proj"][:24], tensors[f"{name}.q_a_proj.weight"])
    _equal(attention["in_proj"][24:], tensors[f"{name}.kv_a_proj_with_mqa.weight"])
    _equal(attention["q_norm"], tensors[f"{name}.q_a_layernorm.weight"])
    _equal(attention["kv_norm"], tensors[f"{name}.kv_a_layernorm.weight"])
    _equal(attention["q_up"], tensors[f"{name}.q_b_proj.weight"].reshape(heads, 12, 24))
    for head in range(heads):
        rows = tensors[f"{name}.kv_b_proj.weight"][20 * head : 20 * head + 20]
        _equal(attention["key_up"][head], rows[:8])
        _equal(attention["value_up"][head], rows[8:])
    _equal(attention["gate"], tensors[f"{name}.g_proj.weight"].reshape(heads, 12, -1))
    _equal(attention["out"], tensors[f"{name}.o_proj.weight"].reshape(-1, heads, 12))


def test_experts_stay_packed(loaded, tensors, config):
    for layer in (1, 2):
        experts = loaded["layers"][str(layer)]["ffn"]["experts"]
        for expert in range(config.moe.num_experts):
            name = f"{TEXT}.{layer}.block_sparse_moe.experts.{expert}"
            for kind in ("packed", "scale"):
                _equal(experts[f"gate_up_{kind}"][expert, 0], tensors[f"{name}.w1.weight_{kind}"])
                _equal(experts[f"gate_up_{kind}"][expert, 1], tensors[f"{name}.w3.weight_{kind}"])
                _equal(experts[f"down_{kind}"][expert], tensors[f"{name}.w2.weight_{kind}"])


def test_everything_else(loaded, tensors):
    _equal(loaded["embedding"], tensors["language_model.model.embed_tokens.weight"])
    _equal(loaded["head"], tensors["language_model.lm_head.weight"])
    _equal(loaded["norm"], tensors["language_model.model.norm.weight"])
    _equal(loaded["output_res"]["norm"], tensors["language_model.model.output_attn_res_norm.weight"])
    _equal(loaded["output_res"]["query"], tensors["language_model.model.output_attn_res_proj.weight"][0])
    for layer in range(3):
        tree, name = loaded["layers"][str(layer)], f"{TEXT}.{layer}"
        _equal(tree["attention_norm"], tensors[f"{name}.input_layernorm.weight"])
        _equal(tree["ffn_norm"], tensors[f"{name}.post_attention_layernorm.weight"])
        _equal(tree["attention_res"]["norm"], tensors[f"{name}.self_attention_res_norm.weight"])
        _equal(tree["attention_res"]["query"], tensors[f"{name}.self_attention_res_proj.weight"][0])
        _equal(tree["ffn_res"]["norm"], tensors[f"{name}.mlp_res_norm.weight"])
        _equal(tree["ffn_res"]["query"], tensors[f"{name}.mlp_res_proj.weight"][0])
        mlp = tree["ffn"] if layer == 0 else tree["ffn"]["shared"]
        where = f"{name}.mlp" if layer == 0 else f"{name}.block_sparse_moe.shared_experts"
        _equal(mlp["gate_up"][0], tensors[f"{where}.gate_proj.weight"])
        _equal(mlp["gate_up"][1], tensors[f"{where}.up_proj.weight"])
        _equal(mlp["down"], tensors[f"{where}.down_proj.weight"])
    block, ffn = f"{TEXT}.1.block_sparse_moe", loaded["layers"]["1"]["ffn"]
    _equal(ffn["router"], tensors[f"{block}.gate.weight"])
    _equal(ffn["correction_bias"], tensors[f"{block}.gate.e_score_correction_bias"])
    _equal(ffn["latent_down"], tensors[f"{block}.routed_expert_down_proj.weight"])
    _equal(ffn["latent_norm"], tensors[f"{block}.routed_expert_norm.weight"])
    _equal(ffn["latent_up"], tensors[f"{block}.routed_expert_up_proj.weight"])


def test_float32_is_an_exact_cast(checkpoint, loaded):
    _, wide = checkpoints.load(checkpoint, dtype=jnp.float32)
    for narrow, array in zip(jax.tree.leaves(loaded), jax.tree.leaves(wide), strict=True):
        assert array.dtype == (jnp.float32 if narrow.dtype == jnp.bfloat16 else narrow.dtype)
        np.testing.assert_array_equal(np.asarray(array), np.asarray(narrow).astype(array.dtype))


def test_other_dtypes_are_refused(checkpoint):
    with pytest.raises(ValueError, match=r"dtype is float16, expected bfloat16 or float32"):
        checkpoints.load(checkpoint, dtype=jnp.float16)


@pytest.mark.parametrize("shards", [1, 2, 7])
def test_any_number_of_shards(tmp_path, config, tensors, loaded, write_checkpoint, same_bits, shards):
    path = write_checkpoint(tmp_path / "other", config, tensors, shards)
    same_bits(checkpoints.load(path)[1], loaded)
    if shards == 1:
        same_bits(checkpoints.load(path / "model.safetensors")[1], loaded)


def test_vision_tensors_are_skipped(tmp_path, config, tensors, loaded, write_checkpoint, same_bits):
    vision = {
        "vision_tower.encoder.weight": np.ones((4, 4), ml_dtypes.bfloat16),
        "mm_projector.proj.0.weight": np.ones((2, 3), np.float16),
    }
    path = write_checkpoint(tmp_path / "vision", config, tensors | vision, shards=2)
    same_bits(checkpoints.load(path)[1], loaded)


@pytest.mark.parametrize(("byte", "reason"), [(255, "NaN"), (253, "some codes overflow")])
def test_scales_that_make_no_finite_weight_are_refused(checkpoint, edit, byte, reason):
    name = f"{TEXT}.1.block_sparse_moe.experts.3.w3.weight_scale"

    def poison(scale):
        scale[5, 1] = byte
        return scale

    edit(checkpoint, name, poison)
    with pytest.raises(CheckpointError) as error:
        checkpoints.load(checkpoint)
    (problem,) = error.value.problems
    assert problem.startswith(f"{name}: has scale byte {byte} ({reason}), expected at most 252; the file is damaged")


def test_a_packed_byte_may_be_255(checkpoint, edit):
    name = f"{TEXT}.1.block_sparse_moe.experts.3.w3.weight_packed"
    edit(checkpoint, name, lambda packed: np.full_like(packed, 255))
    experts = checkpoints.load(checkpoint)[1]["layers"]["1"]["ffn"]["experts"]
    assert (experts["gate_up_packed"][3, 1] == 255).all()


@pytest.mark.parametrize("element", [8, 127])
def test_padding_of_a_log_must_be_zero(checkpoint, edit, element):
    def poison(a_log):
        a_log[element] = 0.5
        return a_log

    edit(checkpoint, f"{TEXT}.1.self_attn.A_log", poison)
    with pytest.raises(CheckpointError, match=rf"layers\.1\.self_attn\.A_log: padding .*element \[{element}\] is 0\.5"):
        checkpoints.load(checkpoint)


def test_progress_ends_at_the_total(checkpoint, loaded):
    calls = []
    checkpoints.load(checkpoint, progress=lambda done, total: calls.append((done, total)))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded))
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_golden(shared, name):
    """The reference checkpoints load; their values are compared by `k3jax.verify`."""
    config, tree = checkpoints.load(shared / "golden" / name)
    assert len(tree["layers"]) == config.num_layers
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(tree))
