"""How calls end other than well: deadlines, hang-ups, aborts, overload, slow readers (checklist 1 to 3 and 8)."""

import random
import threading
import time

import grpc
import pytest

import serving
from serving.protocol import messages, services
from tests.serving.fake_runner import solo
from tests.serving.service.test_generate import tokenized


@pytest.fixture(scope="module")
def slow(start):
    """Steps of 5 ms."""
    return start(seconds=0.005, queue_limit=12, queue_tokens=2000)


def code_of(call):
    with pytest.raises(serving.ServiceError) as failed:
        call()
    return failed.value.code


@pytest.mark.parametrize(
    ("prompt", "seconds"),
    [(3, 0.0005), (300, 0.02), (300, 0.07), (3, 0.12), (3, 0.9)],
    ids=["at once", "first chunk", "between chunks", "decode", "later in decode"],
)
def test_1_deadline_at_any_moment(slow, prompt, seconds):
    tokens = [random.Random(prompt + int(1e4 * seconds)).randrange(40) for _ in range(prompt)]
    start = time.monotonic()
    code = code_of(lambda: slow.client.generate(tokens, ignore_eos=True, timeout=seconds).results)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - start < seconds + 0.5
    steps = slow.runner.dispatched
    slow.books_balance()
    # Whoever is late leaves the batch with the next step.
    assert slow.runner.dispatched - steps <= 3


def test_1_deadline_in_the_queue(slow):
    calls = [slow.worker.Generate(tokenized([n], max_tokens=300, ignore_eos=True)) for n in range(6)]
    next(calls[0])
    assert (
        code_of(lambda: slow.client.generate([1], timeout=0.05, ignore_eos=True).results)
        is grpc.StatusCode.DEADLINE_EXCEEDED
    )
    for call in calls:
        call.cancel()
    slow.books_balance()


def test_2_a_hang_up_frees_everything_soon(slow):
    call = slow.worker.Generate(tokenized([1, 2], max_tokens=300, ignore_eos=True))
    next(call)
    steps, start = slow.runner.dispatched, time.monotonic()
    call.cancel()
    while len(slow.service.jobs):
        time.sleep(0.0005)
    assert time.monotonic() - start < 0.1
    slow.books_balance()
    assert slow.runner.dispatched - steps <= 4


def test_2_a_hang_up_is_seen_within_5_ms(slow):
    times, others = [], []
    for n in range(15):
        call = slow.worker.Generate(tokenized([n, 3], max_tokens=300, ignore_eos=True))
        next(call)
        start = time.monotonic()
        call.cancel()
        while len(slow.service.jobs):
            time.sleep(0.0002)
        times.append(time.monotonic() - start)
        start = time.monotonic()
        slow.client.health()
        others.append(time.monotonic() - start)
    # A busy machine makes every call slow.
    assert sorted(times)[7] < 0.005 + sorted(others)[7]
    slow.books_balance()


def test_2_abort_by_id(slow):
    call = slow.worker.Generate(tokenized([1, 2], max_tokens=300, request_id="mine", ignore_eos=True))
    next(call)
    assert slow.client.abort("mine", "nobody's") == ["mine"]
    *_, last = call
    assert last.complete.finish_reason == "abort"
    assert slow.client.abort("mine") == []
    slow.books_balance()


def hang_up_at_random(running, number, seed):
    """Calls that hang up at any moment, from before they are sent to after they have ended."""
    rng = random.Random(seed)

    def one():
        call = running.worker.Generate(
            tokenized([rng.randrange(40) for _ in range(rng.randrange(1, 30))], max_tokens=rng.randrange(1, 60))
        )
        for _ in range(rng.randrange(8)):
            if next(call, None) is None:
                break
        call.cancel()

    for _ in range(number):
        try:
            one()
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.CANCELLED, error  # noqa: PT017 - most calls do not fail


@pytest.mark.parametrize("number", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_2_no_hang_up_leaks(start, number):
    running = start(seconds=0.0, queue_limit=100)
    workers = [threading.Thread(target=hang_up_at_random, args=(running, number // 6, seed)) for seed in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    running.books_balance()
    running.client.flush()
    pages, slots = running.in_engine(running.core.cache.pool_use)
    assert (pages.used, slots.used, running.service.jobs.sequences, running.service.jobs.waiting_tokens) == (0, 0, 0, 0)


def test_3_overload_is_refused_at_once(slow):
    calls = [slow.worker.Generate(tokenized([n], max_tokens=390, ignore_eos=True)) for n in range(16)]
    for call in calls[:4]:
        next(call)
    times, others = [], []
    for _ in range(20):
        start = time.monotonic()
        with pytest.raises(serving.ServiceError) as refused:
            list(slow.client.generate([1]))
        times.append(time.monotonic() - start)
        assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 0.1 <= refused.value.retry_after <= 30
        start = time.monotonic()
        slow.client.health()
        others.append(time.monotonic() - start)
    for call in calls:
        call.cancel()
    slow.books_balance()
    # A busy machine makes every call slow.
    assert sorted(times)[10] < 0.01 + sorted(others)[10]


def test_3_a_queue_is_full_of_tokens_too(slow):
    first = slow.worker.Generate(tokenized([5] * 390, max_tokens=9))
    calls = [slow.worker.Generate(tokenized([n] * 390, max_tokens=9, request_id=f"long{n}")) for n in range(5)]
    deadline = time.monotonic() + 1
    while len(slow.service.jobs) < 5 and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(serving.ServiceError, match="prompt tokens wait") as refused:
        list(slow.client.generate([1] * 390))
    assert refused.value.retry_after
    for call in (first, *calls):
        call.cancel()
    slow.books_balance()


def test_3_the_overload_program_counts_who_waits_and_who_is_refused(start, capsys, tmp_path, monkeypatch):
    """How much those inside suffer is the program's to print, on a machine that does nothing else."""
    import json

    from serving.bench import overload

    loads, measured = [], overload.full_load

    async def full_load(*args):
        loads.append(await measured(*args))
        return loads[-1]

    monkeypatch.setattr(overload, "full_load", full_load)
    running = start(seconds=0.004, queue_limit=4)
    file = tmp_path / "overload.json"
    flags = ["--address", running.address, "--rows", "4", "--seconds", "0.4", "--output-tokens", "20"]
    assert overload.main([*flags, "--prompt-tokens", "4", "--most-growth", "99", "--json", str(file)]) == 0
    text, figures = capsys.readouterr().out, json.loads(file.read_text())
    full, over = figures["full"], figures["overloaded"]
    assert full["errors"] == {}
    assert set(over["errors"]) == {"RESOURCE_EXHAUSTED"}
    assert over["errors"]["RESOURCE_EXHAUSTED"] + over["completed"] == over["requests"]
    _, before, after = loads
    assert over["offered_per_second"] == 10 * overload.figures(*before)["requests_per_second"]
    assert full["completed"] == len(before[0]) + len(after[0])  # the full load before and after counts as one
    assert over["refusal_ms"]["p50"] > 0
    assert figures["growth"] == over["itl_ms"]["p99"] / full["itl_ms"]["p99"] - 1
    assert f"grows by {figures['growth']:+.1%}" in text
    assert overload.judge(full, over, 0.21, 0.2) == 1
    assert overload.judge(full, over | {"errors": {"INTERNAL": 1}}, 0.0, 0.2) == 1
    running.books_balance()


def test_3_a_slow_reader_stops_only_itself(start):
    """Its outputs wait for it up to a limit; then it is dropped with a status, and the others never notice."""
    running = start(seconds=0.0002, write_wait_outputs=40)
    # A window that lets a few messages through at a time.
    narrow = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0))
    with grpc.insecure_channel(running.address, narrow) as channel:
        request = messages.GenerateRequest(ignore_eos=True, max_tokens=390, return_token_ids=True)
        request.token_ids.ids.append(1)
        readers = [services.GenerateStub(channel).Generate(request) for _ in range(3)]
        quick = running.client.generate([7, 8], max_tokens=100, ignore_eos=True, return_token_ids=True)
        assert list(quick.result.token_ids) == solo([7, 8], 100)
        running.books_balance()
        for reader in readers:
            with pytest.raises(grpc.RpcError, match="did not keep up") as dropped:
                list(reader)
            assert dropped.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_coalesced_outputs_lose_nothing(start, monkeypatch):
    """A reader that is slow but not too slow gets several steps in one message."""
    import asyncio

    running = start(seconds=0.0)
    from serving.service import generation

    real = generation.batches

    async def late(stream):
        async for outputs in real(stream):
            await asyncio.sleep(0.02)
            yield outputs

    monkeypatch.setattr(generation, "batches", late)
    stream = running.client.generate([3, 4, 5], max_tokens=120, ignore_eos=True, logprobs=0)
    pieces = list(stream)
    assert len(pieces) < 60
    assert list(stream.result.token_ids) == solo([3, 4, 5], 120)
    assert len(stream.result.logprobs) == 120


def test_8_a_nan_ends_one_request_with_its_id(start):
    running = start(bad=(13,))
    neighbours = [running.worker.Generate(tokenized([n, n + 1], max_tokens=30, stream=False)) for n in range(3)]
    with pytest.raises(grpc.RpcError) as failed:
        list(running.worker.Generate(tokenized([1, 13, 2], request_id="nan")))
    error = serving.ServiceError.of(failed.value)
    assert error.code is grpc.StatusCode.INTERNAL
    assert error.request_id == "nan"
    assert "not finite" in error.message
    for n, call in enumerate(neighbours):
        expected = solo([n, n + 1], 30, (49,))
        if 13 not in expected:
            assert list(next(call).complete.output_ids) == expected


def test_1_what_is_too_late_is_not_even_read():
    """A past deadline is refused before the prompt is encoded."""
    from serving.service.generation import deadline_of
    from serving.service.refusals import Refusal

    class Context:
        def __init__(self, left):
            self.left = left

        def time_remaining(self):
            return self.left

    for left in (0, -1.0):
        with pytest.raises(Refusal, match="had passed") as late:
            deadline_of(Context(left))
        assert late.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert deadline_of(Context(None)) is None
    assert deadline_of(Context(5.0)) == pytest.approx(time.monotonic() + 5, abs=0.1)


def test_a_call_that_cannot_enter_is_not_read(start, nano_tokenizer, monkeypatch):
    from serving.service import native_request

    running = start(nano_tokenizer, queue_limit=0, rows=1, seconds=0.01)
    call = running.worker.Generate(tokenized([1], max_tokens=300, ignore_eos=True))
    next(call)

    async def never(*args):
        raise AssertionError("the prompt was read")

    monkeypatch.setattr(native_request, "read", never)
    with pytest.raises(serving.ServiceError) as refused:
        list(running.client.generate("text"))
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    call.cancel()
