"""The forward pass against itself in other forms: cached, chunked, batched, padded, sharded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax import cache as caches
from k3jax import params, sharding, step
from k3jax.cache import Rows
from k3jax.config import nano
from k3jax.layers.attn_res import AttnRes, Residual
from k3jax.model import K3

TOLERANCE = 2e-4
"""Relative RMS allowed between two float32 evaluation orders: the bound of the whole project."""


def relative(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.isfinite(actual).all()
    assert np.isfinite(expected).all()
    return np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))


def rows_of(query_length, length=None, slot=None, pages=8):
    """Rows whose slots are 1, 2, ... and whose pages follow one another."""
    batch = len(query_length)
    slot = np.arange(1, batch + 1) if slot is None else np.asarray(slot)
    table = 1 + (slot[:, None] - 1) * pages + np.arange(pages)[None]
    table = np.where(slot[:, None] > 0, table, 0)
    length = np.zeros(batch) if length is None else length
    return Rows(*(jnp.asarray(array, jnp.int32) for array in (slot, table, length, query_length)))


@pytest.fixture(scope="module")
def model(tiny_config, random_tree):
    return K3(tiny_config, random_tree(tiny_config))


@pytest.fixture(scope="module")
def split(model):
    return step.split(model)


@pytest.fixture(scope="module")
def ids(tiny_config):
    return jnp.asarray(np.random.default_rng(7).integers(0, tiny_config.vocab_size, (2, 72)), jnp.int32)


@pytest.fixture(scope="module")
def full(split, ids):
    """Logits of both sequences without a cache."""
    return step.forward(*split, rows_of([72, 72]), ids).logits


@pytest.fixture
def cache(tiny_config):
    return caches.create(tiny_config, slots=4, pages=25, page_size=16, dtype=jnp.float32)


def padded(ids, start, stop, width=72):
    """Columns start .. stop of `ids` at the left of a `width`-wide batch."""
    return jnp.zeros((ids.shape[0], width), jnp.int32).at[:, : stop - start].set(ids[:, start:stop])


@pytest.mark.parametrize("cut", [1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 71])
def test_chunked_prefill_equals_one_prefill(split, ids, full, cache, cut):
    first = step.extend(*split, cache, rows_of([cut, cut]), padded(ids, 0, cut))
    second = step.extend(*split, first.cache, rows_of([72 - cut] * 2, [cut] * 2), padded(ids, cut, 72))
    assert relative(first.logits[:, :cut], full[:, :cut]) < TOLERANCE
    assert relative(second.logits[:, : 72 - cut], full[:, cut:]) < TOLERANCE


def test_decode_after_prefill_equals_full(split, ids, full, cache):
    out = step.extend(*split, cache, rows_of([66, 66]), padded(ids, 0, 66))
    cache, rows = out.cache, rows_of([1, 1], [66, 66])
    for position in range(66, 72):
        out = step.extend(*split, cache, rows, ids[:, position : position + 1])
        assert relative(out.logits[:, 0], full[:, position]) < TOLERANCE
        cache, rows = out.cache, rows.advance()


def test_few_query_steps_equal_full(split, ids, full, cache):
    """Several tokens per row in absorbed form, as in verification."""
    out = step.extend(*split, cache, rows_of([64, 64]), padded(ids, 0, 64))
    out = step.extend(*split, out.cache, rows_of([8, 8], [64, 64]), ids[:, 64:])
    assert relative(out.logits, full[:, 64:]) < TOLERANCE


def test_prefill_gives_the_last_valid_logits(split, ids, full, cache):
    out = step.prefill(*split, cache, rows_of([72, 40]), ids)
    assert relative(out.logits[0], full[0, 71]) < TOLERANCE
    assert relative(out.logits[1], full[1, 39]) < TOLERANCE


def test_padding_of_a_row_does_not_matter(split, ids, full):
    """Sequences of different lengths in one batch: what stands behind a row's end is never seen."""
    garbage = ids.at[1, 30:].set(5)
    out = step.forward(*split, rows_of([72, 30]), garbage).logits
    assert relative(out[0], full[0]) < TOLERANCE
    assert relative(out[1, :30], full[1, :30]) < TOLERANCE


def test_a_row_does_not_depend_on_its_neighbours(split, ids):
    one = step.forward(*split, rows_of([72, 72]), ids).logits[0]
    other = step.forward(*split, rows_of([72, 9]), ids.at[1].set(3)).logits[0]
    np.testing.assert_array_equal(one, other)


def test_rows_may_be_permuted(split, ids, full):
    out = step.forward(*split, rows_of([72, 72]), ids[::-1]).logits
    assert relative(out[::-1], full) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 72])
def test_padding_rows_change_nothing(split, ids, cache, tokens):
    """A padding row beside a running one touches neither another row's state nor slot 0 and page 0."""
    filled = step.extend(*split, cache, rows_of([72, 72]), ids).cache
    before = jax.tree.map(np.asarray, filled)
    rows = rows_of([tokens, 0], [0, 50], slot=[3, 2])
    after = step.extend(*split, filled, rows, ids[:, :tokens]).cache
    own_pages = np.asarray(rows.page_table[0])
    for old, new in zip(before.layers, after.layers, strict=True):
        if isinstance(old, caches.KdaCache):
            np.testing.assert_array_equal(np.delete(new.state, 3, 0), np.delete(old.state, 3, 0))
            np.testing.assert_array_equal(np.delete(new.window, 3, 0), np.delete(old.window, 3, 0))
            assert np.any(np.asarray(new.state[3]) != old.state[3])
        else:
            np.testing.assert_array_equal(np.delete(new.latent, own_pages, 0), np.delete(old.latent, own_pages, 0))


def test_a_fresh_row_ignores_what_its_slot_holds(split, ids, full, cache):
    poisoned = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), cache)
    out = step.extend(*split, poisoned, rows_of([72, 72]), ids)
    assert relative(out.logits, full) < TOLERANCE
    single = step.extend(
        *split, jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), out.cache), rows_of([1, 1]), ids[:, :1]
    )
    assert relative(single.logits[:, 0], full[:, 0]) < TOLERANCE


def test_sources_seen_by_each_mlp(tiny_config, model, ids, monkeypatch):
    """Eight layers in two blocks of four, and a partial last block of one layer."""
    seen = []
    plain = AttnRes.read

    def read(self, residual, norm):
        seen.append(len(residual.sources) + 1)
        return plain(self, residual, norm)

    monkeypatch.setattr(AttnRes, "read", read)
    jax.eval_shape(lambda x: model(x, rows_of([4, 4])).hidden, ids[:, :4])
    attention, mlp = seen[:-1:2], seen[1:-1:2]
    assert mlp == [2, 2, 2, 2, 3, 3, 3, 3, 4]
    assert attention == [1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert seen[-1] == 4


def test_freeze_keeps_the_raw_prefix():
    prefix = jnp.ones((2, 3))
    residual = Residual((), prefix).freeze()
    assert residual.sources == (prefix,)
    assert residual.prefix is None
    assert np.array_equal(residual.add(prefix).prefix, prefix)
    assert np.array_equal(residual.add(prefix).add(prefix).prefix, 2 * prefix)


def test_split_has_a_flat_tuple_of_arrays(split, tiny_config):
    graph, leaves = split
    assert isinstance(hash(graph), int)
    assert len(leaves) == sum(1 for _ in params.flatten(params.model_specs(tiny_config)))
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)


def test_tree_mode(tiny_config, random_tree):
    """No shared references and no reliance on graph mode."""
    nnx.set_graph_mode(False)
    try:
        model = K3(tiny_config, random_tree(tiny_config))
        graph, leaves = step.split(model)
        assert len(jax.tree.leaves(nnx.state(graph.merge(leaves)))) == len(leaves)
    finally:
        nnx.set_graph_mode(True)


def sharded(config, tree, preset):
    layout = sharding.layout(preset)
    placed = jax.tree.map(jax.device_put, tree, layout.parameters(params.model_specs(config)))
    return layout, step.split(K3(config, placed, None, layout), layout)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tp2", "tp8"])
def test_a_mesh_that_does_not_divide_everything_equals_one_device(random_tree, preset):
    """Five MLA heads and, with eight devices, four KDA heads stay whole beside what is split."""
    config = dataclasses.replace(nano(), num_layers=5, mla_layers=(3, 4))
    tree = random_tree(config)
    layout, (graph, leaves) = sharded(config, tree, preset)
    ids = jnp.asarray(np.random.default_rng(1).integers(0, config.vocab_size, (2, 24)), jnp.int32)
    expected = step.forward(*step.split(K3(config, tree)), rows_of([24, 20]), ids).logits
    split_axes = {str(leaf.sharding.spec) for leaf in leaves}
    assert any("tensor" in spec for spec in split_axes)
    cache = caches.create(config, slots=3, pages=17, page_size=16, dtype=jnp.float32)
    cache = jax.tree.map(jax.device_put, cache, layout.cache(cache))
    out = step.extend(graph, leaves, cache, rows_of([24, 20]), ids)
    assert relative(out.logits[0], expected[0]) < TOLERANCE
    assert relative(out.logits[1, :20], expected[1, :20]) < TOLERANCE
