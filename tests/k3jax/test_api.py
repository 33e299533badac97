"""The Python door: loading, logits, states, and every input that cannot be used."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints
import k3jax
from checkpoints import CheckpointError
from k3jax import params
from k3jax.api import PromptError
from k3jax.config import ConfigError
from k3jax.generation import prompt
from k3jax.runtime import Model
from k3jax.sharding import ShardingError

IDS = np.random.default_rng(2).integers(0, 256, 21).tolist()


@pytest.fixture(scope="module")
def exported(door_config, door, random_tree, byte_directory, tmp_path_factory):
    """The shared model as a checkpoint in the released format, in bfloat16 as that format is."""
    path = tmp_path_factory.mktemp("exported") / "model"
    tree = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, random_tree(door_config))
    specs = params.model_specs(door_config)
    wanted = params.map_tree(lambda spec: spec.array_dtype(jnp.bfloat16), specs)
    tree = jax.tree.map(lambda x, dtype: x.astype(dtype) if x.dtype != jnp.uint8 else x, tree, wanted)
    checkpoints.export(path, door_config, tree)
    for file in byte_directory.iterdir():
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def loaded(exported):
    return k3jax.load(exported, dtype=jnp.float32)


def test_load_finds_weights_config_and_tokenizer(loaded, door, door_config, exported):
    assert loaded.config == door_config
    assert loaded.tokenizer.vocab_size == 512
    assert loaded.path == exported
    assert loaded.max_length == door_config.max_position_embeddings
    assert loaded.weight_bytes == door.weight_bytes
    shapes = {leaf.shape: leaf.dtype for leaf in loaded.leaves}
    assert shapes == {leaf.shape: leaf.dtype for leaf in door.leaves}


def test_load_takes_dtype_and_length(exported):
    model = k3jax.load(exported, max_length=99)
    assert model.dtype == jnp.bfloat16
    assert model.max_length == 99


def test_load_on_a_mesh_splits_the_weights(exported, loaded):
    model = k3jax.load(exported, dtype=jnp.float32, mesh="tp2")
    spread = [leaf for leaf in model.leaves if not leaf.sharding.is_fully_replicated]
    assert len(spread) > 10
    for leaf, whole in zip(model.leaves, loaded.leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(whole))


def test_load_without_a_tokenizer(exported, tmp_path):
    for file in exported.iterdir():
        if "token" not in file.name:
            shutil.copy(file, tmp_path)
    assert k3jax.load(tmp_path, dtype=jnp.float32).tokenizer is None


def test_logits_equal_those_of_the_cached_run(door):
    logits, states = door.logits(IDS), door.states(IDS)
    assert logits.shape == states.logits.shape == (21, 512)
    np.testing.assert_allclose(states.logits, logits, rtol=1e-4, atol=1e-4)
    assert states.layer_prefix.shape == (2, 21, 48)
    assert states.router_ids.shape == states.router_weights.shape == (1, 21, 2)
    np.testing.assert_allclose(states.router_weights.sum(-1), 1, rtol=1e-5)


def test_states_have_the_documented_shapes_and_follow_decoding(door):
    states = door.states(IDS[:18], IDS[18:])
    assert states.kda_state.keys() == states.conv_state.keys() == {0}
    assert states.latent.keys() == {1}
    assert states.kda_state[0].shape == (2, 16, 16)
    assert states.conv_state[0].shape == (3, 3, 32)
    assert states.latent[1].shape == (18, 40)
    assert states.decode_logits.shape == (3, 512)
    whole = door.states(IDS)
    np.testing.assert_allclose(states.decode_logits, whole.logits[18:], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(states.kda_state_after_decode[0], whole.kda_state[0], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(states.conv_state_after_decode[0], whole.conv_state[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(states.latent[1], whole.latent[1][:18], rtol=1e-4, atol=1e-4)
    assert door.states(IDS[:18]).decode_logits.shape == (0, 512)


def test_conv_states_are_the_last_rows_oldest_first(door):
    """A fourth token pushes the oldest row out."""
    three, four = door.states(IDS[:3]).conv_state[0], door.states(IDS[:4]).conv_state[0]
    np.testing.assert_allclose(four[:, :2], three[:, 1:], rtol=1e-5, atol=1e-5)
    assert not np.allclose(four[:, 2], three[:, 2])
    one = door.states(IDS[:1]).conv_state[0]
    assert not one[:, :2].any()
    assert one[:, 2].any()


def test_text_is_encoded(door):
    np.testing.assert_array_equal(door.logits("def"), door.logits(door.tokenizer.encode("def")))
    assert k3jax.generate(door, "def", max_tokens=2).result.prompt_tokens == 3


def test_control_tokens_in_text_stay_text(door):
    ids = door.read("<|end_of_msg|>")
    assert max(ids) < 256


def test_numpy_ids_and_batches_are_recognised():
    assert not prompt.is_batch("text")
    assert not prompt.is_batch([1, 2])
    assert not prompt.is_batch(np.asarray([1, 2]))
    assert not prompt.is_batch([])
    assert prompt.is_batch(["a", "b"])
    assert prompt.is_batch([[1], [2, 3]])
    assert prompt.is_batch([np.asarray([1])])
    assert prompt.is_batch(np.asarray([[1, 2]]))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 512], "prompt has token id 512 at position 1, expected an integer from 0 to 511"),
        ([-1], "prompt has token id -1 at position 0"),
        ([5, 2.0], "prompt has token id 2.0 at position 1"),
        ([True], "prompt has token id True at position 0"),
        (np.asarray([0.5]), "prompt has token id 0.5 at position 0"),
        ([], "prompt is empty, expected at least one token"),
        ("", "prompt is empty"),
        ([1] * 601, "prompt has 601 tokens, the cache holds at most 600"),
    ],
)
def test_bad_prompts_are_named(door, ids, message):
    with pytest.raises(PromptError, match=message):
        door.logits(ids)
    if len(ids) < 600:
        with pytest.raises(PromptError, match=message):
            k3jax.generate(door, ids)


def test_a_bad_prompt_in_a_batch_is_named_by_its_row(door):
    with pytest.raises(PromptError, match="prompt 1 has token id 999 at position 2"):
        k3jax.generate(door, [[1], [1, 2, 999]])


def test_a_prompt_that_leaves_no_room_is_refused(door):
    with pytest.raises(PromptError, match="prompt has 600 tokens and 1 more, the cache holds at most 600"):
        k3jax.generate(door, [1] * 600)
    with pytest.raises(PromptError, match="prompt has 598 tokens and 5 more"):
        door.states([1] * 598, [1] * 5)


def test_text_and_stop_strings_need_a_tokenizer(door):
    model = dataclasses.replace(door, tokenizer=None)
    with pytest.raises(PromptError, match="prompt is text but the checkpoint has no tokenizer"):
        model.logits("text")
    with pytest.raises(PromptError, match="stop strings need a tokenizer"):
        k3jax.generate(model, [1], stop="x")
    assert k3jax.generate(model, [1], max_tokens=2).result.text is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0, expected at least 1"),
        ({"temperature": -1}, "temperature is -1"),
        ({"stop": ["a", ""]}, "a stop string is empty"),
        ({"seed": [1, 2]}, "seed has 2 values, expected one number or 1"),
        ({"seed": 2**40}, "seed is 1099511627776"),
    ],
)
def test_bad_options_are_named_at_once(door, options, message):
    with pytest.raises(ValueError, match=message):
        k3jax.generate(door, [1], **options)


def test_unreadable_paths(tmp_path, exported):
    with pytest.raises(CheckpointError, match="nowhere: does not exist"):
        k3jax.load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        k3jax.load(tmp_path)
    shutil.copy(exported / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        k3jax.load(tmp_path)


def test_meshes_and_lengths_that_cannot_be(exported, door_config, random_tree):
    with pytest.raises(ShardingError, match="mesh preset 'tp3' is unknown"):
        k3jax.load(exported, mesh="tp3")
    with pytest.raises(ValueError, match=r"max_length is 601, expected 1 to 600"):
        k3jax.load(exported, max_length=601)


def test_a_foreign_tokenizer_is_refused(door_config, random_tree, small):
    with pytest.raises(ValueError, match="the tokenizer has 700 ids, the embedding 512 rows"):
        Model.of(door_config, random_tree(door_config), tokenizer=small)


def test_nothing_is_imported_before_it_is_used():
    """`import k3jax` must not start JAX."""
    import subprocess
    import sys

    code = "import k3jax, sys; print(sorted({'jax', 'numpy', 'tyro'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []
