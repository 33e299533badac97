import asyncio

import pytest

from serving.engine import Engine
from serving.launch import Sizes, describe, divide, launch, model_cost
from serving.request import RequestError
from tests.serving.model_fixtures import CHUNK, PAGE, PAGES, ROWS, SLOTS, UNIT, WIDE, prompt, request

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


def test_memory_by_bytes(model):
    cost = model_cost(model)
    sizes = Sizes(rows=2, cache_gib=0.01, state_fraction=0.5, page_size=8, prefix_match_unit=4)
    cache = divide(sizes, cost, 96)
    assert (cache.slots - 1) * cost.state_bytes == pytest.approx(0.005 * 2**30, rel=0.1)
    assert (cache.pages - 1) * 8 * cost.latent_bytes_per_token == pytest.approx(0.005 * 2**30, rel=0.1)
    assert len(list(describe(cache, cost))) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eviction": "lfu"}, "eviction is 'lfu'"),
        ({"retention": "prompt,interval=6"}, "multiple of the hash unit"),
        ({"slots": 2}, "2 state slots cannot serve 4 rows"),
    ],
)
def test_bad_sizes(model, change, message):
    import dataclasses

    with pytest.raises(ValueError, match=message):
        launch(model, dataclasses.replace(SIZES, **change), report=lambda line: None)
