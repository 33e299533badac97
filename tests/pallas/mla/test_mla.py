"""Latent attention against a float64 definition written here."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas import mla
from pallas.mla import reference
from tests.pallas.comparison import relative

HEADS, OWN, SHARED, RANK, VALUE = 3, 16, 8, 40, 24
SCALE = (OWN + SHARED) ** -0.5


def definition(query, latents, key_up, value_up, start):
    query, latents, key_up, value_up = (x.astype(np.float64) for x in (query, latents, key_up, value_up))
    output = np.zeros((*query.shape[:3], value_up.shape[1]))
    for b, t, h in np.ndindex(*query.shape[:3]):
        seen = latents[b, : start[b] + t + 1]
        keys = np.concatenate([seen[:, :RANK] @ key_up[h].T, seen[:, RANK:]], axis=1)
        scores = SCALE * keys @ query[b, t, h]
        weights = np.exp(scores - scores.max())
        output[b, t, h] = (weights / weights.sum()) @ (seen[:, :RANK] @ value_up[h].T)
    return output


def draw(batch, queries, keys, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return (
        normal(batch, queries, HEADS, OWN + SHARED),
        normal(batch, keys, RANK + SHARED),
        normal(HEADS, OWN, RANK),
        normal(HEADS, VALUE, RANK),
    )


def paged(latents, page=8, seed=3):
    """The same rows in shuffled pages; unused pages hold NaN."""
    batch, keys, width = latents.shape
    count = -(-keys // page)
    rng = np.random.default_rng(seed)
    order = 1 + rng.permutation(batch * count)
    pool = np.full((batch * count + 1, page, width), np.nan, np.float32)
    table = order.reshape(batch, count).astype(np.int32)
    for b, s in np.ndindex(batch, keys):
        pool[table[b, s // page], s % page] = latents[b, s]
    return jnp.asarray(pool), jnp.asarray(table)


@pytest.mark.parametrize("function", [mla.prefill, reference.attend])
@pytest.mark.parametrize(("queries", "start"), [(1, [0, 0]), (7, [0, 5]), (20, [3, 0])])
def test_expanded(function, queries, start):
    arguments = draw(2, queries, 32)
    start = np.asarray(start, np.int32)
    length = () if function is reference.attend else (start + queries,)
    actual = function(*map(jnp.asarray, (*arguments, start, *length)), scale=SCALE)
    assert relative(actual, definition(*arguments, start)) < 2e-6


@pytest.mark.parametrize("queries", [1, 4, 9])
@pytest.mark.parametrize("start", [[0, 0], [7, 8], [22, 1]])
def test_absorbed_over_pages_equals_expanded(queries, start):
    query, latents, key_up, value_up = draw(2, queries, 32)
    pool, table = paged(latents)
    start = np.asarray(start, np.int32)
    absorbed = mla.decode(query, pool, table, key_up, value_up, start, start + np.int32(queries), scale=SCALE)
    assert relative(absorbed, definition(query, latents, key_up, value_up, start)) < 2e-6


@pytest.mark.parametrize("queries", [2, 20])
def test_stale_rows_are_never_seen(queries):
    """NaN behind a row's tokens must not reach them through a weight of zero, under padding queries neither."""
    query, latents, key_up, value_up = draw(1, queries, 40)
    start, length = np.asarray([9], np.int32), np.asarray([11], np.int32)
    expected = definition(query[:, :2], latents, key_up, value_up, start)
    latents[:, 11:] = np.nan
    actual = mla.prefill(query, latents, key_up, value_up, start, length, scale=SCALE)
    assert relative(actual[:, :2], expected) < 2e-6
    pool, table = paged(latents)
    actual = mla.decode(query, pool, table, key_up, value_up, start, length, scale=SCALE)
    assert relative(actual[:, :2], expected) < 2e-6


def test_a_row_does_not_depend_on_its_neighbours():
    query, latents, key_up, value_up = draw(3, 1, 32)
    pool, table = paged(latents)
    start = np.asarray([30, 4, 17], np.int32)
    one = np.int32(1)
    alone = mla.decode(query, pool, table, key_up, value_up, start, start + one, scale=SCALE)
    moved = np.asarray([30, 31, 0], np.int32)
    other = mla.decode(query, pool, table, key_up, value_up, moved, moved + one, scale=SCALE)
    np.testing.assert_array_equal(alone[0], other[0])


def test_write_and_gather():
    rng = np.random.default_rng(0)
    pool = jnp.asarray(rng.standard_normal((7, 4, 5)), jnp.float32)
    before = np.asarray(pool)
    rows = jnp.asarray(rng.standard_normal((2, 6, 5)), jnp.float32)
    table = jnp.asarray([[3, 1, 5], [2, 6, 0]], jnp.int32)
    start, count = jnp.asarray([3, 0], jnp.int32), np.asarray([6, 2])
    valid = jnp.asarray(np.arange(6)[None] < count[:, None])
    pool = mla.write_pages(pool, rows, table, start, valid)
    gathered = np.asarray(mla.gather_pages(pool, table))
    np.testing.assert_array_equal(gathered[0, 3:9], rows[0])
    np.testing.assert_array_equal(gathered[1, :2], rows[1, :2])
    for page, offset in [(0, 0), (0, 3), (3, 2), (2, 2), (4, 1), (6, 0), (5, 1)]:
        np.testing.assert_array_equal(pool[page, offset], before[page, offset])


def test_a_write_beyond_the_table_is_dropped():
    pool = jnp.zeros((4, 2, 3), jnp.float32)
    rows = jnp.ones((1, 4, 3), jnp.float32)
    out = mla.write_pages(
        pool, rows, jnp.asarray([[2]], jnp.int32), jnp.asarray([0], jnp.int32), jnp.ones((1, 4), bool)
    )
    assert np.asarray(out).sum() == 2 * 3
    assert np.asarray(out[2]).all()


def test_the_dummy_page_is_never_written():
    pool = jnp.zeros((4, 2, 3), jnp.float32)
    rows = jnp.ones((1, 2, 3), jnp.float32)
    out = mla.write_pages(
        pool, rows, jnp.asarray([[0]], jnp.int32), jnp.asarray([0], jnp.int32), jnp.ones((1, 2), bool)
    )
    assert not np.asarray(out).any()
