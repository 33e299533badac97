"""Puts load on a target and writes down what happens."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable

from serving.bench.records import Record
from serving.bench.target import RequestFailed, Target
from serving.bench.workload import Prompt

Progress = Callable[[list[Record]], None]


async def closed(
    target: Target, prompts: Iterable[Prompt], max_tokens: int, readers: int, records: list[Record]
) -> float:
    """`readers` clients, each with one request at a time; returns the seconds that it took."""
    start, waiting = time.perf_counter(), iter(prompts)

    async def reader() -> None:
        for prompt in waiting:
            record = Record(time.perf_counter() - start)
            records.append(record)
            await _follow(record, target.stream(prompt, max_tokens), start)

    await asyncio.gather(*(reader() for _ in range(readers)))
    return time.perf_counter() - start


async def opened(
    target: Target, prompts: Iterable[Prompt], max_tokens: int, times: Iterable[float], records: list[Record]
) -> float:
    """Requests at the given `times`, whatever has become of those before; returns the seconds that it took."""
    start = time.perf_counter()
    tasks = []
    for prompt, due in zip(prompts, times):
        await asyncio.sleep(max(due - (time.perf_counter() - start), 0))
        record = Record(due)
        records.append(record)
        tasks.append(asyncio.create_task(_follow(record, target.stream(prompt, max_tokens), start)))
    await asyncio.gather(*tasks)
    return time.perf_counter() - start


async def _follow(record: Record, stream: AsyncIterator[int], start: float) -> None:
    try:
        async for tokens in stream:
            record.arrivals.append(time.perf_counter() - start)
            record.tokens.append(tokens)
        record.status = "ok"
    except RequestFailed as error:
        record.status = str(error)
    record.end = time.perf_counter() - start


async def watched(run: "asyncio.Future[float] | asyncio.Task[float]", records: list[Record], show: Progress) -> float:
    """Calls `show` twice a second while `run` goes on."""
    while not run.done():
        await asyncio.wait([run], timeout=0.5)
        show(records)
    return await run
