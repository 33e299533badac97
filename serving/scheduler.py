"""Continuous batching: which rows decode, which chunks are prefilled, who comes in and who has to go.

The scheduler runs ahead of the device: lengths are known when a step is dispatched, tokens only when it is collected. Device
programs run in the order of dispatch, so memory that a finished request gives back may be handed on at once:
whatever the steps in flight still do to it happens before its next use.

A preempted request gives back everything. What retention has kept of it stays in the prefix cache, and it resumes there.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterable, Sequence as Listing
from typing import NamedTuple

from serving.admission import CLASSES, Budgets, RequestClass, WaitingQueue, classify
from serving.hashing import Digest, HashChain, Path, root_digest
from serving.plan import Capture, DecodeRow, Plan, PrefillRow, Shape
from serving.prefix_cache import Hit, PrefixCache
from serving.request import FinishReason, Output, Request, RequestError
from serving.retention import Retention
from serving.sequence import Phase, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Sizes of a step and rules of admission."""

    rows: int = 64
    """Sequences that run at a time."""
    token_budget: int = 2048
    """Tokens of a step: one per decoding row, the rest for prefill."""
    shapes: tuple[Shape, ...] = (Shape(1, 128), Shape(4, 128), Shape(1, 512), Shape(1, 2048))
    captures: int = 2
    """States that a chunk can leave behind."""
    max_length: int = 32768
    """Positions of a sequence, prompt and output together."""
    max_waiting: int = 1024
    max_waiting_tokens: int = 16 * 2**20
    retention: Retention = Retention()
    classes: tuple[RequestClass, ...] = CLASSES
    output_reserve: float = 0.25
    """Part of `max_tokens` that admission makes room for; the rest is paid by preemption if need be."""
    prefix_caching: bool = True
    model_id: str = ""

    def check(self, unit: int) -> None:
        """Raises `ValueError` for options that cannot work together."""
        self.retention.check(unit)
        if not self.shapes or self.rows < 1 or self.captures < 1:
            raise ValueError("a scheduler needs at least one row, one prefill shape and one capture per row")
        smallest = min(shape.size for shape in self.shapes)
        if self.token_budget < smallest + self.rows - 1:
            raise ValueError(
                f"token_budget is {self.token_budget}, expected at least {smallest + self.rows - 1}: "
                f"the smallest prefill shape beside {self.rows - 1} decoding rows"
            )


class _Memory(NamedTuple):
    """What a sequence needs to start."""

    hit: Hit | None
    slot: int
    copy: tuple[int, int]
    pages: list[int]


class Scheduler:
    """Owns the references of all running sequences and of the states on their way into the cache."""

    def __init__(self, options: SchedulerOptions, cache: PrefixCache) -> None:
        options.check(cache.options.unit)
        self.options, self.cache, self.counters = options, cache, cache.counters
        self.waiting = WaitingQueue(options.max_waiting, options.max_waiting_tokens)
        self.budgets = Budgets(options.classes, cache.pages.capacity)
        self.running: list[Sequence] = []
        self.capturing: list[Capture] = []
        self._rows = list(range(options.rows - 1, -1, -1))
        self._sequences: dict[str, Sequence] = {}
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._order = itertools.count()
        self._roots: dict[str, bytes] = {}
        self._page = cache.options.page_size
        self._shapes = sorted(options.shapes, key=lambda shape: (shape.size, shape.tokens))

    # Requests come and go.

    def submit(self, request: Request, now: float, path: Path | None = None) -> Sequence:
        """Queues a request. `path` replaces its hash chain (for simulation).

        Raises `RequestError` for one that can never run and `QueueFull` for one that comes at a bad time.
        """
        self._check(request)
        self.waiting.require_room(len(request.tokens))
        kind = classify(self.options.classes, len(request.tokens)).name
        root = self._roots.setdefault(request.salt, root_digest(self.options.model_id, request.salt))
        chain = HashChain(root, self.cache.options.unit, request.tokens, request.images) if path is None else path
        sequence = Sequence(request, chain, now, next(self._order), kind, list(request.tokens))
        self._sequences[request.id] = sequence
        self.waiting.push(sequence)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, sequence.order, sequence))
        self.counters.requests += 1
        return sequence

    def _check(self, request: Request) -> None:
        length, limit = len(request.tokens), self.options.max_length
        fits = self.cache.pages.capacity * self._page
        problems = {
            f"request {request.id!r} is already running; give each request an id of its own": request.id in self._sequences,
            "the prompt is empty, expected at least one token": not length,
            f"max_tokens is {request.max_tokens}, expected at least 1": request.max_tokens < 1,
            f"prompt and max_tokens come to {request.longest + 1} tokens, expected at most {limit}": request.longest >= limit,
            f"prompt and max_tokens need {request.longest} cached tokens, all pages hold {fits}": request.longest > fits,
        }
        for text, wrong in problems.items():
            if wrong:
                raise RequestError(text)

    def cancel(self, id: str, now: float, reason: FinishReason = "abort") -> Output | None:
        """Ends a request at any moment; None when there is no such request any more."""
        sequence = self._sequences.get(id)
        return None if sequence is None else self._end(sequence, sequence.ending(reason, now))

    def expire(self, now: float) -> list[Output]:
        """Ends every request whose deadline has passed."""
        ended = []
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence.phase is not Phase.FINISHED:
                ended.append(self._end(sequence, sequence.ending("deadline", now)))
        return ended

    def _end(self, sequence: Sequence, output: Output) -> Output:
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        else:
            self._release(sequence)
        sequence.phase = Phase.FINISHED
        del self._sequences[sequence.request.id]
        assert output.final is not None
        self.counters.finished[output.final.finish_reason] += 1
        return output

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits or is on its way."""
        return not self._sequences and not self.capturing

    # One step.

    def plan(self, now: float, stride: int = 1) -> Plan | None:
        """The next step, or None when nothing can be done before a step in flight is collected.

        `stride`: tokens per decoding row, for a runner that can do several.
        """
        decode = self._plan_decode(now, stride)
        self._admit(now)
        shape, prefill = self._plan_prefill(now, self.options.token_budget - len(decode), decode)
        if not prefill and not decode:
            return None
        self.counters.steps += 1
        return Plan(prefill, shape, list(decode.values()))

    def _plan_decode(self, now: float, stride: int) -> dict[Sequence, DecodeRow]:
        rows: dict[Sequence, DecodeRow] = {}
        for sequence in sorted(self.running, key=lambda s: s.rank):
            # An earlier row may have pushed this one out.
            if not sequence.wants_decode:
                continue
            tokens = min(stride, sequence.request.max_tokens - sequence.sampled)
            if self._grow(sequence, sequence.length + tokens, now, rows):
                rows[sequence] = DecodeRow(
                    sequence, sequence.row, sequence.slot, sequence.length, sequence.pages, tokens
                )
        for sequence, row in rows.items():
            sequence.length += row.tokens
            sequence.sampled += row.tokens
            sequence.in_flight += 1
        return rows

    def _grow(self, sequence: Sequence, length: int, now: float, decode: dict[Sequence, DecodeRow]) -> bool:
        """Gives the sequence pages for `length` tokens; pushes less important ones out, in the end the sequence itself."""
        needed = -(-length // self._page) - len(sequence.pages)
        if needed <= 0:
            return True
        while (pages := self.cache.take_pages(needed, now)) is None:
            victim = max(self.running, key=lambda s: s.rank)
            if victim is sequence and sequence.phase is Phase.PREFILL:
                return False
            self._preempt(victim, decode)
            if victim is sequence:
                return False
        sequence.pages.extend(pages)
        return True

    def _preempt(self, victim: Sequence, decode: dict[Sequence, DecodeRow]) -> None:
        """Takes everything from a sequence and puts it at the front of its line."""
        row = decode.pop(victim, None)
        # A row that this very step was to run has been counted as dispatched.
        victim.in_flight -= row is not None and victim.sampled > 0 and victim.length > row.length
        self._release(victim)
        victim.phase = Phase.WAITING
        victim.preemptions += 1
        self.waiting.push(victim, front=True)
        self.counters.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._rows.append(sequence.row)
        self.budgets.give_back(sequence)
        self.cache.slots.release([sequence.slot])
        self.cache.pages.release(sequence.pages)
        self._let_go_of_hit(sequence)
        sequence.pages, sequence.slot, sequence.row = [], 0, -1
        sequence.length = sequence.sampled = 0
        sequence.boundaries = []

    def _let_go_of_hit(self, sequence: Sequence) -> None:
        if sequence.hit is not None:
            self.cache.slots.release([sequence.hit.slot])
            self.cache.pages.release([sequence.copy[0]] if sequence.copy[0] else ())
        sequence.hit, sequence.copy = None, (0, 0)

    # Admission.

    def _admit(self, now: float) -> None:
        progress = True
        while progress and len(self.waiting):
            progress = False
            for sequence in self.waiting.heads():
                if sequence.in_flight:
                    continue
                pages = self._reservation(sequence)
                if not self.budgets.admits(sequence.kind, pages):
                    continue
                if not self._rows and not self._displace(sequence):
                    return
                if self._awaits_capture(sequence):
                    self.counters.deferred += 1
                    continue
                if not self._start(sequence, pages, now):
                    # Nobody passes a request for which memory is short, or it might wait forever.
                    return
                progress = True
                break

    def _reservation(self, sequence: Sequence) -> int:
        rest = sequence.request.max_tokens - sequence.outputs
        return -(-int(len(sequence.ids) + self.options.output_reserve * rest) // self._page)

    def _displace(self, sequence: Sequence) -> bool:
        """Makes a row free by pushing out a sequence of a lower priority."""
        victim = max(self.running, key=lambda s: s.rank)
        if victim.request.priority <= sequence.request.priority:
            return False
        self._preempt(victim, {})
        return True

    def _awaits_capture(self, sequence: Sequence) -> bool:
        """Whether a state that the sequence could start from is on its way: then it waits for it."""
        if not self.capturing or not self.options.prefix_caching:
            return False
        limit, unit = len(sequence.ids) - 1, self.cache.options.unit
        units = sequence.path.units
        coming = [c.tokens for c in self.capturing if c.tokens <= limit and units[c.tokens // unit - 1] == c.name]
        return bool(coming) and max(coming) > self.cache.match(sequence.path, limit).tokens

    def _start(self, sequence: Sequence, reserved: int, now: float) -> bool:
        """Gives a waiting sequence its memory and its row; False when memory is short."""
        if sequence.path is not None and isinstance(sequence.path, HashChain):
            sequence.path.extend(sequence.ids[len(sequence.path) :])
        limit = len(sequence.ids) - 1
        match = self.cache.match(sequence.path, limit) if self.options.prefix_caching else None
        hit = None if match is None else self.cache.hold(match, now)
        memory = self._memory_for(sequence, hit, reserved, now)
        if memory is None and hit is not None:
            # What the hit holds may be just what is missing.
            memory = self._memory_for(sequence, None, reserved, now)
        if memory is None:
            return False
        self.waiting.remove(sequence)
        sequence.hit, sequence.slot, sequence.copy, sequence.pages = memory
        sequence.source = memory.hit
        sequence.length = cached = memory.hit.tokens if memory.hit else 0
        sequence.sampled = sequence.outputs
        sequence.phase, sequence.row = Phase.PREFILL, self._rows.pop()
        reach = match.reach if match else 0
        sequence.boundaries = self._boundaries(sequence, cached, reach)
        self._account(sequence, cached, now)
        self.running.append(sequence)
        self.budgets.reserve(sequence, reserved)
        return True

    def _boundaries(self, sequence: Sequence, cached: int, reach: int) -> list[int]:
        if not self.options.prefix_caching:
            return []
        retention = sequence.request.retention or self.options.retention
        return retention.boundaries(
            unit=self.cache.options.unit, tokens=len(sequence.ids), cached=cached, reach=reach
        )

    def _account(self, sequence: Sequence, cached: int, now: float) -> None:
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = cached
            sequence.started = now
            self.counters.prompt_tokens += sequence.prompt_tokens
            self.counters.cached_tokens += cached
        self.counters.computed_tokens += len(sequence.ids) - cached
        self.waiting.charge(sequence, len(sequence.ids) - cached)

    def _memory_for(self, sequence: Sequence, hit: Hit | None, reserved: int, now: float) -> _Memory | None:
        """A private slot and the pages of the hit, the last one copied if it is not full. Takes over `hit`."""
        cached = hit.tokens if hit else 0
        partial = cached % self._page > 0
        missing = -(-len(sequence.ids) // self._page) - cached // self._page
        slot = self.cache.take_slot(now) if missing <= self.cache.pages.available else None
        page = self.cache.take_pages(1, now) if slot is not None and partial else []
        if slot is None or page is None:
            self.cache.slots.release([slot] if slot is not None else ())
            if hit is not None:
                self.cache.slots.release([hit.slot])
                self.cache.pages.release(hit.pages)
            return None
        table = list(hit.pages) if hit else []
        copy = (table[-1], page[0]) if page else (0, 0)
        return _Memory(hit, slot, copy, [*table[:-1], page[0]] if page else table)

    # Prefill.

    def _plan_prefill(
        self, now: float, budget: int, decode: dict[Sequence, DecodeRow]
    ) -> tuple[Shape | None, list[PrefillRow]]:
        waiting = sorted((s for s in self.running if s.phase is Phase.PREFILL), key=self.budgets.prefill_order)
        if not waiting:
            return None, []
        shape = self._choose_shape([s.to_prefill for s in waiting], budget)
        if shape is None:
            return None, []
        rows = []
        for sequence in waiting[: shape.rows]:
            # A row planned before may have pushed this one out.
            row = self._chunk(sequence, shape.tokens, now, decode) if sequence.phase is Phase.PREFILL else None
            if row is not None:
                rows.append(row)
        return shape, rows

    def _choose_shape(self, lengths: list[int], budget: int) -> Shape | None:
        """The shape with most useful tokens within the budget; the smaller one if several have them."""
        fitting = [shape for shape in self._shapes if shape.size <= budget]
        useful = {shape: sum(min(n, shape.tokens) for n in lengths[: shape.rows]) for shape in fitting}
        return max(fitting, key=lambda shape: (useful[shape], -shape.size)) if fitting else None

    def _chunk(
        self, sequence: Sequence, tokens: int, now: float, decode: dict[Sequence, DecodeRow]
    ) -> PrefillRow | None:
        start = sequence.length
        inside = [b for b in sequence.boundaries if b <= start + tokens]
        limit = inside[self.options.captures - 1] if len(inside) > self.options.captures else start + tokens
        end = min(limit, len(sequence.ids))
        if not self._grow(sequence, end, now, decode):
            return None
        captures = self._captures(sequence, end, now)
        final = end == len(sequence.ids)
        first = sequence.started_at(start)
        row = PrefillRow(
            sequence,
            sequence.row,
            sequence.slot,
            sequence.hit.slot if sequence.hit else sequence.slot,
            start,
            sequence.ids[start:end],
            final,
            first,
            sequence.copy,
            captures,
            sequence.pages,
        )
        self._dispatched(sequence, end, final)
        return row

    def _dispatched(self, sequence: Sequence, end: int, final: bool) -> None:
        self.budgets.prefilled(sequence, end - sequence.length)
        # The copy and the first read come before anything that could reuse their sources.
        self._let_go_of_hit(sequence)
        sequence.length = end
        sequence.in_flight += 1
        if final:
            sequence.phase = Phase.DECODE
            sequence.sampled += 1

    def _captures(self, sequence: Sequence, end: int, now: float) -> list[Capture]:
        """Slots for the boundaries up to `end`; a boundary without one is passed over."""
        captures = []
        while sequence.boundaries and sequence.boundaries[0] <= end:
            tokens = sequence.boundaries.pop(0)
            slot = self.cache.take_slot(now)
            if slot is None:
                self.counters.skipped_captures += 1
                continue
            table = sequence.pages[: -(-tokens // self._page)]
            self.cache.pages.retain(table)
            name = sequence.path.units[tokens // self.cache.options.unit - 1]
            captures.append(Capture(sequence, tokens, name, slot, table))
        self.capturing.extend(captures)
        return captures

    # Books.

    def held(self) -> tuple[list[int], list[int]]:
        """Every page and slot reference of running sequences and states on their way."""
        pages = [page for s in self.running for page in s.pages] + [page for c in self.capturing for page in c.table]
        slots = [s.slot for s in self.running] + [c.slot for c in self.capturing]
        for sequence in self.running:
            if sequence.hit is not None:
                slots.append(sequence.hit.slot)
                pages.extend([sequence.copy[0]] if sequence.copy[0] else ())
        return pages, slots

    def check_books(self) -> None:
        """Raises `BooksError` unless every reference of the pools has its owner."""
        self.cache.check_books(*self.held())
