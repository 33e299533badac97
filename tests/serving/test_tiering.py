"""Evicted prefixes come back whole or not at all (D.1 24, 25, 26)."""

import random
import time

import numpy as np
import pytest

from serving.core import Core
from serving.plan import Shape
from serving.prefix_file import DamagedPrefix, Prefix
from serving.request import Request
from serving.scheduler import SchedulerOptions
from serving.tiering import TierOptions, Tiers
from tests.serving import model_fixtures
from tests.serving.fake_runner import FakeRunner, solo


def request(id, tokens, max_tokens=3):
    return Request(id=id, tokens=list(tokens), max_tokens=max_tokens)


@pytest.fixture
def make_tiered(make_cache, tmp_path):
    closing = []

    def make(pages=12, slots=4, host_bytes=10**6, disk=False, **rates):
        cache = make_cache(pages=pages, slots=slots)
        runner = FakeRunner(cache.options.page_size)
        options = TierOptions(
            host_bytes=host_bytes,
            directory=tmp_path if disk else None,
            disk_bytes=10**6 if disk else 0,
            **{"flops": 1.0, "host_bandwidth": 1e12, "disk_bandwidth": 1e12} | rates,
        )
        tiers = Tiers(cache, runner, options)
        closing.append(tiers)
        scheduler = SchedulerOptions(rows=2, token_budget=20, shapes=(Shape(2, 8),), max_length=44)
        return Core(scheduler, cache, runner, clock=lambda: 0.0, tiers=tiers), tiers

    yield make
    for tiers in closing:
        tiers.close()


def serve(core, item):
    core.submit(item)
    outputs = core.run(100_000)[item.id]
    core.check_books()
    assert [token for output in outputs for token in output.tokens] == solo(item.tokens, item.max_tokens)
    return outputs[-1].final


def fill(core, count=4):
    """Other prompts until nothing of the first is left on the device."""
    for n in range(count):
        serve(core, request(f"other{n}", [40 + n] * 17))


@pytest.mark.parametrize("disk", [False, True])
def test_an_evicted_prefix_comes_back(make_tiered, disk):
    core, tiers = make_tiered(host_bytes=0 if disk else 10**6, disk=disk)
    serve(core, request("a", range(21)))
    fill(core)
    assert tiers.counters.spilled > 0
    final = serve(core, request("again", range(21)))
    assert final.cached_tokens == 20
    assert tiers.counters.restored == 1
    assert (tiers.disk_bytes > 0) == disk


def test_without_tiers_it_is_computed_again(make_core):
    core = make_core(cache={"pages": 12, "slots": 4})
    for item in (request("a", range(21)), *(request(str(n), [40 + n] * 17) for n in range(4)), request("b", range(21))):
        core.submit(item)
        final = core.run()[item.id][-1].final
    assert final.cached_tokens == 0


def test_recomputed_where_that_is_quicker(make_tiered):
    core, tiers = make_tiered(flops=1e18)
    serve(core, request("a", range(21)))
    fill(core)
    assert serve(core, request("again", range(21))).cached_tokens == 0
    assert tiers.counters.restored == 0


def test_a_damaged_file_counts_as_absent(make_tiered, tmp_path):
    core, tiers = make_tiered(host_bytes=0, disk=True)
    serve(core, request("a", range(21)))
    fill(core)
    tiers._disk.submit(lambda: None).result()
    for path in tmp_path.glob("*.prefix"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert serve(core, request("again", range(21))).cached_tokens == 0
    assert tiers.counters.damaged > 0


def test_tiers_keep_to_their_sizes(make_tiered):
    core, tiers = make_tiered(host_bytes=400, disk=False)
    for n in range(8):
        serve(core, request(str(n), [n] * 17))
    assert len(tiers) > 0
    assert tiers.host_bytes <= 400
    assert tiers.counters.dropped > 0


def test_a_prefix_that_does_not_fit_is_not_half_restored(make_tiered):
    core, tiers = make_tiered()
    serve(core, request("a", range(21)))
    fill(core)
    table = core.cache.take_pages(10, 0.0)
    entry = next(e for e in tiers._entries.values() if e.tokens == 20)
    before = core.cache.entries
    tiers._restore(entry, core._chain(request("x", range(21))), 0.0)
    assert core.cache.entries <= before
    core.cache.pages.release(table)
    core.check_books()


@pytest.mark.parametrize("disk", [False, True])
def test_random_traffic_through_tiers(make_tiered, disk):
    rng = random.Random(3)
    core, tiers = make_tiered(host_bytes=600, disk=disk)
    items = []
    for number in range(60):
        stem = [rng.randrange(3)] * rng.choice([4, 8, 12])
        items.append(request(str(number), stem + [rng.randrange(2) for _ in range(rng.randint(1, 9))]))
        core.submit(items[-1])
        for _ in range(rng.randrange(6)):
            core.step()
            core.check_books()
    core.run(1_000_000)
    core.flush()
    core.check_books()
    assert tiers.counters.restored > 0
    assert core.counters.finished == {"length": 60}


def test_a_file_holds_everything(tmp_path):
    rng = np.random.default_rng(0)
    prefix = Prefix(
        [rng.standard_normal((3, 4, 5)).astype(np.float32)],
        [rng.standard_normal((2, 6, 6)).astype(np.float32)],
        [rng.standard_normal((3, 2, 3, 6)).astype(np.float16)],
    )
    prefix.save(tmp_path / "a.prefix")
    back = Prefix.load(tmp_path / "a.prefix")
    for old, new in zip(prefix.arrays, back.arrays, strict=True):
        np.testing.assert_array_equal(old, new)
        assert old.dtype == new.dtype
    assert [path.name for path in tmp_path.iterdir()] == ["a.prefix"]


@pytest.mark.parametrize("size", [0, 10, 200, -1])
def test_incomplete_files_are_refused(tmp_path, size):
    path = tmp_path / "a.prefix"
    Prefix([np.ones((3, 4, 5), np.float32)], [], []).save(path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DamagedPrefix, match=r"a\.prefix"):
        Prefix.load(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DamagedPrefix, match="cannot be read"):
        Prefix.load(tmp_path / "none")


@pytest.mark.parametrize("disk", [False, True])
def test_the_real_model_after_a_round_trip(runner, alone, tmp_path, disk):
    """D.1 26: pages, states and convolution windows; greedy tokens as if nothing had happened."""
    core = model_fixtures.build_core(runner, pages=14, slots=6)
    tiers = Tiers(
        core.cache,
        runner,
        TierOptions(
            host_bytes=0 if disk else 10**9,
            directory=tmp_path if disk else None,
            disk_bytes=10**9,
            flops=1.0,
        ),
    )
    core.tiers, core.scheduler.prepare = tiers, core._prepare
    prompts = [model_fixtures.prompt(80 + n, 37) for n in range(4)]
    first = [model_fixtures.serve(core, model_fixtures.request(tokens)).said[0] for tokens in prompts]
    before = runner.compilations
    for tokens, said in zip(prompts, first):
        start = time.monotonic()
        served = model_fixtures.serve(core, model_fixtures.request(tokens))
        assert served.said == [said] == [alone(tokens)]
        assert served.final[0].cached_tokens == 36
        assert time.monotonic() - start < 30
    assert tiers.counters.restored >= 3
    assert runner.compilations == before
    tiers.close()


@pytest.mark.parametrize(("host", "device", "cached"), [(8, 16, 16), (16, 8, 16), (16, 0, 16), (0, 8, 8)])
def test_the_longer_of_two_prefixes_wins(make_tiered, host, device, cached):
    """D.1 7: a prefix on the device and another one outside it, longer or shorter; they are never mixed."""
    core, tiers = make_tiered(pages=20, slots=5)
    if host:
        serve(core, request("host", range(host + 1), 1))
        fill(core, 6)
        assert core.cache.match(core._chain(request("probe", range(17))), 16).tokens == 0
    if device:
        serve(core, request("device", range(device + 1), 1))
    restored = tiers.counters.restored
    final = serve(core, request("both", [*range(17), 45, 46]))
    assert final.cached_tokens >= cached
    assert (tiers.counters.restored > restored) == (host > device)


def test_events_tell_the_tier(make_tiered):
    (core, _), events = make_tiered(), []
    core.cache.events.listen(events.append)
    serve(core, request("a", range(21)))
    fill(core)
    stored = {(event.tier, event.end) for event in events if type(event).__name__ == "Stored"}
    assert ("device", 20) in stored
    assert ("host", 20) in stored
