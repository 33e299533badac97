"""The engine without threads: submit, step, cancel. It keeps one step in flight while it plans the next."""

import collections
import itertools
import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from serving.admission import classify
from serving.alpha import AlphaTuner, Visit
from serving.completion import Completion
from serving.deadlines import Deadlines
from serving.following import Follower
from serving.hashing import HashChain, Path, root_digest
from serving.plan import Plan, StepResult
from serving.prefix_cache import PrefixCache
from serving.request import FinishReason, Output, Request, RequestError
from serving.scheduler import Scheduler, SchedulerOptions
from serving.sequence import Sequence
from serving.stats import Loads, Stats
from serving.tiering import Tiers


@runtime_checkable
class Runner(Protocol):
    """The device side. Steps run in the order of dispatch."""

    def dispatch(self, plan: Plan) -> Any:
        """Enqueues a step; returns what `collect` needs."""
        ...

    def collect(self, ticket: Any) -> StepResult:
        """Waits for a step."""
        ...


class Core:
    """Owns scheduler, cache and runner; everything happens in the thread that calls it."""

    def __init__(
        self,
        options: SchedulerOptions,
        cache: PrefixCache,
        runner: Runner,
        *,
        clock: Callable[[], float] = time.monotonic,
        ahead: int = 1,
        tuner: AlphaTuner | None = None,
        tiers: Tiers | None = None,
        check: Callable[[Request], None] = lambda request: None,
        mask_words: int | None = None,
    ) -> None:
        """`ahead`: steps that may be in flight while another one is planned; 0 waits for each.

        `tuner` sets the eviction's alpha while the engine runs, `tiers` keep what is evicted. `check` raises
        `RequestError` for what the model cannot do; `mask_words` is the size of a constraint's mask.
        """
        self.options, self.cache, self.runner, self.clock = options, cache, runner, clock
        self.scheduler = Scheduler(options, cache)
        self.counters = cache.counters
        self._follower = Follower(mask_words)
        self._completion = Completion(self.scheduler, self._forget, self._follower)
        self._sequences: dict[str, Sequence] = {}
        self._flying: collections.deque[tuple[Plan, Any]] = collections.deque()
        self._deadlines = Deadlines()
        self._order = itertools.count()
        self._ahead, self._tuner, self._check_model = ahead, tuner, check
        self._last_loads: tuple[int | float, int] = (clock(), 0)
        self.tiers = tiers
        if tiers is not None:
            self.scheduler.prepare = self._prepare

    def submit(self, request: Request, path: Path | None = None) -> Sequence:
        """Queues a request. `path` replaces the chain of its tokens' digests (for simulation).

        Raises `RequestError` for a request that can never run and `QueueFull` when too much waits already.
        """
        self.check(request)
        now = self.clock()
        kind = classify(self.options.classes, len(request.tokens)).name
        sequence = Sequence(request, path or self._chain(request), now, next(self._order), kind)
        error = None if request.constraint is None else self._follower.begin(sequence)
        if error is not None:
            raise RequestError(error)
        self._sequences[request.id] = sequence
        self.scheduler.waiting.push(sequence)
        self._deadlines.add(sequence)
        self.counters.requests += 1
        return sequence

    def _chain(self, request: Request) -> HashChain:
        root = root_digest(self.options.model_id, request.salt)
        return HashChain(root, self.cache.options.unit, request.tokens, request.images)

    def check(self, request: Request) -> None:
        """Raises what `submit` would raise; may be called from any thread."""
        limit = self.options.max_length
        fits = self.cache.pages.capacity * self.cache.options.page_size
        whole = len(request.tokens) + request.max_tokens
        problems = {
            f"request id {request.id!r} is in use; give each request an id of its own": request.id in self._sequences,
            "the prompt is empty, expected at least one token": not len(request.tokens),
            f"max_tokens is {request.max_tokens}, expected at least 1": request.max_tokens < 1,
            f"min_tokens is {request.min_tokens}, expected 0 to max_tokens ({request.max_tokens})": not (
                0 <= request.min_tokens <= request.max_tokens
            ),
            f"pin_seconds is {request.pin_seconds}, expected at least 0": request.pin_seconds < 0,
            f"prompt and max_tokens come to {whole} tokens, expected at most {limit} (max_length)": whole > limit,
            f"prompt and max_tokens come to {whole} tokens, all pages hold {fits}": whole - 1 > fits,
        }
        for text, wrong in problems.items():
            if wrong:
                raise RequestError(text)
        self._check_model(request)
        self.scheduler.waiting.require_room(len(request.tokens))

    def cancel(self, id: str, reason: FinishReason = "abort") -> Output | None:
        """Ends a request at any moment; None when there is no such request (any more)."""
        sequence = self._sequences.get(id)
        return None if sequence is None else self._end(sequence, reason)

    def _end(self, sequence: Sequence, reason: FinishReason) -> Output:
        return self._completion.end(sequence, sequence.ending(reason, self.clock()))

    def step(self, stride: int | None = None) -> list[Output]:
        """Dispatches one step, if there is one, and collects an earlier one; returns the news."""
        outputs = [self._end(s, "deadline") for s in self._deadlines.expired(self.clock())]
        if self.tiers is not None:
            self.tiers.poll()
        # A step under grammars waits for its drafts anyway; with this answer its rows take part in every step.
        while self._flying and self.scheduler.grammars_wait:
            outputs += self._collect()
        plan = self.scheduler.plan(self.clock(), stride)
        if plan is not None:
            self._flying.append((plan, self.runner.dispatch(plan)))
        if self._flying and (plan is None or len(self._flying) > self._ahead):
            outputs += self._collect()
        self._tune()
        return outputs

    def _collect(self) -> list[Output]:
        """Waits for the oldest step in flight."""
        done, ticket = self._flying.popleft()
        return self._completion.apply(done, self.runner.collect(ticket), self.clock())

    def _prepare(self, sequence: Sequence, now: int | float) -> bool:
        assert self.tiers is not None
        return self.tiers.prepare(sequence.path, sequence.known - 1, now) == "start"

    def _tune(self) -> None:
        alpha = None if self._tuner is None else self._tuner.advance()
        if alpha is not None:
            self.cache.evictor.set_alpha(alpha, self.clock())

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits or is in flight."""
        return not self._sequences and not self._flying

    def run(self, limit: int = 10**6) -> dict[str, list[Output]]:
        """Steps until nothing is left to do, at most `limit` times; returns the outputs by request."""
        outputs: dict[str, list[Output]] = collections.defaultdict(list)
        for _ in range(limit):
            if self.idle:
                return dict(outputs)
            for output in self.step():
                outputs[output.id].append(output)
        raise RuntimeError(f"{len(self._sequences)} requests are unfinished after {limit} steps")

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.id]
        # Before memory is short every alpha is as good as any other.
        if self._tuner is not None and sequence.kept and self.counters.removed["memory"]:
            kept = tuple(sorted(set(sequence.kept)))
            self._tuner.record(Visit(sequence.path, sequence.prompt_tokens, kept, self.clock()))

    def flush(self) -> int:
        """Drops every cached prefix; returns how many there were."""
        return self.cache.flush()

    def release_session(self, session: str) -> int:
        """Ends the pins of a session; returns how many prefixes were pinned."""
        return self.cache.release_session(session)

    def loads(self) -> Loads:
        """How busy the engine is; cheap, and may be called from any thread."""
        pages, size, now = self.cache.pages, self.cache.options.page_size, self.clock()
        said, self._last_loads = self._last_loads, (now, self.counters.output_tokens)
        return Loads(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            waiting_tokens=self.scheduler.waiting.tokens,
            used_tokens=(pages.used - pages.idle) * size,
            cached_tokens=pages.idle * size,
            max_tokens=pages.capacity * size,
            hit_rate=self.counters.hit_rate,
            tokens_per_second=(self.counters.output_tokens - said[1]) / max(now - said[0], 1e-9),
        )

    def check_books(self) -> None:
        """Raises `BooksError` unless every page and slot has the owners that its pool counts."""
        self.scheduler.holdings.check_books()

    def stats(self) -> Stats:
        """A snapshot; walks the prefix tree."""
        pages, slots = self.cache.pool_use()
        running = self.scheduler.running
        return Stats(
            running=len(running),
            waiting=len(self.scheduler.waiting),
            pages=pages,
            slots=slots,
            entries=self.cache.entries,
            nodes=self.cache.tree.nodes,
            waste_bytes=self._unused_rows() * self.cache.cost.latent_bytes_per_token,
            alpha=self.cache.evictor.alpha,
            counters=self.counters,
            compilations=getattr(self.runner, "compilations", 0),
        )

    def _unused_rows(self) -> int:
        """Token rows of pages in use that hold nothing."""
        page = self.cache.options.page_size
        running = sum(len(s.pages) * page - s.length for s in self.scheduler.running)
        return running + sum(-node.end % page for node in self.cache.tree if node.is_leaf)
