import numpy as np
import pytest

from serving.alpha import AlphaTuner, Visit, replay
from serving.costs import DEVICES, ModelCost
from serving.hashing import HashChain, root_digest
from serving.prefix_cache import CacheOptions


def chain(tokens, unit=2):
    return HashChain(root_digest("m"), unit, tokens)


def admit(cache, tokens, bound, now):
    table = cache.take_pages(-(-len(tokens) // cache.options.page_size), now)
    slot = cache.take_slot(now)
    assert cache.store(chain(tokens), bound, table, slot, now) is not None
    cache.pages.release(table)


def lengths(cache):
    return sorted(node.end for node in cache.tree if node.slot)


def test_lru_drops_the_oldest(make_cache):
    cache = make_cache(slots=4)
    for now, size in enumerate((2, 4, 6)):
        admit(cache, [size] * size, size, float(now))
    cache.hold(cache.match(chain([2, 2, 0]), 2), 5.0)
    cache.slots.release([cache.match(chain([2, 2, 0]), 2).node.slot])
    admit(cache, [8] * 8, 8, 6.0)
    assert lengths(cache) == [2, 6, 8]
    assert cache.counters.removed["memory"] == 1


def test_flop_aware_keeps_what_saves_most(make_cache):
    """The oldest entry is the longest; LRU would drop it, a high alpha does not."""
    cache = make_cache(slots=4, alpha=10.0)
    for now, size in enumerate((40, 2, 4)):
        admit(cache, [size] * size, size, float(now))
    admit(cache, [6] * 6, 6, 3.0)
    assert 40 in lengths(cache)
    assert 2 not in lengths(cache)


def test_efficiency_buys_time_and_not_eternity(make_cache):
    """A long prefix outlives short ones that are younger, but not any number of them."""
    cache = make_cache(slots=6, pages=64, alpha=4.0)
    admit(cache, [40] * 40, 40, 0.0)
    gone = None
    for now in range(1, 200):
        admit(cache, [now + 50] * 6, 6, float(now))
        if 40 not in lengths(cache):
            gone = now
            break
    assert gone is not None
    assert gone > 10, "as soon as LRU would have dropped it"


def test_efficiency_counts_what_the_state_adds(make_cache):
    cache = make_cache()
    admit(cache, [1] * 8, 8, 0.0)
    admit(cache, [1] * 16, 16, 0.0)
    inner, outer = sorted((n for n in cache.tree if n.slot), key=lambda n: n.end)
    # cost: 100 per token, 1 per pair, 1 byte per token, 50 per state
    assert cache.evictor.efficiency(inner) == pytest.approx((800 + 32) / 50)
    assert cache.evictor.efficiency(outer) == pytest.approx((800 + 128 - 32) / (50 + 8))


def test_pages_are_freed_by_leaves_only(make_cache):
    cache = make_cache(pages=9)
    admit(cache, [1] * 8, 8, 0.0)
    admit(cache, [1] * 16, 16, 1.0)
    assert cache.take_pages(5, 2.0) is not None
    assert lengths(cache) == [8]


def test_memory_in_use_is_not_found(make_cache):
    cache = make_cache(pages=5)
    table = cache.take_pages(4, 0.0)
    assert cache.take_pages(1, 0.0) is None
    cache.pages.release(table)
    assert cache.take_pages(1, 0.0) is not None


def test_spill_sees_entries_before_they_go(make_cache):
    seen = []
    cache = make_cache(slots=2, spill=lambda node, pages: seen.append((node.end, len(pages), node.slot > 0)))
    admit(cache, [1] * 6, 6, 0.0)
    admit(cache, [2] * 4, 4, 1.0)
    assert seen == [(6, 2, True)]


def visits(count, seed=0):
    """Two long prefixes that come back after many short prompts that do not."""
    rng = np.random.default_rng(seed)
    out = []
    for number in range(count):
        tokens = [number % 2] * 40 if number % 7 < 2 else rng.integers(2, 99, 6).tolist()
        out.append(Visit(chain([*tokens, 100, 101]), len(tokens) + 2, (len(tokens),), float(number)))
    return out


def test_tuner_finds_that_efficiency_pays(cost):
    options = CacheOptions(pages=60, slots=5, page_size=4, unit=2)
    tuner = AlphaTuner(options, cost, window=80)
    for visit in visits(80):
        tuner.record(visit)
    found = None
    while found is None:
        found = tuner.advance()
    assert found > 0
    assert tuner.advance() is None


def test_tuner_stays_with_lru_without_evidence(cost):
    tuner = AlphaTuner(CacheOptions(pages=200, slots=50, page_size=4, unit=2), cost, window=10)
    for visit in visits(10):
        tuner.record(visit)
    found = None
    while found is None:
        found = tuner.advance()
    assert found == 0.0


def test_replay_leaves_the_books_right(make_cache):
    cache = make_cache(pages=20, slots=4, alpha=1.0)
    saved = [replay(cache, visit) for visit in visits(60)]
    cache.check_books()
    assert sum(saved) > 0


def test_costs_of_k3():
    """Figures of the spec, section A0: 13,824 B of FP8 latents a token, 428.6 MiB a state."""
    from k3jax.config import k3

    cost = ModelCost.of(k3())
    assert cost.latent_bytes_per_token == 13824
    assert cost.state_bytes == 69 * 6_512_640
    assert cost.flops_per_token == pytest.approx(2 * 104e9, rel=0.05)
    assert cost.weight_bytes == pytest.approx(1.6e12, rel=0.2)
    device = DEVICES["h200x8"]
    assert device.prefill_seconds(cost, 0, 8192) > device.prefill_seconds(cost, 4096, 8192) > 0


def test_prefill_costs_add_up(cost):
    assert cost.prefill_flops(0, 10) == pytest.approx(cost.prefill_flops(0, 4) + cost.prefill_flops(4, 10))
