"""Training of drafts: the packed pass equals inference, and the loss falls."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.cache import Rows
from k3jax.dspark.model import DSpark
from k3jax.runtime import Model
from k3jax.train import draft_losses, draft_run
from tests import small_draft


@pytest.fixture(scope="module")
def target(tiny_config, random_tree):
    config = dataclasses.replace(
        tiny_config,
        num_layers=2,
        mla_layers=(1,),
        attn_res_block_size=2,
        vocab_size=64,
        bos_token_id=60,
        eos_token_id=61,
        pad_token_id=63,
    )
    return Model.of(config, random_tree(config))


@pytest.fixture(scope="module")
def config(target):
    return small_draft.settings(target.config, taps=(0, 1), mask=62, confidence=True)


@pytest.fixture(scope="module")
def texts():
    """A text that a first-order head can learn: each id follows from the last one."""
    start = np.random.default_rng(0).integers(0, 60, (64, 1))
    return ((start + 7 * np.arange(24)[None]) % 60).astype(np.int32)


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_packed_pass_equals_drafting_one_by_one(target, config, texts, causal):
    config = dataclasses.replace(config, causal=causal)
    draft = DSpark(config, draft_run.create(config, 1).masters)
    text = draft_run.read(target.graph, target.leaves, config, jnp.asarray(texts[:2], jnp.int32))
    anchors = jnp.asarray([[0, 5, 17], [3, 4, 20]], jnp.int32)
    embedding = target.graph.merge(target.leaves).embedding[...]
    packed = draft_losses.block_hidden(draft, text.features, text.ids, anchors, embedding)
    for b, a in np.ndindex(2, 3):
        length = int(anchors[b, a])
        rows = Rows(*(jnp.asarray(v, jnp.int32) for v in ([1], [[1, 2]], [0], [length])))
        pools = tuple(jnp.zeros((3, 16, config.attention.row_width)) for _ in range(config.num_layers))
        pools = draft.extend(pools, text.features[b : b + 1], rows)
        anchor = text.ids[b, length][None]
        alone = draft.draft(pools, anchor, rows.advance(), embedding, embedding).hidden[0]
        np.testing.assert_allclose(packed[b, a], alone, rtol=2e-4, atol=2e-5)


def test_the_loss_falls_and_drafts_survive(target, config, texts):
    recipe = draft_run.Recipe(steps=60, peak=1e-2, anchors=8)
    history = [r for _, r in draft_run.train(target, config, draft_run.create(config, 0), texts, recipe, rows=8)]
    assert float(history[-1].variation) < 0.85 * float(history[0].variation)
    assert float(history[-1].acceptance_length) > 0.2 + float(history[0].acceptance_length)
    assert np.isfinite([float(entry.loss) for entry in history]).all()
    assert 1 <= float(history[-1].acceptance_length) <= 1 + config.block_size


def test_every_parameter_gets_a_gradient(target, config, texts):
    state = draft_run.create(config, 0)
    text = draft_run.read(target.graph, target.leaves, config, jnp.asarray(texts[:4], jnp.int32))
    anchors = jnp.asarray(draft_run.draw_anchors(np.random.default_rng(0), 4, 24, 6))
    embedding = target.graph.merge(target.leaves).embedding[...]
    noisy = jax.tree.map(lambda m: m + 0.02, state.masters)  # off the zero of the Markov head

    def loss(masters):
        return draft_losses.losses(DSpark(config, masters), text, anchors, embedding, embedding).loss

    for path, gradient in jax.tree_util.tree_leaves_with_path(jax.grad(loss)(noisy)):
        assert np.isfinite(gradient).all(), path
        assert np.any(np.asarray(gradient)), path


def test_a_run_may_resume(target, config, texts):
    recipe = draft_run.Recipe(steps=6, anchors=4)
    *_, (whole, _) = draft_run.train(target, config, draft_run.create(config, 0), texts, recipe, rows=4)
    steps = draft_run.train(target, config, draft_run.create(config, 0), texts, recipe, rows=4)
    for _ in range(3):
        half, _ = next(steps)
    half = jax.tree.map(jnp.array, half)
    *_, (resumed, _) = draft_run.train(target, config, half, texts, recipe, rows=4)
    for mine, theirs in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_texts_may_stay_on_the_device(target, config, texts):
    recipe = draft_run.Recipe(steps=3, anchors=4)
    resident = dataclasses.replace(recipe, resident=True)
    results = [
        [float(result.loss) for _, result in draft_run.train(target, config, draft_run.create(config, 0), texts, r, 4)]
        for r in (recipe, resident)
    ]
    assert len(results[0]) == 3
    np.testing.assert_allclose(*results, rtol=1e-5)
    memory = draft_run.remember(target, config, texts[:6], 4)
    np.testing.assert_array_equal(memory.ids, texts[:6])


def test_a_schedule_may_end_with_the_time(target, config, texts):
    recipe = draft_run.Recipe(steps=10**6, seconds=0.5, anchors=4)
    taken = sum(1 for _ in draft_run.train(target, config, draft_run.create(config, 0), texts, recipe, 4))
    assert 1 <= taken < 10_000


def test_anchors_are_distinct_and_have_a_label():
    anchors = draft_run.draw_anchors(np.random.default_rng(0), 5, 12, 40)
    assert anchors.shape == (5, 11)
    assert (np.diff(anchors, axis=1) > 0).all()
    assert anchors.max() == 10
