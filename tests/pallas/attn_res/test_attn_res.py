"""AttnRes against a float64 definition written here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas import attn_res
from pallas.attn_res import reference
from tests.pallas.comparison import relative


def definition(sources, prefix, norm, query, eps=1e-5):
    values = np.stack([*sources, prefix]).astype(np.float64)
    keys = values / np.sqrt((values**2).mean(-1, keepdims=True) + eps)
    scores = keys @ (norm.astype(np.float64) * query.astype(np.float64))
    weights = np.exp(scores - scores.max(0))
    weights /= weights.sum(0)
    return (weights[..., None] * values).sum(0)


def draw(sources, seed=0, shape=(3, 5, 48)):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((sources + 1, *shape)).astype(np.float32) * np.float32(2)
    norm, query = rng.standard_normal((2, shape[-1])).astype(np.float32)
    return tuple(values[:-1]), values[-1], norm, query


@pytest.mark.parametrize("sources", range(1, 9))
@pytest.mark.parametrize("function", [attn_res.mix, reference.mix])
def test_mix(sources, function):
    arguments = draw(sources)
    assert relative(function(*jax.tree.map(jnp.asarray, arguments)), definition(*arguments)) < 1e-6


def test_without_sources_the_mix_is_the_prefix():
    _, prefix, norm, query = draw(0)
    np.testing.assert_array_equal(attn_res.mix((), prefix, norm, query), prefix)


@pytest.mark.parametrize("sources", [1, 4, 8])
def test_two_phases_equal_one(sources):
    """All sites of a block are summarised at once, each then meets its own live prefix."""
    frozen, _, _, _ = draw(sources)
    rng = np.random.default_rng(9)
    sites = 5
    norms, queries = rng.standard_normal((2, sites, 48)).astype(np.float32)
    prefixes = rng.standard_normal((sites, 3, 5, 48)).astype(np.float32)
    summary = attn_res.summarize(frozen, norms, queries)
    for site in range(sites):
        merged = attn_res.merge(summary, site, prefixes[site], norms[site], queries[site])
        assert relative(merged, definition(frozen, prefixes[site], norms[site], queries[site])) < 1e-6


def test_equal_scores_give_the_mean():
    sources, prefix, norm, _ = draw(8)
    mixed = attn_res.mix(sources, prefix, norm, np.zeros_like(norm))
    np.testing.assert_allclose(mixed, np.mean([*sources, prefix], axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1e18])
def test_zero_and_huge_sources(scale):
    sources, prefix, norm, query = draw(3)
    sources = (sources[0] * np.float32(scale), *sources[1:])
    assert relative(attn_res.mix(sources, prefix, norm, query), definition(sources, prefix, norm, query)) < 1e-6


def test_values_are_raw_and_keys_are_normalised():
    """Doubling a source changes its value in the mix, never its weight."""
    sources, prefix, norm, query = draw(2)
    doubled = (sources[0] * np.float32(2), sources[1])
    once = np.asarray(attn_res.mix(sources, prefix, norm, query), np.float64)
    twice = np.asarray(attn_res.mix(doubled, prefix, norm, query), np.float64)
    share = (twice - once) / sources[0]
    assert np.ptp(share, axis=-1).max() < 1e-3  # one weight for all channels of a token
    assert (share.mean(-1) > 0).all()


def test_bfloat16_is_rounded_once():
    arguments = [np.asarray(x) for x in draw(4)[1:]]
    sources = tuple(jnp.asarray(x, jnp.bfloat16) for x in draw(4)[0])
    prefix, norm, query = (jnp.asarray(x, jnp.bfloat16) for x in arguments)
    mixed = attn_res.mix(sources, prefix, norm, query)
    assert mixed.dtype == jnp.bfloat16
    wide = definition(*jax.tree.map(lambda x: np.asarray(x, np.float32), (sources, prefix, norm, query)))
    assert relative(mixed.astype(jnp.float32), wide) < 2**-8


def test_summarize_needs_a_source():
    with pytest.raises(ValueError, match="no sources"):
        attn_res.summarize((), np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32))


def test_a_sum_needs_table_and_axis():
    sources, prefix, norm, query = draw(2, shape=(4,))
    with pytest.raises(ValueError, match="go together, got axis 'device' alone"):
        attn_res.read(sources, prefix, prefix, norm, query, norm, axis="device")
