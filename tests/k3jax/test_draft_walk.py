"""A block drafted in one launch: the tokens, distributions and confidence of drafting one by one."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import params, sampling
from k3jax.cache import Rows
from k3jax.dspark import quantized
from k3jax.dspark.model import Draft, DSpark
from k3jax.dspark.tensors import draft_specs
from k3jax.speculation.drafters import DSparkDrafter
from pallas import markov
from tests import small_draft

VOCABULARY, WIDTH = 96, 32


@pytest.fixture(scope="module")
def config():
    return small_draft.published(SimpleNamespace(vocab_size=VOCABULARY, hidden_size=WIDTH), layers=1)


def drafter_of(config, kind="int8"):
    rng = np.random.default_rng(5)
    fill = lambda spec: jnp.asarray(rng.standard_normal(spec.shape), jnp.float32)  # noqa: E731
    tree = params.map_tree(fill, draft_specs(config))
    return DSparkDrafter.of(DSpark(config, quantized.quantize(tree) if kind == "int8" else tree))


def inputs_of(drafter, temperature, rows=1):
    """A block, anchors, places and settings."""
    rng, size = np.random.default_rng(int(10 * temperature)), drafter.config.block_size
    block = Draft(
        jnp.asarray(rng.standard_normal((rows, size, WIDTH)), jnp.float32),
        jnp.asarray(rng.standard_normal((rows, size, VOCABULARY)), jnp.float32),
        (),
    )
    number = jnp.arange(1, rows + 1, dtype=jnp.int32)
    given = sampling.Sampling.of(rows, temperature=temperature, seed=list(range(3, 3 + rows)))
    return block, number + 10, Rows(number, number[:, None], number + 6, number * 0 + 1), given


@pytest.fixture
def launches(monkeypatch):
    """The portable walk in the kernel's place, which counts its calls."""
    calls = []

    def walk(*args, implementation):
        calls.append(implementation)
        return portable(*args, implementation="xla")

    portable = markov.walk
    monkeypatch.setattr(markov, "walk", walk)
    return calls


def test_one_launch_drafts_what_steps_draft(config, launches):
    drafter, leaves = drafter_of(config)
    quick, slow = (
        jax.jit(functools.partial(drafter.choose, filters=filters))
        for filters in (sampling.NO_FILTERS, sampling.Filters(top_p=False, min_p=False))
    )
    for temperature in (0.0, 0.6, 1.0):
        given = inputs_of(drafter, temperature)
        one, other = quick(leaves, *given), slow(leaves, *given)
        np.testing.assert_array_equal(one.token, other.token)
        np.testing.assert_allclose(one.distributions(given[-1]), other.probability, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(one.confidence, other.confidence, rtol=1e-5, atol=1e-5)
        assert len(np.unique(one.token)) > 1
    assert launches == ["mosaic"]


@pytest.mark.parametrize(
    ("kind", "change", "rows"), [("int8", {}, 2), ("model", {}, 1), ("int8", {"markov_kind": "gated"}, 1)]
)
def test_others_are_drafted_one_by_one(config, launches, kind, change, rows):
    drafter, leaves = drafter_of(dataclasses.replace(config, **change), kind)
    run = functools.partial(drafter.choose, filters=sampling.NO_FILTERS)
    proposal = jax.eval_shape(run, leaves, *inputs_of(drafter, 1.0, rows))
    assert launches == []
    assert proposal.token.shape == (rows, config.block_size)
