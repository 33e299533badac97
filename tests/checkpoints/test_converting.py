"""Conversion: equal to load, resumable after an exception and after a kill, never mixing two sources."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import checkpoints
from checkpoints import CheckpointError, converting, native
from checkpoints.converting import convert

ROOT = Path(__file__).resolve().parents[2]


def test_converted_equals_loaded(checkpoint, tmp_path, config, same_bits):
    (checkpoint / "tokenizer.json").write_text('{"x": 1}')
    convert(checkpoint, tmp_path / "out")
    found, tree = checkpoints.restore(tmp_path / "out")
    assert found == config
    same_bits(tree, checkpoints.load(checkpoint)[1])
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"x": 1}'
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("finished", [0, 1, 3])
def test_resumes_after_an_exception(checkpoint, tmp_path, same_bits, monkeypatch, finished):
    """`finished` groups are complete when the first run stops; the second one reads only the others."""
    reads = []
    original = converting.load_tree

    def counted(source, specs, **options):
        if len(reads) == finished:
            raise RuntimeError("stopped")
        reads.append(specs)
        return original(source, specs, **options)

    monkeypatch.setattr(converting, "load_tree", counted)
    with pytest.raises(RuntimeError, match="stopped"):
        convert(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    first = len(reads)
    monkeypatch.setattr(converting, "load_tree", lambda *a, **k: reads.append(a) or original(*a, **k))
    convert(checkpoint, tmp_path / "out")
    assert (first, len(reads)) == (finished, 4)
    same_bits(checkpoints.restore(tmp_path / "out")[1], checkpoints.load(checkpoint)[1])


def test_stopped_before_the_last_rename(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "commit", lambda *_: pytest.fail("stopped"))
    with pytest.raises(pytest.fail.Exception):
        convert(checkpoint, tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setattr(converting, "load_tree", lambda *_, **__: pytest.fail("read again"))
    convert(checkpoint, tmp_path / "out")
    checkpoints.restore(tmp_path / "out")


def test_resumes_after_a_kill(checkpoint, tmp_path, same_bits):
    """SIGKILL in the middle of a group: what orbax had begun is thrown away, what was complete is kept."""
    program = (
        "import sys, time, checkpoints.orbax_adapter as adapter\n"
        "from checkpoints.converting import convert\n"
        "write = adapter.write\n"
        "def slow(path, tree):\n"
        "    if path.name == 'layer_001':\n"
        "        path.with_name('layer_001.orbax-checkpoint-tmp').mkdir()\n"
        "        print('now', flush=True)\n"
        "        time.sleep(60)\n"
        "    write(path, tree)\n"
        "adapter.write = slow\n"
        "convert(sys.argv[1], sys.argv[2])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = [sys.executable, "-c", program, str(checkpoint), str(tmp_path / "out")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"now\n"
        process.send_signal(signal.SIGKILL)
    groups = tmp_path / "out.partial" / "parameters"
    complete = {path.name: path.stat().st_mtime_ns for path in groups.iterdir() if "tmp" not in path.name}
    assert sorted(complete) == ["layer_000", "model"]
    time.sleep(0.01)
    convert(checkpoint, tmp_path / "out")
    groups = tmp_path / "out" / "parameters"
    assert sorted(path.name for path in groups.iterdir()) == ["layer_000", "layer_001", "layer_002", "model"]
    assert {name: (groups / name).stat().st_mtime_ns for name in complete} == complete
    same_bits(checkpoints.restore(tmp_path / "out")[1], checkpoints.load(checkpoint)[1])


def test_another_source_is_not_mixed_in(checkpoint, tmp_path, edit, monkeypatch):
    monkeypatch.setattr(native, "commit", lambda *_: pytest.fail("stopped"))
    with pytest.raises(pytest.fail.Exception):
        convert(checkpoint, tmp_path / "out")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="begun from another source or with other settings"):
        convert(checkpoint, tmp_path / "out", dtype="float32")
    edit(checkpoint, "language_model.model.norm.weight", lambda tensor: tensor + tensor)
    with pytest.raises(CheckpointError, match="begun from another source or with other settings"):
        convert(checkpoint, tmp_path / "out")


def test_bad_sources_write_nothing(checkpoint, tmp_path, edit):
    edit(checkpoint, "language_model.model.norm.weight", lambda tensor: tensor[:-1].copy())
    with pytest.raises(CheckpointError, match="norm"):
        convert(checkpoint, tmp_path / "out")
    assert list(tmp_path.glob("out*")) == []


def test_existing_target(checkpoint, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="already exists"):
        convert(checkpoint, tmp_path / "out")


def test_a_save_does_not_delete_an_unfinished_conversion(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "commit", lambda *_: pytest.fail("stopped"))
    with pytest.raises(pytest.fail.Exception):
        convert(checkpoint, tmp_path / "out")
    monkeypatch.undo()
    config, tree = checkpoints.load(checkpoint)
    with pytest.raises(CheckpointError, match="is an unfinished conversion"):
        checkpoints.save(tmp_path / "out", config, tree)
    checkpoints.export(tmp_path / "out", config, tree)
    assert (tmp_path / "out.partial" / "conversion.json").exists()
