"""Random checkpoints: sound, repeatable, and random in every element."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import checkpoints
from checkpoints.synthetic import random_tree


@pytest.mark.parametrize("shards", [None, 1, 3])
def test_written_is_returned(tmp_path, config, same_bits, shards):
    tree = checkpoints.write_random(tmp_path / "x", config, seed=5, shards=shards)
    found, loaded = checkpoints.load(tmp_path / "x")
    assert found == config
    same_bits(loaded, tree)


def test_seed(config, same_bits):
    same_bits(random_tree(config, 1), random_tree(config, 1))
    first, second = (random_tree(config, seed) for seed in (1, 2))
    assert not any(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))


def test_no_parameter_is_constant(tiny_config):
    for path, leaf in jax.tree_util.tree_leaves_with_path(random_tree(tiny_config)):
        assert len(np.unique(np.asarray(leaf, np.float32))) > 1, path


def test_scales_are_usable(tmp_path, config):
    checkpoints.write_random(tmp_path / "x", config, max_shard_bytes=10**9)
    for name, tensor in load_file(tmp_path / "x" / "model.safetensors").items():
        if name.endswith("weight_scale"):
            assert tensor.min() > 100
            assert tensor.max() < 140
