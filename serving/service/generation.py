"""From a wish to outputs: admission, deadline, cancellation and statuses, the same for both protocols."""

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator

from grpc import StatusCode

from serving.engine import Engine, EngineStopped, Stream
from serving.request import Final, FinishReason, Output, QueueFull, Request, RequestError
from serving.service import tracing
from serving.service.jobs import Job, Jobs
from serving.service.metrics import Metrics
from serving.service.model_card import ModelCard
from serving.service.options import Limits
from serving.service.refusals import Context, Refusal, busy, invalid, refusal_in
from serving.service.request_log import RequestLog
from serving.service.wish import Wish, check, requests_of

FAR = 1e6
"""gRPC reports a missing deadline as one in the far future (seconds)."""

TOO_SLOW = Refusal(
    StatusCode.RESOURCE_EXHAUSTED, "the reader did not keep up with the answer and was dropped; read faster"
)


class Generator:
    """Serves wishes with an engine."""

    def __init__(
        self, engine: Engine, card: ModelCard, limits: Limits, jobs: Jobs, metrics: Metrics, log: RequestLog
    ) -> None:
        self.engine, self.card, self.limits = engine, card, limits
        self.jobs, self.metrics, self.log = jobs, metrics, log

    def require_entry(self, context: Context) -> None:
        """Raises the `Refusal` of a call that need not be read: too late, a closed door, no room."""
        deadline_of(context)
        self.jobs.require_open()
        self.jobs.require_room(1, 0)

    async def outputs(self, wish: Wish, context: Context, protocol: str) -> AsyncGenerator[tuple[int, list[Output]]]:
        """Choice and outputs, as they come; each choice ends with a final record. Raises `Refusal`."""
        job: Job | None = None
        start = time.monotonic()
        account = Account(self.metrics, start)
        ending, deadline = "cancelled", None
        with tracing.span(context, wish.id, protocol, len(wish.tokens)) as span:
            try:
                deadline = deadline_of(context)
                check(wish, self.card, self.limits)
                self.jobs.require_open()
                self.jobs.require_room(wish.n, len(wish.tokens))
                requests = await requests_of(wish, self.card, deadline)
                job = self.jobs.enter(wish.id, requests, protocol)
                await self._submit(job, requests)
                async with contextlib.aclosing(merged(job.streams)) as news:
                    async for choice, outputs in news:
                        if not job.started and any(output.tokens for output in outputs):
                            self.jobs.started(job)
                        account.add(choice, outputs)
                        if job.refusal is not None:
                            raise job.refusal
                        if outputs[-1].final is not None:
                            _require_normal_end(outputs[-1].final, job.streams[choice])
                        yield choice, outputs
                ending = account.reason
            except EngineStopped as error:
                ending = "engine"
                raise stopped(error) from error
            except Refusal as refusal:
                ending = refusal.code.name.lower()
                raise
            except asyncio.CancelledError as error:
                refusal = refusal_in(error)
                ending = "cancelled" if refusal is None else refusal.code.name.lower()
                raise
            finally:
                # The context must not be asked any more: the call may be gone.
                late = deadline is not None and time.monotonic() >= deadline
                if job is not None:
                    self._leave(job, late)
                ending = "deadline_exceeded" if late and ending == "cancelled" else ending
                account.close(ending)
                span.end(ending, account.completion_tokens)
                self.log.ended(wish.id, protocol, ending, len(wish.tokens), account.finals, start)

    async def _submit(self, job: Job, requests: list[Request]) -> None:
        """Hands all choices to the engine."""
        for request in requests:
            job.entering = asyncio.current_task()
            try:
                stream = await self.engine.submit(request)
            except RequestError as error:
                raise invalid(_field_of(error), str(error)) from error
            except QueueFull as error:
                raise busy(str(error), 1.0) from error
            finally:
                job.entering = None
            # A write that waits for its reader cannot be called off, but it need not count any more.
            stream.on_drop = lambda: self.jobs.leave(job)
            job.streams.append(stream)
        if job.aborted:
            job.abort()

    def _leave(self, job: Job, late: bool) -> None:
        reason: FinishReason = "deadline" if late else "abort"
        for stream in job.streams:
            stream.cancel(reason)
        self.jobs.leave(job)


def _require_normal_end(final: Final, stream: Stream) -> None:
    """Raises the `Refusal` for an end that is no answer."""
    if final.finish_reason == "abort" and stream.dropped:
        raise TOO_SLOW
    if final.finish_reason == "deadline":
        raise Refusal(StatusCode.DEADLINE_EXCEEDED, "the deadline passed while the answer was being generated")
    if final.finish_reason == "error":
        raise Refusal(StatusCode.INTERNAL, final.error or "the request failed")


def _field_of(error: RequestError) -> str:
    """The field that the engine's message speaks of."""
    names = {"stop ids": "stop_token_ids", "logit": "logit_bias", "logprobs": "logprobs", "tokens": "max_tokens"}
    return next((name for text, name in names.items() if text in str(error)), "request")


class Account:
    """Times and counts of one call, for metrics and the log."""

    def __init__(self, metrics: Metrics, start: int | float) -> None:
        self._metrics, self._start = metrics, start
        self._last: dict[int, int | float] = {}
        self.finals: list[Final] = []
        self.completion_tokens = 0

    def add(self, choice: int, outputs: list[Output]) -> None:
        """Outputs of a choice have come."""
        final = outputs[-1].final
        tokens = len(outputs[0].tokens) if len(outputs) == 1 else sum(len(output.tokens) for output in outputs)
        if tokens:
            now, last = time.monotonic(), self._last.get(choice)
            if last is None:
                self._metrics.first_token.observe(now - self._start)
            else:
                self._metrics.inter_token.observe((now - last) / tokens)
            self._last[choice] = now
            self.completion_tokens += tokens
        if final is not None:
            self.finals.append(final)
            self._metrics.finished(final)

    @property
    def reason(self) -> str:
        """How the call ended, when it ended normally."""
        return self.finals[0].finish_reason if self.finals else "none"

    def close(self, ending: str) -> None:
        """The call is over."""
        self._metrics.call_ended(ending, time.monotonic() - self._start)


def stopped(error: EngineStopped) -> Refusal:
    """What a client is told when there is no engine any more."""
    crashed = "crashed" in str(error)
    return Refusal(StatusCode.INTERNAL if crashed else StatusCode.UNAVAILABLE, str(error))


def remaining(context: Context) -> float | None:
    """Seconds until the caller's deadline; None without one."""
    left = context.time_remaining()
    return None if left is None or left > FAR else float(left)


def deadline_of(context: Context) -> float | None:
    """The deadline on the engine's clock. Raises DEADLINE_EXCEEDED for one that has passed."""
    left = remaining(context)
    if left is not None and left <= 0:
        raise Refusal(StatusCode.DEADLINE_EXCEEDED, "the deadline had passed when the request arrived")
    return None if left is None else time.monotonic() + left


async def merged(streams: list[Stream]) -> AsyncGenerator[tuple[int, list[Output]]]:
    """Outputs of several streams in the order of their arrival; what came while nobody asked comes at once."""
    if len(streams) == 1:
        async for outputs in batches(streams[0]):
            yield 0, outputs
        return
    waiting = {asyncio.ensure_future(stream.batch()): choice for choice, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            arrived = sorted((waiting.pop(task), task.result()) for task in done)
            for choice, outputs in arrived:
                if outputs[-1].final is None:
                    waiting[asyncio.ensure_future(streams[choice].batch())] = choice
                yield choice, outputs
    finally:
        for task in waiting:
            task.cancel()


async def batches(stream: Stream) -> AsyncIterator[list[Output]]:
    """Everything that has arrived at a time, up to the final record."""
    while True:
        outputs = await stream.batch()
        yield outputs
        if outputs[-1].final is not None:
            return


def joined(outputs: list[Output]) -> Output:
    """Several outputs of one request as one."""
    if len(outputs) == 1:
        return outputs[0]
    fields: dict[str, list] = collections.defaultdict(list)
    for output in outputs:
        fields["tokens"] += output.tokens
        fields["logprobs"] += output.logprobs
        fields["top"] += output.top_logprobs or []
    prompt = next((output.prompt_logprobs for output in outputs if output.prompt_logprobs), None)
    top = fields["top"] or None
    return Output(outputs[0].id, fields["tokens"], fields["logprobs"], outputs[-1].final, top, prompt)
