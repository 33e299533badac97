"""The commands from end to end on a model that trains within seconds."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints
from checkpoints import orbax_adapter
from k3jax import tokenizer
from k3jax.config import K3Config
from k3jax.train import __main__ as command
from k3jax.train import data, programs, report, settle, step
from k3jax.train.balance import imbalance
from k3jax.train.configs import CONFIGS
from k3jax.train.corpus import Source
from k3jax.train.evaluate import make_evaluate
from k3jax.train.forward import Batch
from k3jax.train.run import place, place_whole

LENGTH, ROWS = 512, 4
ROOT = Path(programs.__file__).parents[1]


def held_out_name(stem: str) -> str:
    """A name of `stem` that the split by names holds out."""
    names = (f"{stem}_{i}.py" for i in range(10_000))
    return next(name for name in names if Source("local", "unstated", name, "").held_out)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, small_model: K3Config) -> Path:
    out, root = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("sources")
    for path in ROOT.glob("*.py"):
        (root / held_out_name(path.stem) if path.stem in ("config", "chat") else root / path.name).write_text(
            path.read_text()
        )
    settings = programs.Preparation(
        out=out, vocab_size=small_model.vocab_size, root=root, length=LENGTH, conversations=30
    )
    sizes = programs.prepare(settings)
    assert sizes["training_tokens"] == len(np.load(out / "training.npy")) > sizes["validation_tokens"] > 0
    assert sizes["validation_files"] >= 1
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, small_model: K3Config, prepared: Path) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("run")
    settings = programs.Training(
        config=small_model,
        data=prepared,
        out=out,
        steps=4,
        seconds=None,
        chat_steps=2,
        rows=ROWS,
        length=LENGTH,
        dtype="float32",
        settle_batches=1,
        settle_rounds=2,
    )

    def export(path: Path, config: K3Config, tree: dict) -> None:
        checkpoints.export(path, config, tree, max_shard_bytes=1 << 40)

    mesh = step.data_mesh(jax.devices()[:1])  # several are for test_step.py
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "data_mesh", lambda: mesh)
        return out, programs.pretrain(settings, orbax_adapter.write, orbax_adapter.read, export)


def test_a_run_leaves_a_checkpoint_that_loads(trained: tuple[Path, dict], small_model: K3Config) -> None:
    out, summaries = trained
    assert list(summaries) == ["pretrain", "chat"]
    config, tree = checkpoints.load(out / "checkpoint", dtype=jnp.bfloat16)
    assert config == small_model
    assert np.any(np.asarray(tree["layers"]["1"]["ffn"]["correction_bias"]))
    assert tokenizer.load(out / "checkpoint").vocab_size == small_model.vocab_size
    generation = json.loads((out / "checkpoint" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == small_model.eos_token_id
    assert (out / "checkpoint" / "training_files.tsv.xz").is_file()


def test_the_journal_holds_every_kind_of_record(trained: tuple[Path, dict]) -> None:
    out, summaries = trained
    records = report.read(out / "log.jsonl")
    assert {record["kind"] for record in records} == {"start", "compiled", "step", "summary"}
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["phase"] for record in steps] == ["pretrain", "chat"]
    assert steps[1]["tokens"] == 5 * ROWS * LENGTH
    assert 5.5 < summaries["pretrain"]["validation_nats_per_token"] < 6.6
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "curves.json").read_text())["tokens"] == [record["tokens"] for record in steps]


def test_settled_biases_balance_the_pool(small_model: K3Config, awake: dict, batch: Batch) -> None:
    mesh = step.data_mesh(jax.devices()[:1])
    evaluate = make_evaluate(small_model, mesh, dtype=jnp.float32)
    pool, masters = place(batch, mesh), place_whole(awake, mesh)

    def worst(masters: dict) -> float:
        return float(imbalance(evaluate(masters, pool).routed.load).max())

    settled = settle.settle(small_model, evaluate, masters, [pool], rounds=8)
    assert worst(settled) < 1.12 < worst(masters)
    bias = np.asarray(settled["layers"]["2"]["ffn"]["correction_bias"])
    assert abs(bias.mean()) < 1e-6 < np.abs(bias).max()


def test_validation_predicts_every_token_but_the_first_once(prepared: Path, small_model: K3Config) -> None:
    ids = np.load(prepared / "validation.npy")
    batches = data.validation_batches(prepared, rows=3, length=50, pad=small_model.pad_token_id)
    targets = np.concatenate([b.ids[:, 1:][b.weight > 0] for b in batches])
    np.testing.assert_array_equal(targets, ids[1:])
    assert all(b.ids.shape == (3, 51) for b in batches)


def test_chat_batches_are_half_text(prepared: Path, small_model: K3Config) -> None:
    make = data.ChatBatches(prepared, rows=4, length=LENGTH, seed=1)
    batch = make(3)
    assert batch.ids.shape == (4, LENGTH + 1)
    opening = tokenizer.load(prepared).control_id("<|open|>")
    assert (batch.ids[:2, 0] == opening).all()
    assert (batch.weight[2:] == 1).all()
    np.testing.assert_array_equal(make(3).ids, batch.ids)
    with pytest.raises(ValueError, match="windows of 512 predictions, the run uses 100"):
        data.ChatBatches(prepared, rows=4, length=100, seed=1)


def test_the_baseline_is_stored(prepared: Path, tmp_path: Path) -> None:
    assert command.main(["baseline", "--data", str(prepared), "--out", str(tmp_path / "baseline.json")]) == 0
    result = json.loads((tmp_path / "baseline.json").read_text())
    assert result["order"] == 5
    assert 1 < result["bits_per_byte"] < 4


def test_another_vocabulary_is_refused(prepared: Path, small_model: K3Config, tmp_path: Path) -> None:
    config = dataclasses.replace(small_model, vocab_size=700, pad_token_id=699)
    settings = programs.Training(config=config, data=prepared, out=tmp_path, steps=1, seconds=None)
    with pytest.raises(programs.TrainingError, match="has 600 ids, the configuration 700; prepare the data"):
        programs.check_tokenizer(settings)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["pretrain", "--out", "{tmp}"], 2, "give --steps, --seconds or both"),
        (["pretrain", "--out", "{tmp}", "--steps", "-1"], 2, "--steps is -1, expected at least 0"),
        (["pretrain", "--out", "{tmp}", "--steps", "1", "--rows", "0"], 2, "--rows is 0, expected at least 1"),
        (["pretrain", "--out", "{tmp}", "--steps", "1", "--data", "{tmp}/no"], 1, "does not exist; run `python -m"),
        (["pretrain", "--out", "{tmp}", "--steps", "1", "--initial", "{tmp}/no"], 1, "does not exist; give the"),
        (["baseline", "--data", "{tmp}/nothing"], 1, "does not exist; run `python -m k3jax.train prepare"),
        (["draw", "--out", "{tmp}/a.png", "--logs", "x", "y", "--names", "one"], 2, "1 names for 2 logs"),
    ],
)
def test_bad_usage_is_one_line(arguments, code, message, tmp_path, capsys) -> None:
    assert command.main([argument.format(tmp=tmp_path) for argument in arguments]) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        command.main(["--help"])
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("prepare", "pretrain", "settle", "baseline", "draft", "acceptance", "draw"))


@pytest.mark.slow
def test_nano_pretrains_and_continues_from_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = step.data_mesh(jax.devices()[:1])  # as on a machine with one CPU device
    monkeypatch.setattr(step, "data_mesh", lambda: mesh)
    shape = ["--config", "nano", "--rows", "8", "--length", "64", "--settle-batches", "1", "--settle-rounds", "1"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert command.main(["pretrain", *shape, "--out", str(first), "--steps", "1", "--limit-mb", "1.5"]) == 0
    start = json.loads(capsys.readouterr().out.splitlines()[-1])["pretrain"]["validation_nats_per_token"]
    assert 7.5 < start < 9.5  # about the logarithm of 4,096 ids
    checkpoints.check(first / "checkpoint", CONFIGS["nano"]())
    more = ["--data", str(first / "data"), "--initial", str(first / "checkpoint"), "--steps", "3"]
    assert command.main(["pretrain", *shape, *more, "--out", str(second)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["pretrain"]["validation_nats_per_token"] < start
