"""Random schedules against the fake device: 500 of them by `make test-slow`, fewer in every run."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from serving.core import Core
from serving.costs import ModelCost
from serving.plan import Shape
from serving.prefix_cache import CacheOptions, PrefixCache
from serving.request import Request
from serving.retention import Retention
from serving.scheduler import SchedulerOptions
from tests.serving.cancellations import cancel_at_random
from tests.serving.fake_runner import FakeRunner, solo

COST = ModelCost(flops_per_token=100.0, flops_per_pair=1.0, latent_bytes_per_token=1.0, state_bytes=50.0)
RETENTIONS = ("prompt", "interval=12", "marconi", "decode-end", "prompt,interval=24,marconi,decode-end,supersede", "")


def new_core(pages, slots, page, unit, rows, ahead, alpha, retention, captures, block=1, clock=lambda: 0.0):
    cache = PrefixCache(CacheOptions(pages=pages, slots=slots, page_size=page, unit=unit), COST, alpha=alpha)
    options = SchedulerOptions(
        rows=rows,
        token_budget=16 + rows * block,
        block=block,
        shapes=(Shape(1, 4), Shape(2, 8), Shape(1, 16)),
        captures=captures,
        max_length=40,
        retention=Retention.parse(retention),
    )
    return Core(options, cache, FakeRunner(page, drafting=block > 1), clock=clock, ahead=ahead)


class Machine(RuleBasedStateMachine):
    @initialize(
        sizes=st.tuples(st.integers(24, 40), st.integers(5, 9), st.integers(2, 5)),
        unit=st.sampled_from([1, 2, 3, 4, 6]),
        rows=st.integers(1, 4),
        ahead=st.integers(0, 2),
        alpha=st.sampled_from([0.0, 1.0]),
        retention=st.sampled_from(RETENTIONS),
        captures=st.integers(1, 2),
        block=st.sampled_from([1, 1, 4]),
    )
    def begin(self, sizes, unit, rows, ahead, alpha, retention, captures, block):
        self.now = 0.0
        self.core = new_core(*sizes, unit, rows, ahead, alpha, retention, captures, block, lambda: self.now)
        self.requests, self.said, self.ended = {}, {}, {}

    @rule(
        stem=st.integers(0, 2),
        length=st.integers(0, 20),
        end=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        max_tokens=st.integers(1, 8),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "other"]),
        stops=st.booleans(),
        deadline=st.none() | st.integers(1, 40),
    )
    def submit(self, stem, length, end, max_tokens, priority, salt, stops, deadline):
        tokens = [(stem + i * (stem + 1)) % 7 for i in range(length)] + end
        stop_ids = tuple(range(0, 50, 9)) if stops else ()
        item = Request(
            id=str(len(self.requests)),
            tokens=tokens,
            max_tokens=max_tokens,
            priority=priority,
            salt=salt,
            stop_ids=stop_ids,
            deadline=None if deadline is None else self.now + deadline,
        )
        self.core.submit(item)
        self.requests[item.id], self.said[item.id] = item, []

    def hear(self, outputs):
        for output in outputs:
            assert output.id not in self.ended, "news after the end"
            self.said[output.id] += output.tokens
            if output.final:
                self.ended[output.id] = output.final.finish_reason
        for id, item in self.requests.items():
            expected = solo(item.tokens, item.max_tokens, item.stop_ids)
            complete = self.ended.get(id) in ("stop", "length")
            assert self.said[id] == (expected if complete else expected[: len(self.said[id])])

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.now += 1
            self.hear(self.core.step())

    @rule(index=st.integers(0, 30))
    def cancel(self, index):
        waiting = [id for id in self.requests if id not in self.ended]
        if waiting:
            self.hear([self.core.cancel(waiting[index % len(waiting)])])

    @rule()
    def flush(self):
        self.core.flush()

    @invariant()
    def books(self):
        if hasattr(self, "core"):
            self.core.check_books()

    def teardown(self):
        if hasattr(self, "core"):
            self.hear(output for outputs in self.core.run(10_000).values() for output in outputs)
            assert self.ended.keys() == self.requests.keys()
            self.core.check_books()
            self.core.flush()
            assert not self.core.cache.pages.used
            assert not self.core.cache.slots.used


Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestSchedules = Machine.TestCase


def run_schedule(seed):
    """A burst of mixed requests in scarce memory; everybody says what they would say alone."""
    rng = random.Random(seed)
    core = new_core(
        rng.randint(30, 60),
        rng.randint(6, 12),
        rng.randint(2, 5),
        rng.choice([1, 2, 3, 4, 6]),
        rng.randint(1, 6),
        rng.randint(0, 2),
        rng.choice([0.0, 1.0]),
        rng.choice(RETENTIONS),
        rng.randint(1, 3),
        rng.choice([1, 3]),
    )
    items, said = {}, {}
    for number in range(rng.randint(5, 25)):
        stem = rng.randrange(3)
        tokens = [(stem + i) % 5 for i in range(rng.randrange(20))] + [
            rng.randrange(3) for _ in range(rng.randint(1, 8))
        ]
        item = Request(id=str(number), tokens=tokens, max_tokens=rng.randint(1, 10), priority=rng.randrange(3))
        core.submit(item)
        items[item.id], said[item.id] = item, []
        for _ in range(rng.randrange(4)):
            for output in core.step():
                said[output.id] += output.tokens
    for id, outputs in core.run().items():
        said[id] += [token for output in outputs for token in output.tokens]
    core.check_books()
    for id, item in items.items():
        assert said[id] == solo(item.tokens, item.max_tokens), f"schedule {seed}, request {id}"
    return core.counters


def run_cancellations(count, seed):
    """Requests end at random moments; the books are as at the start."""
    rng = random.Random(seed)
    core = new_core(40, 9, 4, 2, 4, 1, 1.0, "prompt,marconi,decode-end", 2)
    items = (
        Request(id=str(number), tokens=[rng.randrange(3) for _ in range(rng.randint(1, 30))], max_tokens=8)
        for number in range(count)
    )
    cancel_at_random(core, items, rng, steps=5)
    core.flush()
    core.check_books()
    assert (core.cache.pages.used, core.cache.slots.used, len(core.scheduler.waiting)) == (0, 0, 0)
    assert core.counters.finished["abort"] > count // 3
    return core


def test_schedules_equal_solo_runs():
    counters = [run_schedule(seed) for seed in range(40)]
    assert sum(c.preemptions for c in counters) > 0
    assert sum(c.cached_tokens for c in counters) > 0


def test_cancellations_leave_nothing_behind():
    run_cancellations(200, seed=0)


@pytest.mark.slow
def test_500_schedules_equal_solo_runs():
    for seed in range(40, 540):
        run_schedule(seed)


@pytest.mark.slow
def test_1000_cancellations_leave_nothing_behind():
    run_cancellations(1000, seed=1)
