"""Traces of requests: what arrives when, and which parts of the prompts are the same.

A prompt is a list of segments; equal ids mean equal tokens. One request is one line of JSON:

    {"time": 1.5, "prompt": [[7, 6000], [1201, 380]], "output": [1202, 240], "tenant": "a"}

Lines of the form of the Mooncake traces are read too, where each hash id stands for 512 tokens:

    {"timestamp": 1500, "input_length": 6400, "output_length": 240, "hash_ids": [0, 1, 2]}

`agentic` makes a trace of agents at work. Its shape:

    sessions    arrive as a Poisson process; each picks one of `systems` system prompts by a Zipf law
    projects    half of them read one of `projects` larger texts next (a code base, a manual), by a Zipf law as well
    turns       geometric, `turns` on average; each prompt repeats everything before it and adds a message or a result
    pauses      4 of 5 turns follow a tool after about 5 s, the others a person after about a minute
    fan-out     one session in ten splits at some turn into sub-agents that share everything up to there
    ultra-long  one session in a hundred starts with a document of up to 900,000 tokens
"""

import dataclasses
import heapq
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

MOONCAKE_BLOCK = 512


class TraceError(ValueError):
    """A line that is not a request."""


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    time: int | float
    prompt: tuple[tuple[int, int], ...]
    """(segment id, tokens) in order."""
    output: tuple[int, int]
    tenant: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return sum(length for _, length in self.prompt)

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgenticOptions:
    """Sizes of an agentic trace."""

    requests: int = 10_000
    sessions_per_second: int | float = 1.0
    systems: int = 24
    projects: int = 60
    turns: int | float = 10.0
    longest: int = 1_000_000
    """Prompts that would be longer end their session."""
    tenants: int = 4
    seed: int = 0


def read(path: str | Path) -> Iterator[TraceRequest]:
    """The requests of a file. Raises `TraceError` with the number of a line that is not one."""
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield parse(json.loads(line), number)
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(f"{path}, line {number}: is not a request ({error!r})") from error


def parse(record: dict, number: int = 0) -> TraceRequest:
    """One record in either form; `number` names the output of a Mooncake record, which has no id."""
    if "hash_ids" in record:
        left = int(record["input_length"])
        sizes = [min(MOONCAKE_BLOCK, left - n * MOONCAKE_BLOCK) for n in range(len(record["hash_ids"]))]
        prompt = tuple((int(id), size) for id, size in zip(record["hash_ids"], sizes) if size > 0)
        return TraceRequest(record["timestamp"] / 1e3, prompt, (-number - 1, int(record["output_length"])))
    prompt = tuple((int(id), int(size)) for id, size in record["prompt"])
    id, size = record["output"]
    return TraceRequest(float(record["time"]), prompt, (int(id), int(size)), record.get("tenant", ""))


def write(path: str | Path, requests: Iterable[TraceRequest]) -> None:
    """Writes requests as lines of JSON."""
    with Path(path).open("w", encoding="utf-8") as file:
        file.writelines(f"{request.line()}\n" for request in requests)


class _Agents:
    """Draws sessions; every session is a line of future requests."""

    def __init__(self, options: AgenticOptions) -> None:
        self.options = options
        self.rng = np.random.default_rng(options.seed)
        self._ids = itertools.count(1)
        self._systems = [self._segment(6000, 0.6) for _ in range(options.systems)]
        self._projects = [self._segment(30_000, 0.8) for _ in range(options.projects)]

    def _segment(self, median: int | float, spread: int | float) -> tuple[int, int]:
        return next(self._ids), max(16, int(self.rng.lognormal(np.log(median), spread)))

    def _zipf(self, count: int) -> int:
        weights = 1 / np.arange(1, count + 1)
        return int(self.rng.choice(count, p=weights / weights.sum()))

    def opening(self) -> list[tuple[int, int]]:
        """What a new session starts with."""
        parts = [self._systems[self._zipf(len(self._systems))]]
        if self.rng.random() < 0.01:
            return [*parts, (next(self._ids), int(self.rng.integers(150_000, 900_000)))]
        if self.rng.random() < 0.5:
            parts.append(self._projects[self._zipf(len(self._projects))])
        return parts

    def session(
        self, time: int | float, history: list[tuple[int, int]], tenant: str, *, may_split: bool
    ) -> Iterator[TraceRequest]:
        """The requests of a session; a fan-out is interleaved by `agentic`, which sorts by time."""
        turns = int(self.rng.geometric(1 / self.options.turns))
        split = int(self.rng.integers(turns)) if may_split and self.rng.random() < 0.1 else -1
        for turn in range(turns):
            if turn == split:
                for _ in range(int(self.rng.integers(2, 6))):
                    yield from self.session(time, list(history), tenant, may_split=False)
            history.append(self._segment(700, 1.0))
            output = self._segment(220, 0.7)
            request = TraceRequest(time, tuple(history), output, tenant)
            if request.tokens + output[1] > self.options.longest:
                return
            yield request
            history.append(output)
            time += float(self.rng.exponential(5.0 if self.rng.random() < 0.8 else 60.0)) + output[1] / 40


def agentic(options: AgenticOptions) -> Iterator[TraceRequest]:
    """Requests in order of time; the same options give the same trace."""
    agents = _Agents(options)
    ahead: list[tuple[float, int, TraceRequest]] = []
    order, made, now = itertools.count(), 0, 0.0
    while made < options.requests:
        now += float(agents.rng.exponential(1 / options.sessions_per_second))
        tenant = f"tenant{int(agents.rng.integers(options.tenants))}"
        for request in agents.session(now, agents.opening(), tenant, may_split=True):
            heapq.heappush(ahead, (request.time, next(order), request))
        while ahead and ahead[0][0] <= now and made < options.requests:
            made += 1
            yield heapq.heappop(ahead)[2]
