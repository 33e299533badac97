"""Continuous batching: which rows decode, which chunks are prefilled, who comes in and who has to go.

The scheduler runs ahead of the device: lengths are known when a step is dispatched, tokens only when it is collected.
A preempted request gives back everything. What retention has kept of it stays in the prefix cache, and it resumes
there.
"""

import bisect
import dataclasses
from collections.abc import Callable

from serving.admission import CLASSES, Budgets, RequestClass, WaitingQueue
from serving.holdings import Holdings
from serving.plan import DecodeRow, Plan, PrefillRow, Shape
from serving.prefix_cache import PrefixCache
from serving.retention import Retention
from serving.sequence import Phase, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Sizes of a step and rules of admission."""

    rows: int = 64
    """Sequences that run at a time."""
    token_budget: int = 2048 + 64
    """Tokens of a step: one per decoding row, the rest for prefill."""
    shapes: tuple[Shape, ...] = (Shape(1, 128), Shape(4, 128), Shape(1, 512), Shape(1, 2048))
    captures: int = 2
    """States that a chunk can leave behind."""
    max_length: int = 32768
    """Positions of a sequence, prompt and output together."""
    max_waiting: int = 1024
    max_waiting_tokens: int = 16 * 2**20
    retention: Retention = dataclasses.field(default_factory=Retention)
    classes: tuple[RequestClass, ...] = CLASSES
    output_reserve: int | float = 0.25
    """Part of `max_tokens` that admission makes room for; the rest is paid by preemption if need be."""
    block: int = 1
    """Most tokens that a row can get in a step: one more than are drafted."""
    prefix_caching: bool = True
    model_id: str = ""

    def check(self, unit: int) -> None:
        """Raises `ValueError` for options that cannot work together."""
        self.retention.check(unit)
        if not self.shapes or self.rows < 1 or self.captures < 1:
            raise ValueError("a scheduler needs at least one row, one prefill shape and one capture per row")
        least = min(shape.size for shape in self.shapes) + (self.rows - 1) * self.block
        if self.token_budget < least:
            raise ValueError(
                f"token_budget is {self.token_budget}, expected at least {least}: "
                f"the smallest prefill shape beside {self.rows - 1} decoding rows of {self.block} tokens"
            )


Decoding = dict[Sequence, DecodeRow]
"""Rows of the step that is being planned."""


class Scheduler:
    """Decides one step at a time. Sequences enter by `waiting` and leave by `drop`."""

    def __init__(self, options: SchedulerOptions, cache: PrefixCache) -> None:
        options.check(cache.options.unit)
        self.options, self.cache, self.counters = options, cache, cache.counters
        self.holdings = Holdings(cache)
        self.waiting = WaitingQueue(options.max_waiting, options.max_waiting_tokens)
        self.budgets = Budgets(options.classes, cache.pages.capacity)
        self.running: list[Sequence] = []
        """In order of rank: the last one is the first to go."""
        self.prepare: Callable[[Sequence, float], bool] = lambda sequence, now: True
        """Asked before a sequence starts; False makes it wait."""
        self._rows = list(range(options.rows - 1, -1, -1))
        self._shapes = sorted(options.shapes, key=lambda shape: (shape.size, shape.tokens))

    def plan(self, now: int | float, stride: int | None = None) -> Plan | None:
        """The next step, or None when nothing can be done before a step in flight is collected.

        `stride`: tokens per decoding row; `block` when None.
        """
        decode = self._plan_decode(now, stride or self.options.block)
        self._admit(now, decode)
        shape, prefill = self._plan_prefill(now, decode)
        if not prefill and not decode:
            return None
        self.counters.steps += 1
        return Plan(prefill, shape, list(decode.values()))

    def drop(self, sequence: Sequence) -> None:
        """Takes everything from a sequence that runs or waits."""
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._rows.append(sequence.row)
        self.budgets.give_back(sequence)
        self.holdings.release(sequence)
        sequence.row, sequence.length, sequence.boundaries = -1, 0, []

    # Decode.

    @property
    def grammars_wait(self) -> bool:
        """Whether a row whose grammar follows drafts cannot go on before a step in flight is collected."""
        return self.options.block > 1 and any(s.looks_ahead and s.in_flight for s in self.running)

    def _plan_decode(self, now: int | float, stride: int) -> Decoding:
        rows: Decoding = {}
        page = self.cache.options.page_size
        # A copy: a row may push out later ones, which then do not want to decode any more.
        for sequence in self.running.copy():
            if not sequence.wants_decode:
                continue
            left = sequence.max_tokens - sequence.sampled
            tokens = stride if stride < left else left
            if sequence.followed and sequence.request.constraint is not None and not sequence.looks_ahead:
                tokens = 1
            start, held = sequence.length, len(sequence.pages) * page
            if start + tokens <= held or self._grow(sequence, start + tokens, now, rows):
                rows[sequence] = DecodeRow(sequence, sequence.row, sequence.slot, start, sequence.pages, tokens)
                sequence.length += tokens
                sequence.sampled += tokens
                sequence.in_flight += 1
        return rows

    def _grow(self, sequence: Sequence, length: int, now: int | float, decode: Decoding) -> bool:
        """Pages for `length` tokens. Pushes out less important sequences, and in the end a decoding one itself."""
        while not self.holdings.extend(sequence, length, now):
            victim = self.running[-1]
            if victim is sequence and sequence.phase is Phase.PREFILL:
                return False
            self._preempt(victim, decode)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence, decode: Decoding) -> None:
        """Takes everything from a sequence and puts it at the front of its line."""
        # A row of the very step that is being planned will not be dispatched.
        victim.in_flight -= decode.pop(victim, None) is not None
        self.drop(victim)
        victim.phase = Phase.WAITING
        victim.preemptions += 1
        self.waiting.push(victim, front=True)
        self.counters.preemptions += 1

    # Admission.

    def _admit(self, now: int | float, decode: Decoding) -> None:
        while (sequence := self._next(now, decode)) is not None:
            reserved = self._reservation(sequence)
            # Nobody passes a request for which memory is short, or it might wait for ever.
            if not self._start(sequence, now):
                return
            bisect.insort(self.running, sequence, key=lambda s: s.rank)
            self.budgets.reserve(sequence, reserved)

    def _next(self, now: int | float, decode: Decoding) -> Sequence | None:
        """The waiting sequence that comes in now, with a free row for it."""
        for sequence in self.waiting.heads() if len(self.waiting) else ():
            if sequence.in_flight or not self.budgets.admits(sequence.kind, self._reservation(sequence)):
                continue
            if not self._rows and not self._may_displace(sequence):
                return None
            sequence.path.extend(sequence.ids(len(sequence.path), sequence.known))
            if self.prepare(sequence, now) and not self._awaits_capture(sequence):
                # Last, since whoever is pushed out could otherwise come straight back in.
                if not self._rows:
                    self._preempt(self.running[-1], decode)
                return sequence
            self.counters.deferred += 1
        return None

    def _reservation(self, sequence: Sequence) -> int:
        rest = sequence.request.max_tokens - len(sequence.outputs)
        return self.holdings.pages_for(int(sequence.known + self.options.output_reserve * rest))

    def _may_displace(self, sequence: Sequence) -> bool:
        """Whether a sequence of a lower priority holds a row."""
        return self.running[-1].request.priority > sequence.request.priority

    def _awaits_capture(self, sequence: Sequence) -> bool:
        """Whether a state that the sequence could start from is on its way: then it waits for it.

        On its way are states of steps in flight, and those that prefills of no lower priority will leave.
        """
        if not self.options.prefix_caching or sequence.wants_prompt:
            return False
        limit, unit, units = sequence.known - 1, self.cache.options.unit, sequence.path.units
        coming = [
            capture.tokens
            for capture in self.holdings.capturing
            if capture.tokens <= limit and units[capture.tokens // unit - 1] == capture.name
        ]
        for other in self.running:
            if other.phase is Phase.PREFILL and other.request.priority <= sequence.request.priority:
                at = bisect.bisect_right(other.boundaries, limit)
                shared = (
                    b
                    for b in reversed(other.boundaries[:at])
                    if units[b // unit - 1] == other.path.units[b // unit - 1]
                )
                coming.append(next(shared, 0))
        furthest = max(coming, default=0)
        return furthest > 0 and furthest > self.cache.match(sequence.path, limit).tokens

    def _start(self, sequence: Sequence, now: int | float) -> bool:
        """Gives a waiting sequence its memory and its row; False when memory is short."""
        reach = 0
        hit = None
        if self.options.prefix_caching and not sequence.wants_prompt:
            match = self.cache.match(sequence.path, sequence.known - 1)
            hit, reach = self.cache.hold(match, now), match.reach
        if not self.holdings.begin(sequence, hit, now):
            # What the hit holds may be just what is missing.
            if hit is None or not self.holdings.begin(sequence, None, now):
                return False
            hit = None
        self.waiting.remove(sequence)
        sequence.phase, sequence.row, sequence.fresh = Phase.PREFILL, self._rows.pop(), True
        sequence.source, sequence.sampled = hit, len(sequence.outputs)
        sequence.prompt.clear()
        sequence.boundaries = self._boundaries(sequence, reach)
        self._account(sequence, now)
        return True

    def _boundaries(self, sequence: Sequence, reach: int) -> list[int]:
        if not self.options.prefix_caching:
            return []
        retention = sequence.request.retention or self.options.retention
        unit = self.cache.options.unit
        return retention.boundaries(unit=unit, tokens=sequence.known, cached=sequence.length, reach=reach)

    def _account(self, sequence: Sequence, now: int | float) -> None:
        if sequence.cached_tokens < 0:
            sequence.cached_tokens, sequence.started = sequence.length, now
            self.counters.prompt_tokens += sequence.prompt_tokens
            self.counters.cached_tokens += sequence.length
        self.counters.computed_tokens += sequence.to_prefill
        self.waiting.charge(sequence, sequence.to_prefill)

    # Prefill.

    def _plan_prefill(self, now: int | float, decode: Decoding) -> tuple[Shape | None, list[PrefillRow]]:
        ready = sorted((s for s in self.running if s.phase is Phase.PREFILL), key=self.budgets.prefill_order)
        budget = self.options.token_budget - len(decode) * self.options.block
        shape = self._choose_shape([s.to_prefill for s in ready], budget)
        if not ready or shape is None:
            return None, []
        chosen = {sequence: self._chunk_end(sequence, shape.tokens) for sequence in ready[: shape.rows]}
        # Pages first, by importance: a row that has been made must not lose its pages to a later one.
        grown = [s for s in sorted(chosen, key=lambda s: s.rank) if self._takes_part(s, chosen[s], now, decode)]
        rows = [self._chunk(sequence, end, now) for sequence, end in chosen.items() if sequence in grown]
        return shape, rows

    def _takes_part(self, sequence: Sequence, end: int, now: int | float, decode: Decoding) -> bool:
        return sequence.phase is Phase.PREFILL and self._grow(sequence, end, now, decode)

    def _choose_shape(self, lengths: list[int], budget: int) -> Shape | None:
        """The shape with most useful tokens within the budget; the smaller one if several have them."""
        useful = {
            shape: sum(min(length, shape.tokens) for length in lengths[: shape.rows])
            for shape in self._shapes
            if shape.size <= budget
        }
        return max(useful, key=lambda shape: (useful[shape], -shape.size)) if useful else None

    def _chunk_end(self, sequence: Sequence, tokens: int) -> int:
        """Where the next chunk ends: at most so far that it has no more boundaries than it can capture."""
        end = min(sequence.length + tokens, sequence.known)
        inside = [boundary for boundary in sequence.boundaries if boundary <= end]
        return inside[self.options.captures - 1] if len(inside) > self.options.captures else end

    def _chunk(self, sequence: Sequence, end: int, now: int | float) -> PrefillRow:
        start, final = sequence.length, end == sequence.known
        row = PrefillRow(
            sequence=sequence,
            row=sequence.row,
            slot=sequence.slot,
            source=sequence.hit.slot if sequence.hit else sequence.slot,
            start=start,
            ids=sequence.ids(start, end),
            final=final,
            first=sequence.fresh,
            copy=sequence.copy,
            captures=self.holdings.capture(sequence, end, now),
            table=sequence.pages,
        )
        self.holdings.let_go_of_hit(sequence)
        self.budgets.prefilled(sequence, end - start)
        sequence.length, sequence.fresh = end, False
        sequence.in_flight += 1
        if final:
            sequence.phase = Phase.DECODE
            sequence.sampled += 1
        return row
