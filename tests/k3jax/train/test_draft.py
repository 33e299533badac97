"""Training of drafts: the packed pass equals inference, and the loss falls."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.cache import Rows
from k3jax.dspark.config import DraftMla
from k3jax.dspark.model import DSpark
from k3jax.runtime import Model
from k3jax.train import draft_grow, draft_losses, draft_run
from k3jax.train.draft_texts import Texts
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
    """Texts that a first-order head can learn: each id follows from the last one."""
    start = np.random.default_rng(0).integers(0, 60, (64, 1))
    ids = ((start + 7 * np.arange(24)[None]) % 60).astype(np.int32)
    return Texts(ids, np.zeros(64, np.int32))


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_packed_pass_equals_drafting_one_by_one(target, config, texts, causal):
    packed_as_alone(target, dataclasses.replace(config, causal=causal), texts)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_latent_drafts_are_packed_as_well(target, config, texts, causal):
    sizes = DraftMla(num_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    packed_as_alone(target, dataclasses.replace(config, causal=causal, attention=sizes), texts)


def packed_as_alone(target, config, texts):
    draft = DSpark(config, draft_run.create(config, 1).masters)
    text = draft_run.read(target.graph, target.leaves, config, jnp.asarray(texts.ids[:2]))
    anchors = jnp.asarray([[0, 5, 17], [3, 4, 20]], jnp.int32)
    embedding = target.graph.merge(target.leaves).embedding[...]
    packed = jax.jit(draft_losses.block_hidden)(draft, text.features, text.ids, anchors, embedding)
    extend, one_block = jax.jit(DSpark.extend), jax.jit(DSpark.draft)
    for b, a in np.ndindex(2, 3):
        length = int(anchors[b, a])
        rows = Rows(*(jnp.asarray(v, jnp.int32) for v in ([1], [[1, 2]], [0], [length])))
        pools = tuple(jnp.zeros((3, 16, config.attention.row_width)) for _ in range(config.num_layers))
        pools = extend(draft, pools, text.features[b : b + 1], rows)
        anchor = text.ids[b, length][None]
        following = dataclasses.replace(rows.advance(), query_length=jnp.ones(1, jnp.int32))
        alone = one_block(draft, pools, anchor, following, embedding, embedding).hidden[0]
        np.testing.assert_allclose(packed[b, a], alone, rtol=2e-4, atol=2e-5)


def test_the_loss_falls_and_drafts_survive(target, config, texts):
    recipe = draft_run.Recipe(steps=60, peak=1e-2, rows=8, anchors=8)
    history = [r for _, r in draft_run.train(target, config, draft_run.create(config, 0), lambda _: [texts], recipe)]
    assert float(history[-1].variation) < 0.85 * float(history[0].variation)
    assert float(history[-1].acceptance_length) > 0.2 + float(history[0].acceptance_length)
    assert np.isfinite([float(entry.loss) for entry in history]).all()
    assert 1 <= float(history[-1].acceptance_length) <= 1 + config.block_size
    assert 1 <= 1 / float(history[-1].pace) <= float(history[-1].acceptance_length)  # a harmonic mean


def test_every_parameter_gets_a_gradient(target, config, texts):
    state = draft_run.create(config, 0)
    text = draft_run.read(target.graph, target.leaves, config, jnp.asarray(texts.ids[:4]))
    anchors = jnp.asarray(draft_run.draw_anchors(np.random.default_rng(0), texts.begin[:4], 24, 6))
    embedding = target.graph.merge(target.leaves).embedding[...]
    noisy = jax.tree.map(lambda m: m + 0.02, state.masters)  # off the zero of the Markov head

    def loss(masters):
        return draft_losses.losses(DSpark(config, masters), text, anchors, embedding, embedding).loss

    for path, gradient in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(noisy)):
        assert np.isfinite(gradient).all(), path
        assert np.any(np.asarray(gradient)), path


def test_a_run_may_resume(target, config, texts):
    recipe = draft_run.Recipe(steps=6, rows=4, anchors=4)
    *_, (whole, _) = draft_run.train(target, config, draft_run.create(config, 0), lambda _: [texts], recipe)
    steps = draft_run.train(target, config, draft_run.create(config, 0), lambda _: [texts], recipe)
    for _ in range(3):
        half, _ = next(steps)
    half = jax.tree.map(jnp.array, half)
    *_, (resumed, _) = draft_run.train(target, config, half, lambda _: [texts], recipe)
    for mine, theirs in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_texts_are_renewed_by_rounds(target, config, texts):
    recipe, asked = draft_run.Recipe(steps=6, rounds=3, rows=4, anchors=4), []

    def of_round(turn):
        asked.append(turn)
        return [Texts(np.full_like(texts.ids, turn), texts.begin)]

    start = draft_run.create(config, 0)._replace(step=jnp.asarray(2, jnp.int32))
    steps = draft_run.train(target, config, start, of_round, recipe)
    states = [next(steps) and tuple(asked) for _ in range(4)]
    assert states == [(1,), (1,), (1, 2), (1, 2)]


def test_texts_may_stay_on_the_device(target, config, texts, monkeypatch):
    """Of two lengths, in chunks that do not fill up."""
    begin = texts.ids[:, 0] % 11  # of each text its own
    kinds = [Texts(texts.ids[:10], begin[:10]), Texts(texts.ids[:, :12], begin)]
    monkeypatch.setattr(draft_run.Shelf, "PARTS", 2)
    recipe = draft_run.Recipe(steps=4, rows=4, anchors=4, resident=True)
    shelves = [draft_run.Shelf(target, config, part, recipe, 24) for part in kinds]
    for shelf, rows, size in zip(shelves, (4, 8), (24, 12), strict=True):
        held, anchors = shelf.batch(np.random.default_rng(4))  # of the last chunk
        assert anchors.shape == (rows, 4 * size // 24)
        assert (anchors >= held.ids[:, :1] % 11 - 1).all()
        again = draft_run.read(target.graph, target.leaves, config, held.ids)
        assert all(any((row == text).all() for text in shelf.texts.ids) for row in np.asarray(held.ids))
        for mine, theirs in zip(held, again, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_run_takes_texts_of_two_lengths_from_the_device(target, config, texts):
    kinds = [Texts(texts.ids[:10], texts.begin[:10]), Texts(texts.ids[:, :12], texts.begin)]
    recipe = draft_run.Recipe(steps=4, rows=4, anchors=4, resident=True)
    steps = draft_run.train(target, config, draft_run.create(config, 0), lambda _: kinds, recipe)
    assert np.isfinite([float(result.loss) for _, result in steps]).all()


def test_a_schedule_may_end_with_the_time(target, config, texts):
    recipe = draft_run.Recipe(steps=10**6, seconds=0.5, rows=4, anchors=4)
    taken = sum(1 for _ in draft_run.train(target, config, draft_run.create(config, 0), lambda _: [texts], recipe))
    assert 1 <= taken < 10_000


def test_anchors_are_distinct_and_lie_where_the_target_wrote():
    begin = np.array([0, 1, 5, 9, 12], np.int32)
    anchors = draft_run.draw_anchors(np.random.default_rng(0), begin, 12, 6)
    assert anchors.shape == (5, 6)
    assert (np.diff(anchors, axis=1) > 0).all()
    assert anchors.max() == 10  # a token follows
    assert set(anchors[2]) <= set(range(4, 11))  # the last token of the prompt is an anchor
    assert {8, 9, 10} <= set(anchors[3])  # too few of those: the rest from the prompt
    assert draft_run.draw_anchors(np.random.default_rng(0), begin, 12, 40).shape == (5, 11)


def test_rows_weigh_as_often_as_they_are_reached():
    objective = draft_losses.Objective(decay=2.0, reach=True)
    valid = np.array([[[True, True, True, False]]])
    q, p = np.float32([[[0.1, 0.6, 0.2, 0.5]]]), np.float32([[[0.2, 0.3, 0.4, 0.5]]])
    weight = draft_losses._row_weights(objective, jnp.asarray(valid), jnp.asarray(q), jnp.asarray(p))
    np.testing.assert_allclose(weight[0, 0], np.exp([0, -0.5, -1, -1.5]) * [1, 0.5, 0.5, 0], rtol=1e-6)
    plain = draft_losses._row_weights(draft_losses.Objective(), jnp.asarray(valid), jnp.asarray(q), jnp.asarray(p))
    np.testing.assert_allclose(plain[0, 0], np.exp([0, -0.25, -0.5, -0.75]) * [1, 1, 1, 0], rtol=1e-6)


def test_pace_weights_are_what_steps_lose_when_a_row_stands_more_often():
    """The derivative of sum 1 / L for blocks whose neighbours are all alike, in float64 by autodiff's definition."""
    chance = np.random.default_rng(0).uniform(0.1, 0.9, (2, 1, 4))

    def steps(chance):
        return (1 / (1 + np.cumprod(chance, axis=-1).sum(axis=-1))).sum()

    slope = np.zeros_like(chance)
    for at in np.ndindex(chance.shape):
        moved = [chance.copy(), chance.copy()]
        for copy, change in zip(moved, (1e-5, -1e-5), strict=True):
            copy[at] += change
        slope[at] = (steps(moved[0]) - steps(moved[1])) / 2e-5
    accept, valid = jnp.asarray(chance, jnp.float32), jnp.ones(chance.shape, bool)
    reached = np.cumprod(np.concatenate([np.ones((2, 1, 1)), chance[..., :-1]], axis=-1), axis=-1)
    local = draft_losses.local_length(accept, valid)
    weight = draft_losses.pace_weights(accept, valid, jnp.asarray(reached, jnp.float32), local)
    np.testing.assert_allclose(weight, -slope, rtol=1e-4)


def test_a_local_length_is_the_mean_of_the_whole_blocks_nearby(monkeypatch):
    monkeypatch.setattr(draft_losses, "NEIGHBOURS", 1)
    chance = np.float32([[[1, 1], [1, 0], [0, 1], [1, 1]], [[1, 1]] * 4])
    valid = np.ones((2, 4, 2), bool)
    valid[0, 3, 1] = valid[1, :, 1] = False  # the last block of the first text and all of the second reach beyond it
    local = draft_losses.local_length(jnp.asarray(chance), jnp.asarray(valid))
    np.testing.assert_allclose(local, [[2.5, 2, 1.5, 1], [1, 1, 1, 1]], rtol=1e-6)


def test_soft_cross_entropy_is_the_mean_over_what_the_target_might_have_written(target, config, texts):
    """Of the one row of a block whose label, the text's last token, exists."""
    text = draft_run.read(target.graph, target.leaves, config, jnp.asarray(texts.ids[:1]))
    draft = DSpark(config, jax.tree.map(lambda m: m + 0.02, draft_run.create(config, 1).masters))
    embedding, anchors = target.graph.merge(target.leaves).embedding[...], jnp.full((1, 1), 22, jnp.int32)

    def entropies(last):
        ended = text._replace(ids=text.ids.at[0, -1].set(last))
        objectives = draft_losses.Objective(), draft_losses.Objective(soft=True)
        return [draft_losses.losses(draft, ended, anchors, embedding, embedding, o).cross_entropy for o in objectives]

    hard, soft = jax.jit(lambda: jax.lax.map(entropies, jnp.arange(64, dtype=jnp.int32)))()
    logits = np.asarray(text.hidden[0, 22] @ embedding.T, np.float64)
    chance = np.exp(logits - logits.max())
    assert np.ptp(hard) > 1e-2
    np.testing.assert_allclose(soft, (chance / chance.sum() * np.asarray(hard)).sum(), rtol=1e-5)


def test_a_grown_draft_computes_the_same(target, config, texts):
    small = dataclasses.replace(config, target_layer_ids=(1,))
    large = dataclasses.replace(
        config, num_layers=2, target_layer_ids=(0, 1), attention=dataclasses.replace(config.attention, num_kv_heads=2)
    )
    parameters = jax.tree.map(lambda m: m + 0.02, draft_run.create(small, 1).masters)
    fresh = draft_run.create(large, 2).masters
    text = draft_run.read(target.graph, target.leaves, large, jnp.asarray(texts.ids[:2]))
    tap, other = jnp.split(text.features, 2, axis=-1)
    anchors, embedding = jnp.asarray([[0, 5], [3, 20]], jnp.int32), target.graph.merge(target.leaves).embedding[...]
    run = jax.jit(draft_losses.block_hidden)
    grown = DSpark(large, draft_grow.grow(small, parameters, large, fresh))
    before = run(DSpark(small, parameters), tap, text.ids, anchors, embedding)
    np.testing.assert_allclose(
        run(grown, jnp.concatenate([tap, other], axis=-1), text.ids, anchors, embedding), before, rtol=1e-5, atol=1e-6
    )
    with pytest.raises(ValueError, match="num_layers is 2, expected at most 1"):
        draft_grow.grow(large, fresh, small, parameters)
