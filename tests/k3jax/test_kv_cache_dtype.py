"""Latents in 8 bits: half the memory, and the same numbers however a text is cut."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.cache import NARROW_SCALE, MlaCache, Rows, latent_dtype, layer_cache
from pallas import mla

TEXT = np.random.default_rng(5).integers(0, 256, 40).tolist()


@pytest.fixture(scope="module")
def narrow(door):
    return dataclasses.replace(door, kv_cache_dtype="fp8")


def test_latents_are_stored_to_three_bits(door, narrow):
    wide, stored = (model.states(TEXT, TEXT[:3]) for model in (door, narrow))
    step = np.maximum(np.abs(wide.latent[1]), NARROW_SCALE * 2.0**-6) * 2.0**-4  # half of the last bit
    error = np.abs(stored.latent[1] - wide.latent[1])
    assert (error <= step * (1 + 1e-4)).all()
    assert error.max() > 0


@pytest.mark.parametrize("tokens", [3, 20])
def test_attention_is_that_over_the_rounded_latents(door, tokens):
    attention = door.graph.merge(door.leaves).layers[1].attention
    rng = np.random.default_rng(tokens)
    query, latent = (rng.standard_normal((1, tokens, *shape), np.float32) for shape in ((2, 24), (40,)))
    rows = Rows(*(jnp.asarray(value, jnp.int32) for value in ([1], [[2, 1]], [0], [tokens])))
    rounded = (latent / NARROW_SCALE).astype(jnp.float8_e4m3fn).astype(np.float32) * NARROW_SCALE
    ours, theirs = (
        attention.attend(
            jnp.asarray(query), jnp.asarray(values), rows, layer_cache(door.config, 1, 2, 3, 16, np.float32, kind)
        )[0]
        for values, kind in ((latent, "fp8"), (rounded, "auto"))
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_they_take_a_byte_each(narrow):
    entry = next(entry for entry in narrow.new_cache(1, 3, 16).layers if isinstance(entry, MlaCache))
    assert entry.latent.nbytes == 4 * 16 * narrow.config.mla.latent_width
    np.testing.assert_array_equal(entry.page_scale, np.full(4, NARROW_SCALE, np.float32))


def test_a_text_may_be_cut_anywhere(narrow):
    """Rows are stored alike whatever is stored with them, so that chunks and prefixes change nothing."""
    whole = narrow.states(TEXT, TEXT[:3])
    cut = narrow.states(TEXT[:35], [*TEXT[35:], *TEXT[:3]])
    np.testing.assert_allclose(cut.decode_logits[-3:], whole.decode_logits, rtol=1e-3, atol=1e-4)


def test_what_does_not_fit_becomes_the_largest_value():
    pool = jnp.zeros((3, 4, 2), jnp.float8_e4m3fn)
    rows = jnp.asarray([[[1e4, -1e4], [0.28125, np.nan]]], jnp.float32)
    table, start, valid = jnp.ones((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), jnp.ones((1, 2), bool)
    scale = jnp.asarray([1.0, 0.5, 1.0])
    stored = mla.gather_pages(mla.write_pages(pool, rows, table, start, valid, scale), table, scale)
    np.testing.assert_allclose(stored[0, :2], [[224, -224], [0.28125, np.nan]])


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="kv_cache_dtype is 'int4', expected one of auto, fp8"):
        latent_dtype("int4", jnp.float32)


@pytest.mark.slow
def test_the_engine_says_the_same_alone_in_a_batch_and_after_a_hit(tiny_config, random_tree):
    from tests.serving.model_fixtures import CHUNK, WIDE, build_core, build_model, build_runner, prompt, request, serve

    model = dataclasses.replace(build_model(tiny_config, random_tree), kv_cache_dtype="fp8")
    runner = build_runner(model)
    prompts = [prompt(seed, 9 + 7 * seed) for seed in range(5)]
    alone = [serve(build_core(runner), request(tokens)).said[0] for tokens in prompts]
    core = build_core(runner, shapes=(CHUNK, WIDE))
    for _ in range(2):  # the second time from the prefix cache
        assert serve(core, *map(request, prompts)).said == alone
    assert core.counters.hit_rate > 0
