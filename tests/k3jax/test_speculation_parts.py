"""The pieces of a speculative step, each against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import sampling
from k3jax.cache import K3Cache, Rows
from k3jax.logit_rules import LogitRules
from k3jax.speculation import parts
from k3jax.speculation.randomness import distribution
from k3jax.speculation.state import SpeculativeState
from k3jax.speculation.widths import Widths

VOCAB, WIDTH = 24, 4


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def state(history, running=(1, 1)):
    count = jnp.asarray(running, jnp.int32)
    rows = Rows(count, count[:, None], count * 0 + 7, count)
    return SpeculativeState(K3Cache(()), (), rows, count, count * 9, history)


def test_penalties_see_the_drafts_before_each_place():
    """Row k of the target's laws is what plain sampling would use after drafts 1 to k."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((2, WIDTH, VOCAB)).astype(np.float32)
    drafts = np.asarray([[3, 3, 5], [1, 2, 1]], np.int32)
    prompt, count = np.zeros((2, VOCAB), bool), np.zeros((2, VOCAB), np.int32)
    prompt[:, [2, 7]], count[:, [4, 3]] = True, 2
    history = sampling.History(jnp.asarray(prompt), jnp.asarray(count), jnp.asarray([8, 8], jnp.int32))
    settings = {"temperature": [0.7, 1.3], "repetition_penalty": [1.4, 1.0], "frequency_penalty": [0.3, 0.5]}
    settings["presence_penalty"] = [0.2, 0.6]
    given = parts.Given(sampling.Sampling.of(2, **settings), jnp.full((2, 1), -1, jnp.int32))
    laws = parts.target_distributions(jnp.asarray(logits), jnp.asarray(drafts), state(history), given)
    for row in range(2):
        for k in range(WIDTH):
            said = count[row] + np.bincount(drafts[row, :k], minlength=VOCAB)
            x = logits[row, k].copy()
            factor = settings["repetition_penalty"][row]
            x = np.where(prompt[row] | (said > 0), np.where(x > 0, x / factor, x * factor), x)
            x = x - settings["frequency_penalty"][row] * said - settings["presence_penalty"][row] * (said > 0)
            np.testing.assert_allclose(laws[row, k], softmax(x / settings["temperature"][row]), rtol=1e-4, atol=1e-6)


def test_rules_hold_in_the_block_and_a_mask_ends_it():
    """Biases and forbidden stops at every place; rows under a mask take no draft and obey it."""
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.standard_normal((2, WIDTH, VOCAB)), jnp.float32)
    history = sampling.History.of([[1], [1]], VOCAB)
    rules = LogitRules(
        bias_ids=jnp.asarray([[5], [-1]], jnp.int32),
        bias=jnp.asarray([[50.0], [0.0]], jnp.float32),
        biased=jnp.asarray([True, False]),
        min_length=jnp.asarray([0, 0], jnp.int32),
        allowed=jnp.asarray([[-1], [1 << 9]], jnp.int32),
        constrained=jnp.asarray([False, True]),
    )
    sampler, stops = sampling.Sampling.of(2, temperature=1.0, seed=[3, 4]), jnp.full((2, 1), -1, jnp.int32)
    drafts = jnp.full((2, 3), 5, jnp.int32)
    law = jnp.broadcast_to(jnp.eye(VOCAB, dtype=jnp.float32)[5], (2, 3, VOCAB))
    judged = parts.judge(
        logits, parts.Proposal(drafts, law), state(history), parts.Given(sampler, stops, rules), parts.Options()
    )
    np.testing.assert_array_equal(judged.block.accepted, [3, 0])
    np.testing.assert_array_equal(judged.block.verified, [3, 0])
    np.testing.assert_array_equal(judged.block.token[0], [5, 5, 5, 5])
    assert (int(judged.block.token[1, 0]), int(judged.block.count[1])) == (9, 1)


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": [4, 0]}, {"top_p": [0.5, 0.8], "temperature": [1.0, 0.0]}, {"min_p": 0.2}]
)
def test_filters_known_beforehand_change_nothing(settings):
    logits = jnp.asarray(np.random.default_rng(2).standard_normal((2, VOCAB)), jnp.float32)
    sampler = sampling.Sampling.of(2, **settings)
    known = distribution(logits, sampler, sampling.Filters.of(sampler))
    np.testing.assert_array_equal(known, distribution(logits, sampler))


def test_a_block_ends_where_the_next_draft_is_unlikely_to_survive():
    chances = np.asarray([[0.9, 0.9, 0.9, 0.9], [0.1, 0.9, 0.9, 0.9], [0.9, 0.5, 0.3, 0.9], [0.9, 0.9, 0.1, 0.9]])
    logits = jnp.asarray(np.log(chances / (1 - chances)), jnp.float32)
    widths = Widths((1, 3, 5), survival=0.4)
    # Row 1 ends at once, row 3 after two drafts, for its third one survives with 0.08; row 2's third with 0.135.
    np.testing.assert_array_equal(widths.limits(logits), [4, 0, 2, 2])
    running = jnp.asarray([False, True, True, True])
    assert int(widths.choose(widths.limits(logits), running)) == 1
    assert int(widths.choose(widths.limits(logits), ~running)) == 2
    assert int(widths.choose(jnp.zeros(4, jnp.int32), running)) == 0


def test_a_limit_does_not_depend_on_later_confidences():
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((200, 7)).astype(np.float32) + 1
    widths = Widths((2, 4, 8), survival=0.3)
    limits = np.asarray(widths.limits(jnp.asarray(logits)))
    assert set(limits) == {1, 3, 7}
    for row, limit in zip(logits, limits, strict=True):
        row[limit + 1 :] = 9.0
    np.testing.assert_array_equal(widths.limits(jnp.asarray(logits)), limits)
