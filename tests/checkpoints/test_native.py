"""Saving and restoring through orbax, on other topologies, and what is refused."""

import gc
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints
from checkpoints import CheckpointError, orbax_adapter
from k3jax import params


def _shardings(config, count):
    """Every parameter split over `count` devices along its first dimension that divides."""
    mesh = jax.make_mesh((count,), ("x",), devices=jax.devices()[:count])

    def rule(spec):
        axes = [axis for axis, size in enumerate(spec.shape) if size % count == 0]
        return jax.NamedSharding(mesh, jax.P(*[None] * axes[0], "x") if axes else jax.P())

    return params.map_tree(rule, params.model_specs(config))


@pytest.fixture(scope="module")
def tree(config):
    from checkpoints.synthetic import random_tree

    return random_tree(config)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, config, tree):
    """Saved once from eight devices."""
    path = tmp_path_factory.mktemp("native") / "saved"
    checkpoints.save(path, config, jax.tree.map(jax.device_put, tree, _shardings(config, 8)))
    return path


@pytest.fixture
def damaged(saved, tmp_path):
    import shutil

    return shutil.copytree(saved, tmp_path / "damaged")


@pytest.mark.parametrize("count", [8, 4, 1])
def test_restores_on_another_topology(saved, config, tree, same_bits, count):
    shardings = _shardings(config, count)
    found, restored = checkpoints.restore(saved, shardings)
    assert found == config
    same_bits(restored, tree)
    assert jax.tree.map(lambda array: array.sharding, restored) == shardings


def test_restores_without_shardings(saved, config, tree, same_bits):
    same_bits(checkpoints.restore(saved)[1], tree)
    same_bits(checkpoints.load(saved)[1], tree)


def test_only_complete_checkpoints_are_seen(tmp_path, config, tree):
    """A save that fails leaves no checkpoint, and the next one is not disturbed by what is left."""

    def fail(done, total):
        if done > total // 2:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        checkpoints.save(tmp_path / "x", config, tree, progress=fail)
    assert not (tmp_path / "x").exists()
    with pytest.raises(CheckpointError, match="not finished"):
        checkpoints.restore(tmp_path / "x")
    checkpoints.save(tmp_path / "x", config, tree)
    checkpoints.restore(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_never_overwrites(saved, config, tree):
    with pytest.raises(CheckpointError, match="already exists"):
        checkpoints.save(saved, config, tree)


def test_a_wrong_tree_is_refused(tmp_path, config, tree):
    wrong = {**tree, "norm": tree["norm"].astype(jnp.float32)}
    with pytest.raises(CheckpointError, match="norm: dtype is float32, expected bfloat16"):
        checkpoints.save(tmp_path / "x", config, wrong)
    assert list(tmp_path.iterdir()) == []


def test_dtypes(saved, tmp_path, config, tree, same_bits):
    wide = jax.tree.map(lambda array: array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array, tree)
    same_bits(checkpoints.restore(saved, dtype=jnp.float32)[1], wide)
    checkpoints.save(tmp_path / "wide", config, wide)
    same_bits(checkpoints.restore(tmp_path / "wide")[1], wide)
    with pytest.raises(CheckpointError, match="saved in float32, which bfloat16 cannot hold"):
        checkpoints.restore(tmp_path / "wide", dtype=jnp.bfloat16)


def test_stored_dtypes_and_shapes_are_compared(damaged, config):
    """orbax would cast: scales stored as int8 or weights as float16 would load without a word."""
    import shutil

    group = damaged / "parameters" / "layer_001"
    shapes = orbax_adapter.describe(group)
    stored = {}
    for keys, (shape, dtype) in shapes.items():
        stored_as = {"gate_up_scale": np.int8, "router": np.float16}.get(keys[-1], dtype)
        shape = (*shape[:-1], shape[-1] + 1) if keys[-1] == "latent_norm" else shape
        branch = stored
        for key in keys[:-1]:
            branch = branch.setdefault(key, {})
        if keys[-1] != "f_a":
            branch[keys[-1]] = jnp.zeros(shape, stored_as)
    shutil.rmtree(group)
    orbax_adapter.write(group, stored)
    with pytest.raises(CheckpointError) as error:
        checkpoints.restore(damaged)
    assert sorted(error.value.problems) == [
        "layers.1.attention.f_a: missing",
        "layers.1.ffn.experts.gate_up_scale: dtype is int8, expected uint8",
        "layers.1.ffn.latent_norm: shape is [65], expected [64]",
        "layers.1.ffn.router: dtype is float16, expected bfloat16",
    ]


def test_scales_that_make_no_finite_weight_are_refused(tmp_path, config, tree):
    spoilt = jax.tree.map(lambda array: array, tree)
    experts = spoilt["layers"]["1"]["ffn"]["experts"]
    experts["down_scale"] = jnp.asarray(experts["down_scale"]).at[1, 2, 0].set(255)
    checkpoints.save(tmp_path / "spoilt", config, spoilt)
    with pytest.raises(CheckpointError, match=r"layers\.1\.ffn\.experts\.down_scale: has scale byte 255 \(NaN\)"):
        checkpoints.restore(tmp_path / "spoilt")


def test_missing_and_damaged_groups_are_listed(damaged):
    import shutil

    shutil.rmtree(damaged / "parameters" / "layer_002")
    (damaged / "parameters" / "layer_000" / "state" / "_METADATA").write_text("{")
    with pytest.raises(CheckpointError) as error:
        checkpoints.restore(damaged)
    problems = sorted(error.value.problems)
    assert len(problems) == 2
    assert problems[0].startswith("parameters/layer_000: metadata cannot be read")
    assert problems[1] == "parameters/layer_002: missing or incomplete"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("state/d/*", r"layer_001: metadata cannot be read \(descriptions of arrays are lost\)"),
        ("state/ocdbt.process_0/d/*", "layer_001: cannot be read"),
    ],
)
@pytest.mark.filterwarnings("ignore:Exception ignored in. <coroutine object:pytest.PytestUnraisableExceptionWarning")
def test_lost_files_are_one_clear_error(damaged, files, message):
    for file in (damaged / "parameters" / "layer_001").glob(files):
        file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=message):
        checkpoints.restore(damaged)
    gc.collect()  # orbax's unfinished readings of other arrays complain when they are collected: here, in no later test


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 2}, r"is \{.*'version': 2\}, expected"),
        ({"format": "other"}, "expected"),
        ({"dtype": "float16"}, "cannot be used"),
        ({"dtype": None}, "cannot be used"),
    ],
)
def test_manifest(damaged, change, reason):
    file = damaged / "checkpoint.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=rf"checkpoint\.json: .*{reason}"):
        checkpoints.restore(damaged)


def test_other_configuration(saved, wider):
    with pytest.raises(CheckpointError, match="another configuration"):
        checkpoints.load(saved, wider)


def test_released_format_is_not_restored(checkpoint):
    with pytest.raises(CheckpointError, match=r"is not a saved checkpoint \(no checkpoint\.json there\)"):
        checkpoints.restore(checkpoint)
