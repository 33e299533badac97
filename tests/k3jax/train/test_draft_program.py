"""From prepared data to a trained, measured draft."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import orbax_adapter
from k3jax import api, step
from k3jax.cache import Rows
from k3jax.runtime import Model
from k3jax.train import draft_acceptance, draft_program, draft_texts
from k3jax.train.draft_data import Prepared
from k3jax.train.draft_texts import Texts
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
    monkeypatch.setattr(draft_program, "TOGETHER", 4)

    def write(_, prompts, length, seed):
        rest = np.full((len(prompts), length - prompts.shape[1]), seed % 60, np.int32)
        return Texts(np.concatenate([prompts, rest], axis=1), np.full(len(prompts), prompts.shape[1], np.int32))

    monkeypatch.setattr(draft_texts, "write", write)
    plan = draft_program.Plan(out=tmp_path, steps=1, texts=(6, 2), length=(32, 48), corpus=10)
    with Journal(tmp_path / "log.jsonl") as journal:
        first, again = (draft_program.gather_texts(model, prepared, plan, journal) for _ in range(2))
    assert [part.ids.shape for part in first] == [(16, 32), (12, 48)]
    assert first[0].begin.tolist() == [2] * 4 + [16] * 2 + [0] * 10
    assert len(set(first[0].ids[[0, 4], -1]) | {first[1].ids[0, -1]}) == 3  # every batch has a seed of its own
    for mine, theirs in zip(again, first, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(a, b)
    with Journal(tmp_path / "log.jsonl") as journal:
        later = draft_program.gather_texts(model, prepared, plan, journal, 1)
    assert later[0].begin.tolist() == [4] * 4 + [8] * 2 + [0] * 10  # the next shares of prompts
    assert not set(later[0].ids[:, -1]) & set(first[0].ids[:6, -1])


def test_lengths_and_numbers_of_texts_go_together(tmp_path):
    with pytest.raises(ValueError, match="2 lengths and 1 numbers of texts"):
        draft_program.Plan(out=tmp_path, steps=1, texts=(6,), length=(32, 48))
    with pytest.raises(ValueError, match=r"lengths \(32, 32\) repeat"):
        draft_program.Plan(out=tmp_path, steps=1, texts=(6, 2), length=(32, 32))
    with pytest.raises(ValueError, match="rounds is 0, expected at least 1"):
        draft_program.Plan(out=tmp_path, steps=1, rounds=0)
    with pytest.raises(ValueError, match="no texts to train on"):
        draft_program.Plan(out=tmp_path, steps=1, texts=(0,), length=(32,))


def test_the_error_counts_rows_not_steps():
    alike = draft_acceptance.summarise(np.array([[0, 2], [2, 0], [1, -1]]))
    assert alike == (2.0, 0.0, [0.6, 0.4])
    apart = draft_acceptance.summarise(np.array([[0, 2], [0, 2]]))
    assert apart.acceptance_length == 2.0
    assert apart.standard_error == 1.0  # of two rows, at 0 and 2


@pytest.fixture(scope="module")
def small(tiny_config, random_tree):
    config = dataclasses.replace(
        tiny_config, num_layers=2, mla_layers=(1,), vocab_size=64, bos_token_id=60, eos_token_id=62, pad_token_id=63
    )
    return Model.of(config, random_tree(config))


def test_the_target_goes_on_from_its_prompts(small, monkeypatch):
    """With the likeliest token in place of a random one; the reference is one pass without a cache."""
    monkeypatch.setattr(draft_texts, "draw", lambda logits, _: jnp.argmax(logits, axis=-1).astype(jnp.int32))
    monkeypatch.setattr(draft_texts, "PREFILLED", 2)
    prompts = np.random.default_rng(0).integers(0, 60, (4, 70)).astype(np.int32)
    texts = draft_texts.write(small, prompts, 110, 0)
    assert texts.ids.shape == (4, 110)
    assert texts.begin.tolist() == [70] * 4
    np.testing.assert_array_equal(texts.ids[:, :70], prompts)
    rows = Rows(np.zeros(4, np.int32), np.zeros((4, 1), np.int32), np.zeros(4, np.int32), np.full(4, 110, np.int32))
    logits = step.forward(small.graph, small.leaves, *small.place((rows, texts.ids))).logits
    np.testing.assert_array_equal(texts.ids[:, 70:], np.argmax(logits, axis=-1)[:, 69:-1])


@pytest.mark.slow
def test_a_draft_is_trained_saved_resumed_and_measured(prepared, small, tmp_path, monkeypatch):
    model, config = small, small.config
    draft_config = draft_program.draft_config(config, block_size=3, num_layers=1, markov_rank=8, markov_kind="rnn")
    plan = draft_program.Plan(
        out=tmp_path, steps=4, rows=2, anchors=4, texts=(6,), length=(24,), corpus=4, save_every=2
    )
    storage = orbax_adapter.write, orbax_adapter.read
    state = draft_program.run(model, draft_config, prepared, plan, *storage)
    assert int(state.step) == 4
    assert [path.name for path in sorted(tmp_path.glob("state-*"))] == ["state-000002", "state-000004"]
    again = draft_program.run(model, draft_config, prepared, dataclasses.replace(plan, steps=5), *storage)
    assert int(again.step) == 5
    with np.load(tmp_path / "texts-24-0.npz") as texts:
        assert texts["ids"].shape == (6, 24)
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
