"""Scheduling against the fake device: whatever happens to a request, it says what it would say alone."""

import pytest

from serving.plan import Shape
from serving.request import QueueFull, Request, RequestError
from serving.retention import Retention
from tests.serving.fake_runner import FakeRunner, solo

_ids = iter(range(10**9))


def request(tokens, max_tokens=4, **options):
    return Request(id=f"r{next(_ids)}", tokens=list(tokens), max_tokens=max_tokens, **options)


def said(outputs, id):
    return [token for output in outputs[id] for token in output.tokens]


def serve(core, *requests):
    for item in requests:
        core.submit(item)
    outputs = core.run()
    core.check_books()
    return outputs


def final(outputs, item):
    return outputs[item.id][-1].final


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 17, 30])
def test_alone(make_core, ahead, length):
    core = make_core(ahead=ahead)
    item = request(range(length))
    outputs = serve(core, item)
    assert said(outputs, item.id) == solo(item.tokens, 4)
    assert final(outputs, item).finish_reason == "length"


def test_batch_is_larger_than_the_rows(make_core):
    core = make_core()
    items = [request([n, n + 1, n + 2] * (1 + n % 5), 1 + n % 6) for n in range(12)]
    outputs = serve(core, *items)
    for item in items:
        assert said(outputs, item.id) == solo(item.tokens, item.max_tokens)


@pytest.mark.parametrize("ahead", [0, 1])
def test_stop_id_ends_a_sequence_and_is_part_of_it(make_core, ahead):
    core = make_core(ahead=ahead)
    stop = solo([1, 2, 3], 6)[3]
    item = request([1, 2, 3], 20, stop_ids=(stop,))
    outputs = serve(core, item)
    assert said(outputs, item.id) == solo([1, 2, 3], 20, (stop,))
    assert final(outputs, item).finish_reason == "stop"


def test_second_identical_request_hits(make_core):
    core = make_core()
    first, second = request(range(20)), request(range(20))
    serve(core, first)
    outputs = serve(core, second)
    assert final(outputs, second).cached_tokens == 18
    assert said(outputs, second.id) == solo(first.tokens, 4)


@pytest.mark.parametrize("length", range(1, 26))
def test_repeats_of_every_length_get_the_longest_legal_hit(make_core, length):
    """D.1 1, 9, 22, 29b: page 4, unit 2; one token at least is always computed."""
    core = make_core(retention=Retention(decode_end=False))
    first, second = request(range(length)), request(range(length))
    serve(core, first)
    outputs = serve(core, second)
    assert final(outputs, second).cached_tokens == (length - 1) // 2 * 2
    assert said(outputs, second.id) == solo(first.tokens, 4)


@pytest.mark.parametrize("extra", range(1, 9))
def test_a_prompt_that_ends_anywhere_past_a_boundary_can_be_continued(make_core, extra):
    """D.1 9: the previous prompt ended `extra` tokens past a page boundary."""
    core = make_core()
    prompt = list(range(8 + extra))
    serve(core, request(prompt, 1))
    longer = request([*prompt, 40, 41, 42], 3)
    outputs = serve(core, longer)
    assert final(outputs, longer).cached_tokens == len(prompt)
    assert said(outputs, longer.id) == solo(longer.tokens, 3)


def test_next_turn_starts_where_the_last_one_ended(make_core):
    core = make_core()
    first = request([5, 6, 7, 8, 9], 4)
    answer = said(serve(core, first), first.id)
    second = request([*first.tokens, *answer, 1, 2, 3], 4)
    outputs = serve(core, second)
    assert final(outputs, second).cached_tokens == 5 + 4 - 1
    assert said(outputs, second.id) == solo(second.tokens, 4)


def test_third_diverging_request_hits_the_junction(make_core):
    """D.1 14: P+x, P+y, P+z; the second leaves a state at the junction, the third starts there."""
    core = make_core()
    shared = list(range(16))
    items = [request([*shared, tail, tail, tail, tail], 2) for tail in (40, 41, 42)]
    cached = []
    for item in items:
        outputs = serve(core, item)
        cached.append(final(outputs, item).cached_tokens)
        assert said(outputs, item.id) == solo(item.tokens, 2)
    assert cached == [0, 0, 16]


def test_without_marconi_the_junction_is_never_kept(make_core):
    core = make_core(retention=Retention(marconi=False))
    outputs = {}
    for tail in (40, 41, 42):
        item = request([*range(16), tail, tail, tail, tail], 2)
        outputs = serve(core, item)
    assert final(outputs, item).cached_tokens == 0


def test_interval_keeps_states_inside_a_long_prompt(make_core):
    core = make_core(retention=Retention.parse("interval=4"))
    serve(core, request(range(30), 1))
    item = request([*range(13), 45], 2)
    outputs = serve(core, item)
    assert final(outputs, item).cached_tokens == 12
    assert said(outputs, item.id) == solo(item.tokens, 2)


def test_nothing_is_kept_when_caching_is_off(make_core):
    core = make_core(prefix_caching=False)
    items = [request(range(20)) for _ in range(2)]
    outputs = [serve(core, item) for item in items]
    assert final(outputs[1], items[1]).cached_tokens == 0
    assert not core.cache.slots.used


def test_a_reader_waits_a_step_for_a_state_on_its_way(make_core):
    """Both come at once; the second is deferred until the first one's state is in the cache."""
    core = make_core(shapes=(Shape(2, 32),), token_budget=80, rows=2)
    first, second = request(range(17)), request(range(17))
    core.submit(first)
    core.step()
    core.submit(second)
    outputs = core.run()
    assert core.counters.deferred >= 1
    assert outputs[second.id][-1].final.cached_tokens == 16
    assert said(outputs, second.id) == solo(first.tokens, 4)
    core.check_books()


def test_salts_separate_tenants(make_core):
    """D.1 20: a canary. The same prompt under another salt finds nothing."""
    core = make_core()
    serve(core, request(range(20), salt="a"))
    item = request(range(20), salt="b")
    outputs = serve(core, item)
    assert final(outputs, item).cached_tokens == 0
    serve(core, other := request(range(20), salt="a"))
    assert core.counters.cached_tokens == 18
    assert other.turn == "a"


@pytest.mark.parametrize("ahead", [0, 1])
def test_preempted_requests_say_the_same(make_core, ahead):
    core = make_core(ahead=ahead, cache={"pages": 10, "slots": 8})
    items = [request([n] * 9, 12) for n in range(3)]
    outputs = serve(core, *items)
    assert core.counters.preemptions > 0
    for item in items:
        assert said(outputs, item.id) == solo(item.tokens, 12)


def test_an_urgent_request_takes_the_row_of_another(make_core):
    core = make_core(rows=1, token_budget=16)
    slow, urgent = request(range(9), 12), request(range(20, 26), 2, priority=-1)
    core.submit(slow)
    for _ in range(6):
        core.step()
    core.submit(urgent)
    order = []
    while not core.idle:
        order += [output.id for output in core.step() if output.final]
        core.check_books()
    assert order == [urgent.id, slow.id]
    assert core.counters.preemptions == 1


def test_resumes_at_the_last_retained_boundary(make_core):
    core = make_core(rows=1, token_budget=16)
    slow = request(range(17), 12)
    core.submit(slow)
    early = [token for _ in range(7) for output in core.step() for token in output.tokens]
    core.submit(request([30, 31], 1, priority=-1))
    outputs = core.run()
    assert early
    assert early + said(outputs, slow.id) == solo(slow.tokens, 12)
    # 17 tokens once, 2 of the urgent one; then those past the prompt boundary at 16 again.
    assert core.counters.computed_tokens < 17 + 2 + 10


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_cancel_at_every_moment(make_core, steps, ahead):
    """D.1 23. Queued, first chunk, between chunks, decoding, last token: books right, neighbour unharmed."""
    core = make_core(ahead=ahead)
    victim, other = request(range(20), 4), request(range(30, 44), 8)
    core.submit(victim)
    core.submit(other)
    outputs = [o for _ in range(steps) for o in core.step()]
    ended = core.cancel(victim.id)
    if ended is not None:
        assert ended.final.finish_reason == "abort"
        assert core.cancel(victim.id) is None
    core.check_books()
    rest = [o for out in core.run().values() for o in out]
    assert not [o for o in rest if o.id == victim.id]
    assert [t for o in outputs + rest if o.id == other.id for t in o.tokens] == solo(other.tokens, 8)
    core.flush()
    core.check_books()
    assert (core.cache.pages.used, core.cache.slots.used) == (0, 0)


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 6, 8])
def test_deadline_at_every_moment(make_core, steps):
    core = make_core()
    core.submit(item := request(range(20), 12, deadline=1.0))
    for _ in range(steps):
        core.step()
    core.clock.now = 2.0
    outputs = core.step()
    assert [o.final.finish_reason for o in outputs if o.final] == ["deadline"]
    assert not core.scheduler.running
    core.run()
    core.check_books()
    assert core.cancel(item.id) is None


def test_deadline_that_is_not_reached(make_core):
    core = make_core()
    outputs = serve(core, item := request(range(5), deadline=9.0))
    core.clock.now = 20.0
    assert core.step() == []
    assert final(outputs, item).finish_reason == "length"


def test_a_bad_state_fails_one_request_and_stays_out_of_the_cache(make_core):
    """D.1 2: only the request with the NaN fails; neither its state nor one that led to it is offered again."""
    core = make_core(bad=[49])
    bad, good = request([1, 2, 3, 4, 49, 6, 7, 8, 9], 3), request(range(20, 29), 3)
    outputs = serve(core, bad, good)
    assert final(outputs, bad).finish_reason == "error"
    assert "not finite" in final(outputs, bad).error
    assert said(outputs, good.id) == solo(good.tokens, 3)
    assert core.counters.non_finite_states == 1
    again = serve(core, repeat := request([1, 2, 3, 4, 5], 1))
    assert final(again, repeat).cached_tokens == 0


def test_a_cached_prefix_that_leads_to_a_nan_is_purged(make_core):
    core = make_core(bad=[49])
    serve(core, request(range(9), 1))
    serve(core, request([*range(8), 49, 1], 1))
    assert core.counters.removed["non_finite"] == 1
    serve(core, item := request(range(9), 1))
    assert core.counters.finished["error"] == 1
    assert item.id not in core._sequences


def test_queue_limits(make_core):
    core = make_core(max_waiting=2, max_waiting_tokens=30)
    core.submit(request(range(20)))
    with pytest.raises(QueueFull, match="20 prompt tokens are waiting and 11 more exceed 30"):
        core.submit(request(range(11)))
    core.submit(request(range(10)))
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        core.submit(request([1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "prompt is empty"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"tokens": [1] * 61}, "come to 65 tokens, expected at most 64"),
        ({"id": "twice"}, "'twice' is in use"),
    ],
)
def test_bad_requests(make_core, change, message):
    core = make_core()
    core.submit(Request(id="twice", tokens=[1], max_tokens=1))
    with pytest.raises(RequestError, match=message):
        core.submit(Request(**{"id": "new", "tokens": [1], "max_tokens": 4} | change))


def test_a_request_that_no_memory_holds_is_refused(make_core):
    core = make_core(cache={"pages": 5, "slots": 4})
    with pytest.raises(RequestError, match="come to 20 tokens, all pages hold 16"):
        core.submit(request(range(16), 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_budget": 5}, "token_budget is 5, expected at least 6"),
        ({"retention": Retention(interval=3)}, "multiple of the hash unit"),
        ({"rows": 0}, "at least one row"),
    ],
)
def test_bad_options(make_core, options, message):
    with pytest.raises(ValueError, match=message):
        make_core(**options)


def test_stats_add_up(make_core):
    core = make_core()
    serve(core, request(range(20)), request(range(20, 30)))
    stats = core.stats()
    assert stats.entries == core.cache.entries == 4
    assert stats.pages.used == stats.pages.cached
    assert stats.counters.prompt_tokens == 30
    assert stats.counters.output_tokens == 8
    assert stats.waste_bytes < stats.pages.used * 4
    assert stats.summary()["finished"] == {"length": 2}


def test_events_tell_what_can_be_reused(make_core):
    core, events = make_core(), []
    core.cache.events.listen(events.append)
    serve(core, request(range(20), 1))
    prompt, end = events
    assert (prompt.parent, prompt.start, prompt.end, prompt.tier) == (None, 0, 18, "device")
    assert (end.parent, end.start, end.end) == (prompt.name, 18, 20)
    core.flush()
    assert {(e.name, e.reason) for e in events[2:]} == {(prompt.name, "flush"), (end.name, "flush")}


def test_runner_is_never_asked_for_nothing(make_core):
    core = make_core()
    assert core.step() == []
    assert isinstance(core.runner, FakeRunner)
    assert core.runner.dispatched == 0
