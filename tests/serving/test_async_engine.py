"""The engine's thread and its streams, on the fake device."""

import asyncio
import threading
import time

import pytest

from serving.engine import Engine, EngineStopped
from serving.request import QueueFull, Request, RequestError
from tests.serving.fake_runner import solo


def request(id, tokens=(1, 2, 3), max_tokens=5, **options):
    return Request(id=id, tokens=list(tokens), max_tokens=max_tokens, **options)


@pytest.fixture
def engine(make_core):
    engine = Engine(make_core(), stream_limit=50)
    engine.start()
    yield engine
    engine.stop()


async def read(stream):
    return [output async for output in stream]


def test_streams_of_many_requests(engine):
    async def main():
        streams = [await engine.submit(request(str(n), [n, n + 1], 6)) for n in range(10)]
        return await asyncio.gather(*map(read, streams))

    for n, outputs in enumerate(asyncio.run(main())):
        assert [token for output in outputs for token in output.tokens] == solo([n, n + 1], 6)
        assert [output.final is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_cancel_gives_a_final_record(engine):
    async def main():
        stream = await engine.submit(request("long", max_tokens=50))
        outputs = []
        async for output in stream:
            outputs.append(output)
            stream.cancel()
        stream.cancel()
        return outputs, await engine.stats()

    outputs, stats = asyncio.run(main())
    assert outputs[-1].final.finish_reason in ("abort", "length")
    assert stats.running == 0


def test_errors_reach_the_caller(engine):
    async def main():
        with pytest.raises(RequestError, match="prompt is empty"):
            await engine.submit(request("a", []))
        go_on = threading.Event()
        engine.call(lambda: go_on.wait(10))  # else the first may be over before the second comes
        both = [asyncio.ensure_future(engine.submit(request("b"))) for _ in range(2)]
        await asyncio.sleep(0)
        go_on.set()
        stream, refused = await asyncio.gather(*both, return_exceptions=True)
        assert isinstance(refused, RequestError)
        assert "'b' is in use" in str(refused)
        await read(stream)

    asyncio.run(main())


def test_a_full_queue_refuses_at_once(make_core):
    engine = Engine(make_core(max_waiting=1, rows=1, token_budget=16))

    async def main():
        engine.core.submit(request("first"))
        start = time.monotonic()
        engine._accepting = True
        with pytest.raises(QueueFull):
            await engine.submit(request("second"))
        return time.monotonic() - start

    assert asyncio.run(main()) < 0.05


def test_slow_reader_is_dropped_and_others_go_on(make_core):
    engine = Engine(make_core(), stream_limit=25)
    engine.start()

    async def main():
        slow = await engine.submit(request("slow", max_tokens=60))
        quick = await engine.submit(request("quick", [7, 8], 20))
        outputs = await read(quick)
        await asyncio.sleep(0.05)
        return outputs, await read(slow)

    outputs, late = asyncio.run(main())
    engine.stop()
    assert [token for output in outputs for token in output.tokens] == solo([7, 8], 20)
    assert late[-1].final.finish_reason in ("abort", "length")


def test_drain_finishes_what_runs(engine):
    async def main():
        streams = [await engine.submit(request(str(n), [n], 20)) for n in range(5)]
        readers = asyncio.gather(*map(read, streams))
        complete = await engine.drain(10)
        with pytest.raises(EngineStopped, match="draining or stopped"):
            await engine.submit(request("late"))
        return complete, await readers

    complete, all_outputs = asyncio.run(main())
    assert complete
    assert all(outputs[-1].final.finish_reason == "length" for outputs in all_outputs)


def test_a_crash_reaches_every_stream(make_core):
    crashes = []
    core = make_core()
    engine = Engine(core, on_crash=crashes.append)
    engine.start()

    async def main():
        core.runner.collect = None
        stream = await engine.submit(request("a", max_tokens=60))
        with pytest.raises(EngineStopped, match="request a: the engine has crashed"):
            await read(stream)
        with pytest.raises(EngineStopped, match="has crashed"):
            await engine.submit(request("b"))

    asyncio.run(main())
    engine.stop()
    assert len(crashes) == 1


def test_an_idle_engine_shows_that_it_lives(engine):
    before = engine.beat
    time.sleep(0.25)
    assert engine.beat > before
