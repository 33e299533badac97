"""`python -m checkpoints`: output, errors and exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import checkpoints
from checkpoints.__main__ import main, parse_size

ROOT = Path(__file__).resolve().parents[2]


def _usage_code(arguments):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    return exit_.value.code


def test_import_is_cheap():
    program = "import sys, checkpoints; print({'jax', 'numpy', 'orbax', 'tyro'} & sys.modules.keys())"
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=environment, capture_output=True, check=True).stdout == b"set()\n"


def test_as_a_process(checkpoint, tmp_path):
    """The entry point: exit code and streams of a fresh interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "checkpoints", "check"]
    good = subprocess.run([*command, str(checkpoint)], env=environment, capture_output=True, check=False)
    assert (good.returncode, good.stderr) == (0, b"")
    bad = subprocess.run([*command, str(tmp_path / "nowhere")], env=environment, capture_output=True, check=False)
    assert (bad.returncode, bad.stdout) == (1, b"")
    assert bad.stderr.startswith(b"error: ")
    assert bad.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["check"], "PATH"), (["fold", "x"], "fold"), (["export", "a", "b", "--shards", "0"], "--shards is 0")],
)
def test_wrong_usage_is_one_line(arguments, text, capsys):
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == (2, 1)
    assert error.startswith("error: ")
    assert text in error


def test_inspect(checkpoint, tensors, capsys):
    assert main(["inspect", str(checkpoint)]) == 0
    output = capsys.readouterr().out
    assert "3 layers (2 KDA, 1 MLA), hidden 32, vocabulary 64" in output
    assert "8 experts, 2 per token, 2 shared" in output
    packed = [tensor for tensor in tensors.values() if tensor.dtype == np.uint8]
    assert f"U8               {len(packed):>9,} tensors" in output
    assert output.count("shard    part-") == 3


def test_inspect_shows_problems_and_saved_models(checkpoint, tmp_path, capsys):
    checkpoints.save(tmp_path / "saved", *checkpoints.load(checkpoint))
    assert main(["inspect", str(tmp_path / "saved")]) == 0
    assert "orbax, 4 groups" in capsys.readouterr().out
    (checkpoint / "part-1.safetensors").unlink()
    (checkpoint / "config.json").unlink()
    assert main(["inspect", str(checkpoint)]) == 0
    output = capsys.readouterr().out
    assert "problem: part-1.safetensors: missing shard" in output
    assert "config.json: missing" in output


def test_check(checkpoint, edit, tmp_path, capsys):
    assert main(["check", str(checkpoint)]) == 0
    assert "tensors in 3 shard(s) are as expected" in capsys.readouterr().out
    edit(checkpoint, "language_model.model.norm.weight", lambda tensor: tensor[:-1].copy())
    edit(checkpoint, "language_model.lm_head.weight", lambda tensor: tensor.astype(np.float32))
    assert main(["check", str(checkpoint)]) == 1
    output = capsys.readouterr()
    assert output.out.count("\n") == 2
    assert output.err == f"error: {checkpoint} cannot be used: 2 problem(s)\n"


def test_check_with_another_configuration(checkpoint, wider, tmp_path, capsys):
    import json

    (tmp_path / "wider.json").write_text(json.dumps(wider.to_hf()))
    assert main(["check", str(checkpoint), "--config", str(tmp_path / "wider.json")]) == 1
    assert capsys.readouterr().out.count("gate_proj") == 1
    (tmp_path / "wider.json").write_text("{}")
    assert main(["check", str(checkpoint), "--config", str(tmp_path / "wider.json")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_check_hash(checkpoint, capsys):
    assert main(["check", str(checkpoint), "--hash"]) == 0
    assert "sha256.json: written" in capsys.readouterr().out
    assert main(["check", str(checkpoint), "--hash"]) == 0
    assert "sha256.json: 3 file(s) agree" in capsys.readouterr().out
    content = bytearray((checkpoint / "part-0.safetensors").read_bytes())
    content[-1] ^= 128
    (checkpoint / "part-0.safetensors").write_bytes(content)
    assert main(["check", str(checkpoint), "--hash"]) == 1
    assert "part-0.safetensors: SHA-256 is" in capsys.readouterr().out


def test_convert_check_and_export(checkpoint, tmp_path, capsys):
    """There and back again: the released files come out as they went in."""
    (checkpoint / "tokenizer.json").write_text("{}")
    assert main(["convert", str(checkpoint), str(tmp_path / "orbax")]) == 0
    assert main(["check", str(tmp_path / "orbax"), "--hash"]) == 0
    assert main(["export", str(tmp_path / "orbax"), str(tmp_path / "out"), "--like", str(checkpoint)]) == 0
    assert capsys.readouterr().err == ""
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted(
        path.name for path in (tmp_path / "out").iterdir()
    )
    for file in checkpoint.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("options", "files"),
    [([], 4), (["--shards", "2"], 2), (["--max-shard-size", "1GB"], 1)],
)
def test_export_layouts(checkpoint, tmp_path, options, files):
    assert main(["export", str(checkpoint), str(tmp_path / "out"), *options]) == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == files
    checkpoints.check(tmp_path / "out")


def test_wrong_usage(checkpoint, tmp_path, capsys):
    assert _usage_code([]) == 2
    assert _usage_code(["convert"]) == 2
    assert _usage_code(["check", str(checkpoint), "--nonsense"]) == 2
    target = str(tmp_path / "out")
    assert main(["export", str(checkpoint), target, "--shards", "2", "--like", str(checkpoint)]) == 2
    assert main(["export", str(checkpoint), target, "--max-shard-size", "lots"]) == 2
    assert main(["check", str(checkpoint), "--manifest", target]) == 2
    assert "expected a number" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_failures_exit_with_one(checkpoint, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    for command in (["convert", str(checkpoint)], ["export", str(checkpoint)], ["convert", str(tmp_path / "nowhere")]):
        assert main([*command, str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1


def test_interruption(checkpoint, tmp_path, monkeypatch, capsys):
    from checkpoints import converting

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(converting, "load_tree", interrupt)
    assert main(["convert", str(checkpoint), str(tmp_path / "out")]) == 130
    assert "run the same command again" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "count"), [("1000", 1000), ("5GB", 5 * 10**9), ("512MiB", 2**29), ("3 kb", 3000)])
def test_parse_size(text, count):
    assert parse_size(text) == count
