"""Export: the inverse of load, byte for byte."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save

import checkpoints
from checkpoints import CheckpointError
from checkpoints.shards import plan_shard
from k3jax.config import K3Config, k3


def _read(path):
    content = {}
    for file in sorted(path.glob("*.safetensors")):
        content |= load_file(file)
    return content


def _same_tensors(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert tensor.shape == right[name].shape, name
        assert tensor.tobytes() == right[name].tobytes(), name


def _same_files(left, right):
    names = sorted(path.name for path in left.iterdir())
    assert names == sorted(path.name for path in right.iterdir())
    assert all((left / name).read_bytes() == (right / name).read_bytes() for name in names)


@pytest.fixture
def loaded(checkpoint):
    return checkpoints.load(checkpoint)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_byte_survives(checkpoint, tmp_path, tensors, dtype):
    checkpoints.export(tmp_path / "out", *checkpoints.load(checkpoint, dtype=dtype))
    _same_tensors(_read(tmp_path / "out"), tensors)


def test_like_repeats_whole_files(checkpoint, tmp_path, loaded):
    checkpoints.export(tmp_path / "out", *loaded, like=checkpoint)
    _same_files(tmp_path / "out", checkpoint)


def test_like_keeps_vision_tensors(tmp_path, config, tensors, write_checkpoint):
    vision = {"vision_tower.x": np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16)}
    path = write_checkpoint(tmp_path / "in", config, tensors | vision, shards=4)
    checkpoints.export(tmp_path / "out", *checkpoints.load(path), like=path)
    _same_files(tmp_path / "out", path)


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_golden_files_survive(shared, tmp_path, name):
    source = shared / "golden" / name
    checkpoints.export(tmp_path / "out", *checkpoints.load(source), like=source)
    for file in (tmp_path / "out").iterdir():
        assert file.read_bytes() == (source / file.name).read_bytes(), file.name


def test_released_layout(tmp_path, loaded, tensors):
    checkpoints.export(tmp_path / "out", *loaded)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-0000{number}-of-000004.safetensors" for number in (1, 2, 3, 4)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    for name, file in index["weight_map"].items():
        layer = int(name.split(".")[3]) if ".layers." in name else 3
        assert file == files[layer]
    assert index["weight_map"].keys() == tensors.keys()
    assert K3Config.from_file(tmp_path / "out") == loaded[0]


def test_own_layout_is_stable(tmp_path, loaded):
    """What was exported, loaded and exported again is the same, file by file, without `like`."""
    checkpoints.export(tmp_path / "one", *loaded)
    checkpoints.export(tmp_path / "two", *checkpoints.load(tmp_path / "one"))
    _same_files(tmp_path / "one", tmp_path / "two")


def test_single_file_is_the_librarys(tmp_path, loaded, tensors):
    checkpoints.export(tmp_path / "out", *loaded, max_shard_bytes=10**9)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == save(tensors)


@pytest.mark.parametrize("shards", [1, 2, 5, 64])
def test_shard_count(tmp_path, loaded, tensors, shards):
    checkpoints.export(tmp_path / "out", *loaded, shards=shards)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == shards
    assert all(load_file(file) for file in files)
    _same_tensors(_read(tmp_path / "out"), tensors)
    assert max(file.stat().st_size for file in files) < 2 * sum(file.stat().st_size for file in files) / shards + 20_000


def test_shard_size(tmp_path, loaded, tensors):
    checkpoints.export(tmp_path / "out", *loaded, max_shard_bytes=20_000)
    for file in (tmp_path / "out").glob("*.safetensors"):
        content = load_file(file)
        assert sum(tensor.nbytes for tensor in content.values()) <= 20_000 or len(content) == 1
    _same_tensors(_read(tmp_path / "out"), tensors)


def test_sharded_arrays_export_alike(checkpoint, tmp_path, loaded, tensors):
    sharding = jax.NamedSharding(jax.make_mesh((8,), ("x",)), jax.P("x"))

    def spread(array):
        return jax.device_put(array, sharding) if array.shape[0] % 8 == 0 else array

    checkpoints.export(tmp_path / "out", loaded[0], jax.tree.map(spread, loaded[1]))
    _same_tensors(_read(tmp_path / "out"), tensors)


def test_released_sizes_of_k3():
    """Shard sizes and totals of the published repository, to the byte (specification: k3_io section 4).

    Layers of one kind whose numbers have as many digits have equal sizes, so one of each is planned.
    """
    from k3jax import params

    full = k3()
    sizes: dict[tuple[bool, bool, int], int] = {}
    counts: dict[tuple[bool, bool, int], int] = {}
    total = number = 0
    for layer in range(93):
        kind = (full.is_mla(layer), full.is_moe(layer), len(str(layer)))
        if kind not in sizes:
            header = plan_shard("x", params.hf_tensors(params.layer_specs(full, layer))).header
            sizes[kind], counts[kind] = header.file_bytes, len(header.tensors)
        total += sizes[kind]
        number += counts[kind]
    specs = params.model_specs(full)
    del specs["layers"]
    rest = plan_shard("x", params.hf_tensors(specs)).header
    assert sorted(set(counts.values())) == [23, 5398, 5404]
    assert number + len(rest.tensors) == 497_052
    assert sizes[False, False, 1] == 2_341_216_112
    assert total + rest.file_bytes + 92_289_328 + 802_448_352 == 1_560_936_091_448


def test_bad_trees_are_listed(tmp_path, loaded):
    config, tree = loaded
    del tree["norm"]
    tree["head"] = tree["head"][:-1]
    tree["layers"]["1"]["attention"]["a_log"] = tree["layers"]["1"]["attention"]["a_log"].astype(jnp.bfloat16)
    tree["layers"]["9"] = {"x": jnp.zeros(3)}
    with pytest.raises(CheckpointError) as error:
        checkpoints.export(tmp_path / "out", config, tree)
    assert sorted(error.value.problems) == [
        "head: shape is [63, 32], expected [64, 32]",
        "layers.1.attention.a_log: dtype is bfloat16, expected float32",
        "layers.9.x: unexpected parameter",
        "norm: missing",
    ]
    assert list(tmp_path.glob("out*")) == []


def test_existing_targets_and_options(tmp_path, loaded, checkpoint):
    with pytest.raises(CheckpointError, match="already exists"):
        checkpoints.export(checkpoint, *loaded)
    with pytest.raises(ValueError, match="at most one"):
        checkpoints.export(tmp_path / "out", *loaded, shards=2, like=checkpoint)
    with pytest.raises(CheckpointError, match=r"shards is 1000000, expected 1\.\."):
        checkpoints.export(tmp_path / "out", *loaded, shards=1_000_000)
    (tmp_path / "plain").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be written"):
        checkpoints.export(tmp_path / "plain" / "out", *loaded)


def test_a_failed_export_leaves_nothing(tmp_path, loaded):
    def fail(done, total):
        if done > total // 2:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        checkpoints.export(tmp_path / "out", *loaded, progress=fail)
    assert list(tmp_path.glob("out*")) == []
