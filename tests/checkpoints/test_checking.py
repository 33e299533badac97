"""Header-only checks: every fault is listed, at once, before data is read."""

import json

import ml_dtypes
import numpy as np
import pytest

import checkpoints
from checkpoints import CheckpointError

LAYER = "language_model.model.layers.1"
EXPERT = f"{LAYER}.block_sparse_moe.experts.3"


def _problems(path, config=None):
    with pytest.raises(CheckpointError) as error:
        checkpoints.check(path, config)
    assert str(path) in str(error.value)
    return list(error.value.problems)


def _index(path):
    return path / "model.safetensors.index.json"


def _edit_index(path, change):
    index = json.loads(_index(path).read_text())
    change(index["weight_map"])
    _index(path).write_text(json.dumps(index))


def test_sound(checkpoint, config, tensors):
    source = checkpoints.check(checkpoint)
    assert set(source.tensors) == set(tensors)
    assert source.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    checkpoints.check(checkpoint, config)


def test_all_faults_at_once(checkpoint, edit):
    edit(checkpoint, f"{LAYER}.self_attn.q_proj.weight", lambda tensor: tensor[:-1].copy())
    edit(checkpoint, f"{LAYER}.self_attn.A_log", lambda tensor: tensor.astype(ml_dtypes.bfloat16))
    edit(checkpoint, f"{EXPERT}.w2.weight_packed", lambda tensor: tensor.view(np.int8))
    edit(checkpoint, "language_model.model.norm.weight", lambda _: None)
    _edit_index(checkpoint, lambda weight_map: weight_map.pop("language_model.model.norm.weight"))
    name = "language_model.model.layers.9.extra"
    edit(checkpoint, "language_model.lm_head.weight", lambda tensor: tensor.astype(np.float32))
    _edit_index(checkpoint, lambda weight_map: weight_map.update({name: "part-1.safetensors"}))
    problems = _problems(checkpoint)
    assert sorted(problems) == sorted(
        [
            f"{LAYER}.self_attn.q_proj.weight: shape is [31, 32], expected [32, 32]",
            f"{LAYER}.self_attn.A_log: dtype is BF16, expected F32",
            f"{EXPERT}.w2.weight_packed: dtype is I8, expected U8",
            "language_model.model.norm.weight: missing, expected BF16 [32]",
            "language_model.lm_head.weight: dtype is F32, expected BF16",
            f"{name}: the index says part-1.safetensors, whose header does not have it",
        ]
    )


def test_extra_tensor(tmp_path, config, tensors, write_checkpoint):
    path = write_checkpoint(
        tmp_path / "x", config, tensors | {"language_model.rotary.inv_freq": np.ones(4, np.float32)}
    )
    assert _problems(path) == ["language_model.rotary.inv_freq: unexpected tensor F32 [4] in model.safetensors"]


def test_another_configuration(checkpoint, wider):
    problems = _problems(checkpoint, wider)
    assert [problem.split(": ")[0].rsplit(".", 2)[-2] for problem in problems] == ["gate_proj", "up_proj", "down_proj"]
    assert all("48" in problem and "64" in problem for problem in problems)


def test_missing_shard_counts_its_tensors(checkpoint, tensors):
    lost = sum(1 for number in range(len(tensors)) if number % 3 == 1)
    (checkpoint / "part-1.safetensors").unlink()
    problems = _problems(checkpoint)
    assert problems == [
        "part-1.safetensors: missing shard",
        f"part-1.safetensors: cannot be read, and {lost} tensor(s) with it",
    ]


def test_truncated_shard(checkpoint):
    file = checkpoint / "part-2.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.truncate(size - 1)
    assert _problems(checkpoint)[0] == f"part-2.safetensors: is truncated: {size - 1} bytes, its header declares {size}"
    with pytest.raises(CheckpointError, match="truncated"):
        checkpoints.load(checkpoint)


def test_not_a_safetensors_file(checkpoint):
    (checkpoint / "part-0.safetensors").write_bytes(b"PK\x03\x04" + b"pickled" * 100)
    assert "part-0.safetensors: is truncated or not a safetensors file" in _problems(checkpoint)[0]


def test_index_against_headers(checkpoint):
    def move(weight_map):
        assert weight_map["language_model.lm_head.weight"] == "part-1.safetensors"
        weight_map["language_model.lm_head.weight"] = "part-2.safetensors"
        del weight_map["language_model.model.norm.weight"]

    _edit_index(checkpoint, move)
    problems = _problems(checkpoint)
    assert "language_model.lm_head.weight: the index says part-2.safetensors, whose header does not have it" in problems
    assert "language_model.lm_head.weight: in part-1.safetensors, but the index says part-2.safetensors" in problems
    assert any(problem.startswith("language_model.model.norm.weight: in part-") for problem in problems)
    assert len(problems) == 3


def test_shards_without_index(checkpoint):
    _index(checkpoint).unlink()
    assert _problems(checkpoint) == ["model.safetensors.index.json: missing, but there are 3 shards"]


@pytest.mark.parametrize("file", ["../part-0.safetensors", "/etc/passwd", "sub/part-0.safetensors", 7, ["x"], "x.bin"])
def test_index_stays_in_its_directory(checkpoint, file):
    _edit_index(checkpoint, lambda weight_map: weight_map.update({"language_model.lm_head.weight": file}))
    with pytest.raises(CheckpointError, match=r"plain \.safetensors file names") as error:
        checkpoints.check(checkpoint)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[]", "has no weight_map"),
        ("{}", "has no weight_map"),
        ('{"weight_map": 3}', "has no"),
    ],
)
def test_broken_index(checkpoint, text, reason):
    _index(checkpoint).write_text(text)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors\.index\.json: .*{reason}"):
        checkpoints.check(checkpoint)


def test_nothing_there(tmp_path, config):
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoints.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoints.check(tmp_path / "nowhere", config)
    with pytest.raises(CheckpointError, match=r"config\.json: missing"):
        checkpoints.load(tmp_path)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoints.load(tmp_path, config)


def test_unreadable_path(tmp_path, config):
    """A path component that is no directory, and a loop of links (permissions do not stop root)."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "plain").write_text("x")
    for path in (tmp_path / "plain" / "x", tmp_path / "loop" / "x", tmp_path / "loop"):
        with pytest.raises(CheckpointError):
            checkpoints.load(path, config)
    with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
        checkpoints.load(tmp_path / "plain", config)


def test_nothing_is_read_when_the_check_fails(checkpoint, edit, monkeypatch):
    from checkpoints.source import OpenTensors

    edit(checkpoint, "language_model.model.norm.weight", lambda tensor: tensor.astype(np.float32))
    monkeypatch.setattr(OpenTensors, "view", lambda *_: pytest.fail("data was read"))
    with pytest.raises(CheckpointError, match=r"norm\.weight: dtype is F32, expected BF16"):
        checkpoints.load(checkpoint)


def test_long_lists_are_cut_in_the_text_only(checkpoint, monkeypatch):
    from checkpoints import errors

    monkeypatch.setattr(errors, "SHOWN", 20)
    # Without the index, what a lost shard held is missing tensor by tensor.
    (checkpoint / "model.safetensors.index.json").unlink()
    (checkpoint / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError) as error:
        checkpoints.check(checkpoint)
    problems = error.value.problems
    assert len(problems) > 50
    lines = str(error.value).splitlines()
    assert len(lines) == 22
    assert f"and {len(problems) - 20} more" in lines[-1]


@pytest.mark.slow
def test_all_of_k3(tmp_path):
    """497,052 headers of 1.56 TB (sparse files): checked without reading what is not there."""
    from checkpoints.shards import plan_released
    from k3jax.config import k3

    plan = plan_released(k3())
    for shard in plan.shards:
        with (tmp_path / shard.file).open("wb") as file:
            file.write(shard.header_bytes)
            file.truncate(shard.header.file_bytes)
    assert plan.index is not None
    (tmp_path / "model.safetensors.index.json").write_bytes(plan.index)
    source = checkpoints.check(tmp_path, k3())
    assert len(source.tensors) == 497_052
    with (tmp_path / plan.shards[40].file).open("r+b") as file:
        file.truncate(plan.shards[40].header.file_bytes - 1)
    truncated, unread = _problems(tmp_path, k3())
    assert "is truncated" in truncated
    assert "5,404 tensor(s)" in unread
