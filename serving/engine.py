"""The engine as a service sees it: submit a request, get a stream; one thread drives the core.

    engine = Engine(core)
    engine.start()
    async for output in await engine.submit(request):
        ...                                     # tokens, and the final record with the last of them

Everything that touches the core runs in the engine's thread. Outputs of a step reach each event loop in one call.
"""

import asyncio
import collections
import concurrent.futures
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from serving.core import Core
from serving.request import FinishReason, Output, Request
from serving.stats import Stats

IDLE_SECONDS = 0.1
"""How often an engine without work shows that it is alive."""


class EngineStopped(RuntimeError):
    """The engine does not accept requests: it is draining, stopped or has crashed."""


class Stream:
    """Outputs of one request, in order; ends after the one with the final record."""

    def __init__(self, engine: "Engine", id: str, limit: int) -> None:
        self.id = id
        self._engine, self._limit = engine, limit
        self._loop = asyncio.get_running_loop()
        self._outputs: collections.deque[Output] = collections.deque()
        self._news = asyncio.Event()
        self._error: BaseException | None = None
        self._ended = False
        self.dropped = False
        """Whether it was ended because its reader was too slow."""
        self.on_drop: Callable[[], None] = lambda: None
        """Called in the stream's loop when that happens."""

    def __aiter__(self) -> AsyncIterator[Output]:
        """The stream itself; it can be read once."""
        return self._read()

    async def _read(self) -> AsyncIterator[Output]:
        while True:
            for output in await self.batch():
                yield output
                if output.final is not None:
                    return

    async def batch(self) -> list[Output]:
        """Waits for news and takes all of it; the last output has the final record. Raises what ended the engine."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def cancel(self, reason: FinishReason = "abort") -> None:
        """Ends the request; the stream still gives its final record. Does nothing once it has ended."""
        if not self._ended:
            self._engine.cancel(self.id, reason)

    def put(self, output: Output) -> None:
        """Called in the stream's loop."""
        self._ended |= output.final is not None
        self._outputs.append(output)
        if len(self._outputs) > self._limit and not self.dropped:
            # A reader that does not keep up must not hold memory without end, nor stop the others.
            self.dropped = True
            self.cancel()
            self.on_drop()
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """Called in the stream's loop when the engine has crashed."""
        self._error, self._ended = error, True
        self._news.set()


class Engine:
    """Drives a core in a thread of its own."""

    def __init__(
        self,
        core: Core,
        *,
        stream_limit: int = 4096,
        on_crash: Callable[[BaseException], None] = lambda error: None,
        on_step: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`stream_limit`: outputs that may wait for a reader.

        `on_crash` and `on_step` (seconds that a step took) are called in the engine's thread.
        """
        self.core = core
        self.beat = time.monotonic()
        """When the thread last finished a step or found nothing to do."""
        self.error: BaseException | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._stream_limit = stream_limit
        self._on_crash, self._on_step = on_crash, on_step
        self._accepting, self._running = False, False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._accepting = self._running = True
        self._thread.start()

    async def submit(self, request: Request) -> Stream:
        """Queues a request; its stream gives every token.

        Raises `RequestError`, `QueueFull` and `EngineStopped`, each with the reason.
        """
        self._require_accepting()
        # Refuse at once what the thread, in the middle of a step, would refuse later.
        self.core.check(request)
        stream = Stream(self, request.id, self._stream_limit)

        def enter() -> None:
            self._require_accepting()
            self.core.submit(request)
            self._streams[request.id] = stream

        try:
            await asyncio.wrap_future(self.call(enter))
        except asyncio.CancelledError:
            self.cancel(request.id)
            raise
        return stream

    def _require_accepting(self) -> None:
        if self.error is not None:
            raise EngineStopped(f"the engine has crashed: {self.error}") from self.error
        if not self._accepting:
            raise EngineStopped("the engine is draining or stopped and takes no new requests")

    def cancel(self, id: str, reason: FinishReason = "abort") -> None:
        """Ends a request; its stream gets the final record. Does nothing for an unknown id."""

        def end() -> None:
            output = self.core.cancel(id, reason)
            self._deliver([] if output is None else [output])

        self.call(end)

    def call(self, function: Callable[[], Any]) -> "concurrent.futures.Future[Any]":
        """Runs `function` in the engine's thread between two steps."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            # Whoever asked may have gone meanwhile.
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    async def stats(self) -> Stats:
        """A snapshot taken between two steps."""
        return await asyncio.wrap_future(self.call(self.core.stats))

    async def flush(self) -> int:
        """Drops every cached prefix; returns how many there were."""
        return await asyncio.wrap_future(self.call(self.core.flush))

    async def drain(self, seconds: int | float = 30.0) -> bool:
        """Takes no new requests and waits for those that run; what is left after `seconds` is aborted.

        Returns whether all of them ended by themselves. The thread has stopped afterwards.
        """
        self._accepting = False
        end = time.monotonic() + seconds
        while self._streams and time.monotonic() < end:
            await asyncio.sleep(0.005)
        complete = not self._streams
        for id in list(self._streams):
            self.cancel(id)
        await asyncio.to_thread(self.stop)
        return complete

    def stop(self) -> None:
        """Stops the thread after what it has been told so far."""
        self._accepting = False

        def halt() -> None:
            self._running = False

        if self._thread.is_alive():
            self.call(halt)
            self._thread.join()

    # The engine's thread.

    def _main(self) -> None:
        try:
            while self._running:
                self._hear()
                start, idle = time.monotonic(), self.core.idle
                self._deliver(self.core.step())
                self.beat = time.monotonic()
                if not idle:
                    self._on_step(self.beat - start)
        except BaseException as error:
            self._crash(error)

    def _hear(self) -> None:
        """Does what has been asked for; waits for it when there is nothing else to do."""
        try:
            if self.core.idle:
                self._inbox.get(timeout=IDLE_SECONDS)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _deliver(self, outputs: list[Output]) -> None:
        batches: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Output]]] = {}
        for output in outputs:
            stream = self._streams.get(output.id)
            if stream is not None:
                batches.setdefault(stream._loop, []).append((stream, output))
                if output.final is not None:
                    del self._streams[output.id]
        for loop, batch in batches.items():
            _call_in(loop, lambda batch=batch: [stream.put(output) for stream, output in batch])

    def _crash(self, error: BaseException) -> None:
        self.error, self._accepting, self._running = error, False, False
        for stream in self._streams.values():
            failure = EngineStopped(f"request {stream.id}: the engine has crashed ({error!r})")
            _call_in(stream._loop, lambda stream=stream, failure=failure: stream.fail(failure))
        self._streams.clear()
        self._on_crash(error)
        while not self._inbox.empty():
            self._inbox.get_nowait()()


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> None:
    """Runs `function` in `loop`, unless the loop has gone with its readers."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)
