"""`k3jax.verify --draft`: passes on DeepSpec's outputs and on other sizes, finds every kind of difference."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from k3jax import verify
from tests.k3jax.plain_draft import PlainDraft, shapes

CONFIG = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "vocab_size": 97,
    "draft_vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "hidden_act": "silu",
    "is_causal": True,
    "target_layer_ids": [0, 2, 3, 6],
    "target_hidden_size": 40,
    "mask_token_id": 96,
    "block_size": 5,
    "markov_rank": 12,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def make(directory, config, lengths, seed=0):
    """Writes a random draft and its golden file; gives their arrays."""
    rng = np.random.default_rng(seed)
    features = len(config["target_layer_ids"]) * config["target_hidden_size"]
    tensors = {}
    for name, shape in shapes(config, features).items():
        values = rng.standard_normal(shape) / np.sqrt(shape[-1]) + (1 if "norm" in name else 0)
        tensors[name] = np.asarray(jnp.asarray(values * (1 if "norm" in name else 1.6), jnp.bfloat16))
    own, vocab = config["draft_vocab_size"], config["vocab_size"]
    if own < vocab:
        ids = np.sort(rng.choice(vocab, own, replace=False))
        tensors["d2t"] = ids - np.arange(own)
        tensors["t2d"] = np.isin(np.arange(vocab), ids)
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    draft, golden = PlainDraft(config, tensors), {}
    for step, tokens in enumerate(lengths):
        taps = rng.standard_normal((tokens, features)).astype(np.float32)
        quantities = draft.step(taps, int(rng.integers(vocab)))
        golden |= {f"{step}.{name}": array for name, array in quantities.items()}
    return golden


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    """A draft unlike the stored ones: other sizes, causal, gated, four taps, a reduced vocabulary, six steps."""
    directory = tmp_path_factory.mktemp("draft") / "draft"
    return directory, make(directory, CONFIG, (70, 1, 5, 0, 3, 2))


def run(directory, arrays, tmp_path, *more):
    np.savez(tmp_path / "golden.npz", **arrays)
    return verify.main(["--draft", str(directory), "--golden", str(tmp_path / "golden.npz"), *more])


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_agrees_with_deepspec(shared, kind, capsys):
    path = shared / "golden" / f"dspark_{kind}"
    assert verify.main(["--draft", str(path), "--golden", str(path / "golden.npz")]) == 0
    lines = capsys.readouterr().out.splitlines()
    with np.load(path / "golden.npz") as file:
        held = [key for key in file.files if not key.endswith(("target_features", "anchor"))]
    assert {line.split()[1] for line in lines[:-1]} == set(held)
    assert " 0 failed; tolerance 0.0002" in lines[-1]


def test_another_size_and_a_reduced_vocabulary(drafted, tmp_path, capsys):
    directory, golden = drafted
    assert run(directory, golden, tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("24 compared, 0 failed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_the_other_heads_at_another_size(kind, tmp_path):
    config = CONFIG | {"markov_head_type": kind, "is_causal": False, "block_size": 4, "num_hidden_layers": 3}
    assert run(tmp_path / "draft", make(tmp_path / "draft", config, (9, 2, 4), seed=1), tmp_path) == 0


def test_a_config_without_a_block_size_takes_the_files(drafted, tmp_path):
    directory, golden = drafted
    shutil.copytree(directory, tmp_path / "draft")
    config = {name: value for name, value in CONFIG.items() if name != "block_size"}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    assert run(tmp_path / "draft", golden, tmp_path) == 0


def test_every_difference_ends_with_1(drafted, tmp_path, capsys):
    directory, golden = drafted
    changes = {
        "0.base_logits": lambda array: array * 1.001,
        "1.tokens": lambda array: np.where(np.arange(5) == 3, array + 1, array),
        "2.logits": lambda array: np.where(array == array.max(), np.nan, array),
        "4.logits": lambda array: array[:, 1:],
        "5.confidence_logits": lambda array: array + 0.01,
    }
    changed = {name: change(golden[name]) for name, change in changes.items()}
    assert run(directory, golden | changed, tmp_path) == 1
    failed = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert failed == list(changes)
    assert run(directory, golden | {"1.tokens": changed["1.tokens"]}, tmp_path) == 1


def test_shifted_inputs_are_noticed(drafted, tmp_path, capsys):
    """One place off in the taps, the anchor, or where a step's context begins: outputs differ at once."""
    directory, golden = drafted
    taps = golden["0.target_features"]
    for changed in (
        {"0.target_features": np.roll(taps, 1, axis=0)},
        {"0.target_features": np.roll(taps, -1, axis=0)},
        {"0.target_features": taps[1:]},
        {"0.target_features": np.roll(taps, 40, axis=1)},
        {"0.anchor": (golden["0.anchor"] + 1) % 96},
    ):
        assert run(directory, golden | changed, tmp_path) == 1
        assert "FAIL 0.base_logits" in capsys.readouterr().out


def without(arrays, *names):
    return {name: array for name, array in arrays.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: without(g, "0.anchor"), "0.anchor is missing, expected an array"),
        (lambda g: {"a": np.zeros(3)}, "holds no step, expected names such as 0.target_features"),
        (lambda g: without(g, "1.target_features", *(n for n in g if n[0] == "1")), "holds steps [0, 2, 3, 4, 5]"),
        (lambda g: g | {"0.anchor": np.asarray(97)}, "0.anchor is 97, expected 0 to 96"),
        (lambda g: g | {"2.anchor": np.asarray([1.5])}, "2.anchor is float64 [1], expected one integer"),
        (
            lambda g: g | {"0.target_features": np.zeros((4, 159))},
            "0.target_features is [4, 159], expected [tokens, 160] (4 taps of 40)",
        ),
    ],
)
def test_files_that_cannot_be_used_are_one_line(drafted, tmp_path, capsys, change, message):
    directory, golden = drafted
    assert run(directory, change(golden), tmp_path) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft", "here"], "error: give --golden FILE, --self or --against xla, one of them"),
        (["--draft", "here", "--self"], "error: --draft needs --golden FILE"),
        (["--draft", "nowhere", "--golden", "g"], "error: draft nowhere does not exist; give the path of one"),
        (["--draft", "here", "--golden", "g"], "error: golden file g does not exist; give the path of one"),
        (["a", "b", "--golden", "g"], "error: 2 checkpoints are given (a b); give one"),
        (["--golden", "g"], "error: no checkpoint; give the path of one, or --draft DIR --golden FILE"),
    ],
)
def test_wrong_command_lines_exit_with_2(arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert verify.main(arguments) == 2
    assert capsys.readouterr().err == message + "\n"


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (lambda own: own * 0 + 90, "d2t[7] gives the target's id 97, expected 0 to 96"),
        (lambda own: np.where(own == 3, -4, 0), "d2t[3] gives the target's id -1, expected 0 to 96"),
        (lambda own: np.where(own == 3, 1, 0), "d2t gives a target id to two draft ids"),
        (lambda own: own[1:] * 0, "d2t is int64 [39], expected integers [40] (draft_vocab_size)"),
        (None, "d2t: missing, expected integers [40] (draft_vocab_size)"),
    ],
)
def test_vocabulary_tables_that_cannot_be_used(drafted, tmp_path, capsys, offsets, message):
    directory, golden = drafted
    shutil.copytree(directory, tmp_path / "draft")
    rewrite(tmp_path / "draft", offsets)
    assert run(tmp_path / "draft", golden, tmp_path) == 1
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def rewrite(directory, offsets):
    """Replaces d2t, or drops it."""
    config = json.loads((directory / "config.json").read_text())
    features = len(config["target_layer_ids"]) * config["target_hidden_size"]
    tensors = {name: np.zeros(shape, jnp.bfloat16) for name, shape in shapes(config, features).items()}
    if offsets is not None:
        tensors["d2t"] = offsets(np.arange(40))
    save_file(tensors, directory / "model.safetensors")


def test_a_draft_without_a_head_asks_for_its_target(drafted, tmp_path, capsys):
    _, golden = drafted
    config = CONFIG | {"draft_vocab_size": 97}
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    names = shapes(config, 160)
    tensors = {name: np.zeros(shape, jnp.bfloat16) for name, shape in names.items() if name != "lm_head.weight"}
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    assert run(tmp_path / "draft", golden, tmp_path) == 2
    assert "has no embedding of its own; give the checkpoint of its target too" in capsys.readouterr().err
