import asyncio
import dataclasses

import pytest

from k3jax.cache import KdaCache, MlaCache
from serving.engine import Engine
from serving.launch import Sizes, describe, divide, footprint, launch, model_cost
from serving.prefix_cache import CacheOptions
from serving.request import RequestError
from tests.serving.model_fixtures import CHUNK, PAGE, PAGES, ROWS, SLOTS, UNIT, WIDE, build_draft, prompt, request

SIZES = Sizes(
    rows=ROWS,
    pages=PAGES - 1,
    slots=SLOTS - 1,
    page_size=PAGE,
    prefix_match_unit=UNIT,
    chunks=(CHUNK, WIDE),
    table_widths=(12,),
)


@pytest.fixture(scope="module")
def core(model, runner):
    # The fixture `runner` has compiled the programs of these sizes.
    lines = []
    core = launch(model, SIZES, report=lines.append)
    assert any("state" in line for line in lines)
    yield core
    core.runner.close()


def test_streams_from_a_real_model(core, alone):
    engine = Engine(core)
    engine.start()

    async def ask(tokens):
        stream = await engine.submit(request(tokens))
        return [token async for output in stream for token in output.tokens]

    async def main():
        return await asyncio.gather(*(ask(prompt(seed, 10 + seed)) for seed in range(5)))

    said = asyncio.run(main())
    engine.stop()
    assert core.stats().compilations == 0
    assert said == [alone(prompt(seed, 10 + seed)) for seed in range(5)]


@pytest.mark.parametrize(
    ("tokens", "fields", "sampling", "message"),
    [
        ([3, 999], {}, {}, "token 1 of the prompt is 999, expected an id below 257"),
        ([3], {"stop_ids": tuple(range(9))}, {}, "9 stop ids were given, expected at most 8"),
        ([3], {}, {"top_p": 3.0}, "top_p is 3.0"),
        ([3], {}, {"toppp": 3.0}, "unknown settings"),
    ],
)
def test_requests_that_the_model_cannot_serve(core, tokens, fields, sampling, message):
    with pytest.raises(RequestError, match=message):
        core.submit(request(tokens, fields=fields, **sampling))


@pytest.mark.parametrize("tokens", [2, 3, 5, 8, 64, 100, 512])
def test_no_step_computes_more_of_prompts_than_it_may(tokens):
    """Nor needs it more than one step for as many."""
    shapes = Sizes(step_tokens=tokens).shapes
    assert max(shape.size for shape in shapes) == max(shape.tokens for shape in shapes) == tokens
    assert len(set(shapes)) == len(shapes) <= 3
    assert min(shape.tokens for shape in shapes) >= 2


def test_memory_by_bytes(model):
    sizes = Sizes(rows=2, cache_gib=0.01, state_fraction=0.5, page_size=8, prefix_match_unit=4)
    each = footprint(model, sizes.page_size)
    cache = divide(sizes, each, 96)
    allocated = model.new_cache(cache.slots - 1, cache.pages - 1, 8)
    states = sum(e.state.nbytes + e.window.nbytes for e in allocated.layers if isinstance(e, KdaCache))
    latents = sum(e.latent.nbytes for e in allocated.layers if isinstance(e, MlaCache))
    assert states == pytest.approx(0.005 * 2**30, rel=0.1)
    assert latents == pytest.approx(0.005 * 2**30, rel=0.1)


def test_the_plan_is_what_is_allocated(model):
    """D.1 18: bytes that the plan prints are those of the arrays, row by row, slot by slot and page by page."""
    each = footprint(model, PAGE)
    assert each.weights == model.weight_bytes
    assert each.pools(PAGES, SLOTS) == model.new_cache(SLOTS - 1, PAGES - 1, PAGE).nbytes
    # Eviction weighs what the pools hold.
    cost = model_cost(model)
    assert (cost.state_bytes, cost.latent_bytes_per_token) == (each.slot, each.token)
    drafting = dataclasses.replace(model, draft=build_draft(model.config))
    assert model_cost(drafting).latent_bytes_per_token == footprint(drafting, PAGE).token > each.token
    first, *rest = describe(CacheOptions(pages=PAGES, slots=SLOTS, page_size=PAGE, unit=4), each, rows=4)
    assert first.startswith(
        f"per device, of 1: {(each.weights + 4 * each.row + each.pools(PAGES, SLOTS)) / 2**20:.1f} MiB"
    )
    assert len(rest) == 2


def test_memory_by_fraction_needs_a_device_that_tells(model):
    with pytest.raises(ValueError, match="does not tell its memory; give cache_gib"):
        divide(Sizes(memory_fraction=0.5), footprint(model, 64), 96)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eviction": "lfu"}, "eviction is 'lfu'"),
        ({"retention": "prompt,interval=6"}, "multiple of the hash unit"),
        ({"slots": 2}, "2 state slots cannot serve 4 rows"),
    ],
)
def test_bad_sizes(model, change, message):
    with pytest.raises(ValueError, match=message):
        launch(model, dataclasses.replace(SIZES, **change), report=lambda line: None)


def test_more_positions_than_the_model_has_are_said(model):
    lines = []
    with pytest.raises(ValueError, match="eviction"):
        launch(model, dataclasses.replace(SIZES, max_length=1 << 20, eviction="lfu"), report=lines.append)
    assert lines == [f"max-length 1048576 is more than the model has positions: {model.max_length} are served"]
