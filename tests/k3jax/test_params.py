import functools
import json
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax import params
from k3jax.config import K3Config, k3, nano
from k3jax.model import K3

BYTES = {"BF16": 2, "F32": 4, "U8": 1}


@pytest.fixture(scope="module")
def released():
    return params.hf_tensors(params.model_specs(k3()))


def test_inventory_of_the_released_text_model(released):
    assert len(released) == 497_052
    assert sum(math.prod(shape) * BYTES[dtype] for shape, dtype in released.values()) == 1_559_965_606_912
    # Vision tower and projector add 168 BF16 tensors to the census of the whole release.
    assert Counter(dtype for _, dtype in released.values()) == {"BF16": 2122 - 168, "F32": 506, "U8": 494_592}


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("model.embed_tokens.weight", (163840, 7168), "BF16"),
        ("lm_head.weight", (163840, 7168), "BF16"),
        ("model.output_attn_res_proj.weight", (1, 7168), "BF16"),
        ("model.layers.0.self_attn.A_log", (128,), "F32"),
        ("model.layers.0.self_attn.q_conv1d.weight", (12288, 1, 4), "F32"),
        ("model.layers.0.self_attn.dt_bias", (12288,), "F32"),
        ("model.layers.0.self_attn.o_norm.weight", (128,), "F32"),
        ("model.layers.0.mlp.gate_proj.weight", (33792, 7168), "BF16"),
        ("model.layers.91.self_attn.kv_a_proj_with_mqa.weight", (576, 7168), "BF16"),
        ("model.layers.92.self_attn.q_b_proj.weight", (18432, 1536), "BF16"),
        ("model.layers.92.self_attn.kv_b_proj.weight", (24576, 512), "BF16"),
        ("model.layers.92.self_attn.g_proj.weight", (12288, 7168), "BF16"),
        ("model.layers.1.block_sparse_moe.gate.e_score_correction_bias", (896,), "F32"),
        ("model.layers.1.block_sparse_moe.shared_experts.up_proj.weight", (6144, 7168), "BF16"),
        ("model.layers.1.block_sparse_moe.experts.895.w1.weight_packed", (3072, 1792), "U8"),
        ("model.layers.1.block_sparse_moe.experts.895.w2.weight_packed", (3584, 1536), "U8"),
        ("model.layers.1.block_sparse_moe.experts.895.w2.weight_scale", (3584, 96), "U8"),
    ],
)
def test_released_tensors(released, name, shape, dtype):
    assert released["language_model." + name] == (shape, dtype)


def test_eval_shape_of_the_whole_model():
    """The 93 layers as modules, from abstract values: nothing is allocated."""
    model = jax.eval_shape(lambda tree: K3(k3(), tree), params.abstract(k3()))
    leaves = jax.tree.leaves(nnx.state(model))
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) == 1_559_965_606_912 - 69 * 32 * 4  # A_log padding
    specs = list(params.flatten(params.model_specs(k3())))
    assert Counter((leaf.shape, leaf.dtype) for leaf in leaves) == Counter(
        (spec.shape, spec.array_dtype(jnp.bfloat16)) for _, spec in specs
    )


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_golden_names(shared, name):
    path = shared / "golden" / name
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(params.hf_tensors(params.model_specs(K3Config.from_file(path)))) == set(index)


def test_pieces_cover_every_parameter_once():
    for path, spec in params.flatten(params.model_specs(nano())):
        covered = np.zeros(spec.shape, np.int8)
        for part in spec.pieces:
            taken = np.empty(part.view, np.bool_)[part.take].transpose(part.permutation)
            assert covered[part.index].shape == taken.shape, path
            covered[part.index] += 1
        assert (covered == 1).all(), path


def test_initialize_matches_the_specs(tiny_config):
    initialize, key = functools.partial(params.initialize, tiny_config), jax.random.key(0)
    specs = dict(params.flatten(params.model_specs(tiny_config)))
    arrays = dict(params.flatten(jax.eval_shape(initialize, key)))
    assert arrays.keys() == specs.keys()
    for path, spec in specs.items():
        assert arrays[path].shape == spec.shape
        assert arrays[path].dtype == spec.array_dtype(jnp.bfloat16)
    drawn = jax.jit(lambda key: initialize(key)["layers"]["0"]["attention"])(key)
    a_log, dt_bias = drawn["a_log"], drawn["dt_bias"]
    assert not np.any(a_log)
    assert np.all(jax.nn.softplus(dt_bias) > 0.9e-3)
    assert np.all(jax.nn.softplus(dt_bias) < 1.1e-1)


def test_axes_must_name_every_dimension():
    with pytest.raises(ValueError, match="one name per dimension"):
        params.ParamSpec((2, 3), "model", ("embed",), "zeros", ())
