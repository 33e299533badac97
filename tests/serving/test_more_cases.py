"""Cases of the log of other engines' bugs that no other test tells of; `test_cases.py` lists all of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import capacity, config, params
from k3jax.cache import KdaCache, MlaCache
from pallas import mla, moe
from serving import device
from serving.retention import Retention
from serving.runner import tokens_per_step
from tests.serving.fake_runner import solo
from tests.serving.model_fixtures import CHUNK, PAGE, PAGES, SLOTS, WIDE, build_core, prompt, request, serve


@pytest.mark.parametrize("shapes", [(CHUNK,), (WIDE,)])
@pytest.mark.parametrize("start", [0, 4, 12, 20])
def test_chunk_sizes_say_the_same(runner, alone, shapes, start):
    """D.1 4, D.2 46c: chunks of 16 or 40 tokens that begin where no kernel's chunk does."""
    tokens, core = prompt(80, 45), build_core(runner, shapes=shapes, retention=Retention(decode_end=False))
    if start:
        serve(core, request(tokens[: start + 1], 1))
    served = serve(core, request(tokens, 9))
    assert served.final[0].cached_tokens == start
    assert served.said == [alone(tokens, 9)]


def jaxprs(jaxpr):
    """A jaxpr and all that lie inside it."""
    yield jaxpr
    for inner in _inner(jaxpr):
        yield from jaxprs(inner)


def _inner(jaxpr):
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for item in value if isinstance(value, tuple | list) else [value]:
                if hasattr(item, "jaxpr"):
                    yield item.jaxpr
                elif hasattr(item, "eqns"):
                    yield item


def test_pools_of_more_than_2_to_31_elements(model, runner):
    """D.1 13, D.2 32, 33: pools are indexed by slot, page and place in it, never by an offset that int32 cannot hold.

    Abstract: the step is traced with pools of 3e9 elements and 12 million pages.
    """

    def grow(entry):
        def pool(array, members):
            return jax.ShapeDtypeStruct((members, *array.shape[1:]), array.dtype)

        if isinstance(entry, MlaCache):
            return MlaCache(pool(entry.latent, 12_000_000))
        return KdaCache(pool(entry.state, 1_000_000), pool(entry.window, 1_000_000))

    state = dataclasses.replace(
        runner.state, cache=dataclasses.replace(runner.state.cache, layers=tuple(map(grow, runner.state.cache.layers)))
    )
    packed = jax.ShapeDtypeStruct((runner.options.rows, 3 + 12), jnp.int32)
    traced = jax.make_jaxpr(device.decode, static_argnums=0)(model.graph, model.leaves, state, packed)
    large = 0
    for jaxpr in jaxprs(traced.jaxpr):
        for equation in jaxpr.eqns:
            for value in (*equation.invars, *equation.outvars):
                shape = getattr(value.aval, "shape", ())
                assert all(size < 2**31 for size in shape), f"{equation.primitive} flattens a pool to {shape}"
                large += np.prod(shape, dtype=float) > 2**31
    assert large > 20


@pytest.mark.parametrize("unit", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("page", [2, 3, 4])
def test_any_unit_works_with_any_page(make_core, unit, page):
    """D.1 15, 29c: neither has to divide the other."""
    core = make_core(cache={"pages": 60, "page_size": page, "unit": unit}, retention=Retention(decode_end=False))
    for length in sorted({unit, unit + 1, 2 * page, 13}):
        tokens = [length, *range(length)]
        for attempt in range(2):
            item = request(tokens, 3)
            core.submit(item)
            outputs = core.run()[item.id]
            assert [t for output in outputs for t in output.tokens] == solo(tokens, 3)
            assert outputs[-1].final.cached_tokens == (length // unit * unit if attempt else 0)
    core.check_books()


def test_slots_and_pages_are_arguments(runner, alone):
    """D.2 39: whichever slots and pages a request gets, it says the same, by the same programs."""
    tokens = prompt(81, 21)
    expected, before = alone(tokens, 7), runner.compilations
    used = set()
    for taken in (0, 3, 6):
        core = build_core(runner)
        slots, pages = core.cache.slots.take(taken), core.cache.pages.take(2 * taken)
        core.submit(item := request(tokens, 7))
        core.step()
        used.add((core.scheduler.running[0].slot, core.scheduler.running[0].pages[0]))
        assert [t for output in core.run()[item.id] for t in output.tokens] == expected
        core.cache.slots.release(slots)
        core.cache.pages.release(pages)
        core.check_books()
    assert len(used) == 3
    assert runner.compilations == before


def test_the_router_chooses_in_float32():
    """D.2 40: two experts whose scores differ by less than bfloat16 tells."""
    x = jnp.ones((1, 256), jnp.bfloat16)
    router = np.full((4, 256), -1.0, np.float32)
    router[2:] = np.asarray([[0.5], [0.5]])
    router[3, :4] += 0.0078125
    router = jnp.asarray(router, jnp.bfloat16)
    logits = np.asarray(router.astype(jnp.float32)).sum(1)
    assert jnp.asarray(logits[2], jnp.bfloat16) == jnp.asarray(logits[3], jnp.bfloat16)
    bias = jnp.asarray([0.0, 0.0, 0.0, 0.0], jnp.float32)
    router = router.at[:].multiply(jnp.asarray(0.01, jnp.bfloat16))
    assert moe.route(x, router, bias, k=1, scaling=1.0).ids.tolist() == [[3]]


def test_attention_knows_no_positions():
    """D.2 43: the order of the cached rows changes nothing."""
    rng = np.random.default_rng(3)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    rows, query = normal(24, 20), normal(1, 1, 2, 12)
    ups = normal(2, 8, 16), normal(2, 6, 16)
    table, start = jnp.asarray([[1, 2, 3]], jnp.int32), jnp.asarray([23], jnp.int32)

    def attend(order):
        pool = jnp.concatenate([jnp.zeros((1, 8, 20)), rows[order].reshape(3, 8, 20)])
        return mla.decode(query, pool, table, *ups, start, start + 1, scale=0.3)

    np.testing.assert_allclose(attend(np.arange(24)), attend(rng.permutation(24)), atol=1e-5)


def test_experts_work_on_the_latent_width(tiny_config):
    """D.2 44: 3584, not 7168; the tests' own configuration tells the two apart as well."""
    for settings, latent, hidden in ((config.k3(), 3584, 7168), (tiny_config, tiny_config.moe.latent_size, 128)):
        assert latent != hidden
        ffn = params.layer_specs(settings, settings.num_layers - 1)["ffn"]
        assert (ffn["latent_down"].shape, ffn["latent_up"].shape) == ((latent, hidden), (hidden, latent))
        width = ffn["experts"]["gate_up_packed"].shape[-1]
        assert 2 * width == latent


@pytest.mark.slow
def test_a_compiled_step_is_the_step(runner, alone, monkeypatch):
    """D.2 46b: batch 1, token by token, with and without the outer compilation that donates its buffers."""
    tokens = prompt(82, 13)
    expected = alone(tokens, 6)
    for name in ("prefill", "decode"):
        monkeypatch.setattr(device, name, getattr(device, name).__wrapped__)
    assert serve(build_core(runner), request(tokens, 6)).said == [expected]


def test_a_block_of_drafts_is_one_token_wider(drafting):
    """D.3 54: three drafts and the token before them."""
    drafter = drafting.model.draft.drafter
    assert tokens_per_step(drafting.model) == drafter.config.block_size + 1 == 4
    core = build_core(drafting)
    core.submit(request(prompt(83, 9), 9))
    plan = next(p for p in iter(lambda: core.scheduler.plan(0.0), None) if p.decode or core.runner.dispatch(p) is None)
    assert plan.decode[0].tokens == 4


def test_draft_rows_are_planned_in_their_own_size(drafting):
    """D.3 55: the draft's rows lie on the latents' pages, in the draft's width."""
    model = drafting.model
    settings = model.draft.drafter.config
    both = capacity.footprint(model.config, dtype=jnp.dtype(model.dtype), page_size=PAGE, draft=settings)
    held = sum(array.nbytes for array in drafting.state.context)
    latents = sum(e.latent.nbytes for e in drafting.state.cache.layers if isinstance(e, MlaCache))
    assert both.page * PAGES == latents + held
    assert both.weights == model.weight_bytes == sum(leaf.nbytes for leaf in (*model.leaves, *model.draft.leaves))


def test_padding_beside_drafts_writes_nothing(drafting):
    """D.3 57: one mapping of slots for reading and writing; what the running row does not own stays as it is."""
    core = build_core(drafting)
    before = jax.tree.map(np.asarray, (drafting.state.cache, drafting.state.context))
    serve(core, request(prompt(84, 9), 9))
    after = jax.tree.map(np.asarray, (drafting.state.cache, drafting.state.context))
    pages, slots = core.cache.tree.held()
    # One more slot: the request's own, if it was not handed over.
    pages, slots = {*pages, *core.cache.pages._free[-4:]}, {*slots, *core.cache.slots._free[-2:]}
    for old, new in zip(before[0].layers, after[0].layers, strict=True):
        if isinstance(old, MlaCache):
            keep = sorted(set(range(PAGES)) - pages)
            np.testing.assert_array_equal(old.latent[keep], new.latent[keep])
        else:
            keep = sorted(set(range(SLOTS)) - slots)
            np.testing.assert_array_equal(old.state[keep], new.state[keep])
    keep = sorted(set(range(PAGES)) - pages)
    for old, new in zip(before[1], after[1], strict=True):
        np.testing.assert_array_equal(old[keep], new[keep])
