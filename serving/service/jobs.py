"""The calls that are being served: who comes in, who may be aborted, and when all are done."""

import asyncio
import dataclasses
import time

from serving.engine import Stream
from serving.request import Request
from serving.service.options import ServiceOptions
from serving.service.refusals import Refusal, busy, invalid, unavailable

SHORTEST_WAIT, LONGEST_WAIT = 0.1, 30.0
"""Seconds that a refused client is told to wait."""


@dataclasses.dataclass(eq=False, slots=True)
class Job:
    """One call: a stream per choice."""

    id: str
    choices: int
    prompt_tokens: int
    protocol: str
    arrival: int | float = dataclasses.field(default_factory=time.monotonic)
    streams: list[Stream] = dataclasses.field(default_factory=list)
    started: bool = False
    """Whether a token has come."""
    aborted: bool = False
    """Whether its client wished it to end."""
    inside: bool = True
    """Whether the call has not ended."""
    refusal: Refusal | None = None
    """The status with which the service ends the call."""
    entering: "asyncio.Task[object] | None" = None
    """Serves the call, while it waits for the engine to take it in."""

    def abort(self) -> None:
        """Ends all choices as the client wishes: the call ends normally, with the reason "abort"."""
        self.aborted = True
        for stream in self.streams:
            stream.cancel()

    def refuse(self, refusal: Refusal) -> None:
        """Ends the call with a status, without the engine's help.

        A write is never cancelled: the status could not follow it then, and the client would take what it has for all.
        """
        self.refusal = Refusal(refusal.code, refusal.text, *refusal.details)
        if self.entering is not None:
            self.entering.cancel(self.refusal)
        for stream in self.streams:
            stream.cancel()
            stream.fail(self.refusal)


class Jobs:
    """All jobs by id. Lives in the event loop."""

    def __init__(self, options: ServiceOptions) -> None:
        self._options = options
        self._jobs: dict[str, Job] = {}
        self._sequences = 0
        self._waiting_tokens = 0
        self._seconds = 1.0
        self._empty = asyncio.Event()
        self._empty.set()
        self.closed: Refusal | None = unavailable("the model is being loaded; wait for the health service")
        """Why nobody is let in; None when the door is open."""
        self.accepted = 0
        self.last_arrival = 0.0

    def __len__(self) -> int:
        """Calls that are being served."""
        return len(self._jobs)

    @property
    def sequences(self) -> int:
        """Choices of all calls."""
        return self._sequences

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of calls without a token yet."""
        return self._waiting_tokens

    def require_open(self) -> None:
        """Raises the `Refusal` for a closed door."""
        if self.closed is not None:
            raise self.closed

    def require_room(self, choices: int, tokens: int) -> None:
        """Raises RESOURCE_EXHAUSTED when too much waits already. Costs nothing, so it can be asked first of all."""
        limit = self._options.rows + self._options.queue_limit
        if self._sequences + choices > limit:
            text = f"{self._sequences} sequences run or wait and {choices} more exceed {limit}; try again later"
            raise busy(text, self._wait())
        if self._waiting_tokens and self._waiting_tokens + tokens > self._options.queue_tokens:
            limit, waiting = self._options.queue_tokens, self._waiting_tokens
            raise busy(f"{waiting} prompt tokens wait and {tokens} more exceed {limit}; try again later", self._wait())

    def _wait(self) -> float:
        """About the time in which as much as waits now has been served."""
        waiting = max(self._sequences - self._options.rows, 0)
        rounds = (1 + waiting) / self._options.rows
        return min(max(rounds * self._seconds, SHORTEST_WAIT), LONGEST_WAIT)

    def enter(self, id: str, requests: list[Request], protocol: str) -> Job:
        """Lets a call in. Raises a `Refusal` when the door is closed, the room is full or the id is taken."""
        self.require_open()
        if id in self._jobs:
            raise invalid("request_id", f"{id!r} is in use; give each request an id of its own")
        job = Job(id, len(requests), len(requests[0].tokens), protocol)
        self.require_room(job.choices, job.prompt_tokens)
        self._jobs[id] = job
        self._sequences += job.choices
        self._waiting_tokens += job.prompt_tokens
        self.accepted += 1
        self.last_arrival = time.time()
        self._empty.clear()
        return job

    def started(self, job: Job) -> None:
        """The first token of a call has come."""
        job.started = True
        self._waiting_tokens -= job.prompt_tokens

    def leave(self, job: Job) -> None:
        """A call has ended, one way or another, or need not be waited for. The second time does nothing."""
        if not job.inside:
            return
        job.inside = False
        if not job.started:
            self.started(job)
        del self._jobs[job.id]
        self._sequences -= job.choices
        self._seconds += 0.1 * (time.monotonic() - job.arrival - self._seconds)
        if not self._jobs:
            self._empty.set()

    def abort(self, ids: list[str]) -> list[str]:
        """Ends calls by id, as their clients wish; returns those that were found."""
        found = [id for id in ids if id in self._jobs]
        for id in found:
            self._jobs[id].abort()
        return found

    def refuse_all(self, refusal: Refusal) -> None:
        """Ends every call with a status."""
        for job in self._jobs.values():
            job.refuse(refusal)

    async def drained(self) -> None:
        """Waits until no call is left."""
        await self._empty.wait()
