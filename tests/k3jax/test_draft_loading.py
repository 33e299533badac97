"""Drafts from disk through the Python door: same tokens, fewer steps to speak of, clear refusals."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import api, params
from k3jax.cache import Rows
from k3jax.config import ConfigError
from k3jax.dspark import files
from k3jax.dspark.model import TARGET_IDS
from k3jax.dspark.tensors import draft_specs
from k3jax.runtime import Model
from k3jax.sampling import Sampling
from k3jax.speculation.widths import Widths, WidthsError
from k3jax.train.draft_program import draft_config

PROMPTS = [[5, 9, 33, 2, 7], [1, 4], [8] * 40]


@pytest.fixture(scope="module")
def target(tiny_config, random_tree):
    config = dataclasses.replace(
        tiny_config,
        num_layers=2,
        mla_layers=(1,),
        attn_res_block_size=1,
        vocab_size=64,
        bos_token_id=60,
        eos_token_id=62,
        pad_token_id=63,
    )
    return Model.of(config, random_tree(config))


@pytest.fixture(scope="module")
def draft_directory(target, tmp_path_factory):
    config = dataclasses.replace(draft_config(target.config, block_size=3, num_layers=1, markov_rank=8))
    rng = np.random.default_rng(3)

    def fill(spec):
        return jnp.asarray(rng.standard_normal(spec.shape) / np.sqrt(spec.shape[-1]), jnp.float32)

    path = tmp_path_factory.mktemp("draft")
    files.save(path, config, params.map_tree(fill, draft_specs(config)))
    return path


def tokens(model, **options):
    stream = api.generate(model, PROMPTS, max_tokens=48, ignore_eos=True, as_ids=True, **options)
    list(stream)
    return [result.ids for result in stream.results], stream.statistics


@pytest.mark.parametrize("kind", ["dspark", pytest.param("ngram", marks=pytest.mark.slow)])
def test_speculative_decoding_says_the_same(target, draft_directory, kind):
    """`test_prompt_lookup_says_the_same` (test_speculate.py) asks prompt lookup below this door."""
    plain, statistics = tokens(target, temperature=0.0)
    assert statistics.tokens_per_step == 1
    draft = api.load_draft(draft_directory, target) if kind == "dspark" else api._draft(target, draft_directory, kind)
    said, with_draft = tokens(dataclasses.replace(target, draft=draft), temperature=0.0)
    assert said == plain
    assert with_draft.completion_tokens == statistics.completion_tokens
    assert 1 <= with_draft.tokens_per_step <= 8
    if kind == "ngram":
        assert with_draft.tokens_per_step > 1  # it was right at least once


def test_sampling_with_a_draft_is_repeatable(target, draft_directory):
    model = dataclasses.replace(target, draft=api.load_draft(draft_directory, target))
    first, _ = tokens(model, temperature=0.9, seed=4)
    second, _ = tokens(model, temperature=0.9, seed=4)
    assert first == second
    assert [len(row) for row in first] == [48] * 3


def test_auto_takes_the_directory_beside_the_checkpoint(target, draft_directory, tmp_path):
    beside = tmp_path / "model-dspark"
    beside.symlink_to(draft_directory)
    assert api._draft(target, tmp_path / "model", "auto") is not None
    assert api._draft(target, tmp_path / "other", "auto") is None
    assert api._draft(target, tmp_path / "model", "none") is None


def test_a_saved_draft_reads_back(target, draft_directory):
    draft = api.load_draft(draft_directory, target)
    assert draft.drafter.config == draft_config(target.config, block_size=3, num_layers=1, markov_rank=8)


def save_reduced(target, directory, seed=4):
    """A draft that knows 24 of the target's 64 ids and has no head of its own."""
    ids = np.sort(np.random.default_rng(seed).choice(64, 24, replace=False)).astype(np.int32)
    config = dataclasses.replace(
        draft_config(target.config, block_size=3, num_layers=1, markov_rank=8), draft_vocab_size=24
    )
    rng = np.random.default_rng(seed)
    tree = params.map_tree(
        lambda spec: jnp.asarray(rng.standard_normal(spec.shape) / np.sqrt(spec.shape[-1]), jnp.float32),
        draft_specs(config),
    )
    files.save(directory, config, {**tree, TARGET_IDS: ids})
    return ids


def test_a_reduced_vocabulary_drafts_its_own_tokens_and_says_what_the_target_says(target, tmp_path):
    ids = save_reduced(target, tmp_path)
    draft = api.load_draft(tmp_path, target)
    module = draft.drafter.merge(draft.leaves)
    head = target.graph.merge(target.leaves).head[...]
    np.testing.assert_array_equal(module.optional["head"][...], head[ids])  # the target's rows, once and for all
    pools = draft.drafter.create(pages=3, page_size=64, dtype=jnp.float32)
    one = jnp.ones(2, jnp.int32)
    rows, anchor = Rows(one, one[:, None], 0 * one, one), jnp.asarray([5, 9], jnp.int32)
    sampler = Sampling.of(2, temperature=[1.0, 0.0], seed=[1, 2])
    proposal = draft.drafter.propose(draft.leaves, pools, target.graph.merge(target.leaves), anchor, rows, sampler)
    assert proposal.probability.shape == (2, 3, 64)
    law = np.asarray(proposal.probability)
    np.testing.assert_allclose(law.sum(-1), 1, rtol=1e-5)
    assert not law[..., np.setdiff1d(np.arange(64), ids)].any()
    assert (np.take_along_axis(law, np.asarray(proposal.token)[..., None], -1) > 0).all()


@pytest.mark.slow
def test_a_reduced_vocabulary_leaves_greedy_decoding_as_it_is(target, tmp_path):
    save_reduced(target, tmp_path)
    plain, _ = tokens(target, temperature=0.0)
    said, _ = tokens(dataclasses.replace(target, draft=api.load_draft(tmp_path, target)), temperature=0.0)
    assert said == plain


def test_widths_are_checked_against_the_draft(target, draft_directory):
    for sizes, message in (((2, 9), "draft widths are 2, 9, expected"), ((4, 2), "are 4, 2"), ((0, 2), "are 0, 2")):
        with pytest.raises(WidthsError, match=message):
            api._draft(target, draft_directory, str(draft_directory), Widths(sizes))
    with pytest.raises(WidthsError, match="need a DSpark draft with a confidence head"):
        api._draft(target, draft_directory, "ngram", Widths((2, 4)))
    assert api._draft(target, draft_directory, str(draft_directory), Widths((2, 4))).widths == Widths((2, 4))


def test_a_draft_of_another_target_is_refused(target, draft_directory, tmp_path):
    raw = json.loads((draft_directory / "config.json").read_text())
    raw |= {"target_hidden_size": 99, "target_layer_ids": [0, 70]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"(?s)not a draft of this model.*target_hidden_size is 99.*\[0, 70\]"):
        api.load_draft(tmp_path, target)


def test_missing_and_misshapen_tensors_are_named(target, draft_directory, tmp_path):
    from checkpoints import CheckpointError

    (tmp_path / files.WEIGHTS).write_bytes((draft_directory / files.WEIGHTS).read_bytes())
    raw = json.loads((draft_directory / "config.json").read_text()) | {"intermediate_size": 32, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError) as caught:
        api.load_draft(tmp_path, target)
    assert "layers.1.self_attn.q_proj.weight: missing" in str(caught.value)
    assert "layers.0.mlp.down_proj.weight: shape" in str(caught.value)
