"""From prepared data to a trained, measured draft."""

import dataclasses
import json

import numpy as np
import pytest

from checkpoints import orbax_adapter
from k3jax import api
from k3jax.runtime import Model
from k3jax.train import draft_acceptance, draft_program
from k3jax.train.draft_data import Prepared
from k3jax.train.report import Journal

FILES = {"training": {"a.py": 90, "b.rst": 70, "c.py": 30}, "validation": {"d.py": 80, "e.md": 60}}
"""Tokens of each file; the ids of a file say where they lie."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    path, lines = tmp_path_factory.mktemp("prepared"), []
    for split, files in FILES.items():
        start, ids = 0, []
        for name, size in files.items():
            lines.append(f"{split}\t{name}\t{start}\t{size}")
            ids += [*((start + np.arange(size)) % 60).tolist(), 61]
            start += size + 1
        np.save(path / f"{split}.npy", np.array(ids, np.uint16))
    (path / "documents.tsv").write_text("".join(f"{line}\n" for line in lines))
    np.save(path / "chat_ids.npy", np.full((5, 41), 7, np.uint16))
    return Prepared(path)


@pytest.mark.parametrize(("split", "kind", "first"), [("training", "python", 0), ("validation", "prose", 81)])
def test_windows_lie_inside_files_of_their_kind(prepared, split, kind, first):
    windows = prepared.windows(np.random.default_rng(0), 200, 40, split=split, kind=kind)
    size = FILES[split]["a.py" if kind == "python" else "e.md"]
    starts = (windows[:, 0] - first) % 60
    assert set(starts.tolist()) <= set(range(size - 40 + 1))
    np.testing.assert_array_equal(windows, (windows[:, :1] + np.arange(40)[None]) % 60)


def test_texts_mix_python_prose_and_chat(prepared):
    texts = prepared.texts(np.random.default_rng(0), 16, 40)
    assert texts.shape == (16, 40)
    assert (texts == 7).all(axis=1).sum() == 2
    with pytest.raises(ValueError, match="no training file of prose with 80 tokens"):
        prepared.windows(np.random.default_rng(0), 1, 80, split="training", kind="prose")
    assert prepared.mixed(np.random.default_rng(0), 4, 80).shape == (4, 80)  # Python stands in


def test_a_run_that_goes_on_has_the_same_texts(prepared, tmp_path, monkeypatch):
    model = object.__new__(Model)  # nothing reads it here
    monkeypatch.setattr(draft_program, "write_texts", lambda _, prompts, plan: np.pad(prompts, ((0, 0), (0, 16))))
    plan = draft_program.Plan(out=tmp_path, steps=1, texts=6, length=24, prompt=8, corpus=10)
    with Journal(tmp_path / "log.jsonl") as journal:
        first, again = (draft_program.gather_texts(model, prepared, plan, journal) for _ in range(2))
    assert first.shape == (16, 24)
    np.testing.assert_array_equal(again, first)


@pytest.mark.slow
def test_a_draft_is_trained_saved_resumed_and_measured(prepared, tiny_config, random_tree, tmp_path, monkeypatch):
    config = dataclasses.replace(
        tiny_config, num_layers=2, mla_layers=(1,), vocab_size=64, bos_token_id=60, eos_token_id=62, pad_token_id=63
    )
    model = Model.of(config, random_tree(config))
    draft_config = draft_program.draft_config(config, block_size=3, num_layers=1, markov_rank=8, markov_kind="rnn")
    plan = draft_program.Plan(
        out=tmp_path, steps=4, rows=2, anchors=4, texts=6, length=24, prompt=8, corpus=4, save_every=2
    )
    storage = orbax_adapter.write, orbax_adapter.read
    state = draft_program.run(model, draft_config, prepared, plan, *storage)
    assert int(state.step) == 4
    assert [path.name for path in sorted(tmp_path.glob("state-*"))] == ["state-000002", "state-000004"]
    again = draft_program.run(model, draft_config, prepared, dataclasses.replace(plan, steps=5), *storage)
    assert int(again.step) == 5
    assert np.load(tmp_path / draft_program.TEXTS).shape == (6, 24)
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["markov_head_type"] == "rnn"
    draft = api.load_draft(tmp_path / "draft", model)
    protocol = draft_acceptance.Protocol(rows=3, prompt=16, long_prompt=70, tokens=12)
    monkeypatch.setattr(Prepared, "requests", lambda *_: ([[1, 2, 3]], (61,)))  # the fixture has no tokenizer
    measured = draft_acceptance.measure(model, draft, prepared, protocol)
    assert measured["block"].keys() == {"python", "python, long context", "prose", "requests"}
    for by_task in measured.values():
        for task in by_task.values():
            assert 1 <= task["acceptance_length"] <= 4
            assert task["acceptance_length"] == pytest.approx(1 + sum(task["survival"]), abs=2e-3)
    hot = dataclasses.replace(protocol, temperature=1e4)
    flat = draft_acceptance.accepted(model, draft, "block", {"any": draft_acceptance.Task([[1, 2, 3]] * 2)}, hot)
    assert flat["any"].acceptance_length > 3.5  # both distributions are flat, so nearly every token stands
