"""The device side of the engine: turns plans into program calls, and their answers into results."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from k3jax.generation.compilations import Compilations
from k3jax.runtime import Model
from k3jax.sampling import History, Sampling
from k3jax.speculation.drafters import DSparkDrafter
from serving import device, upload
from serving.plan import DecodeRow, Plan, PrefillRow, RowResult, Shape, StepResult
from serving.prefix_cache import CacheOptions
from serving.prefix_file import Prefix

TRANSFER_PAGES = 16
"""Pages per call when a prefix moves between device and host."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """Static shapes of the programs."""

    rows: int
    shapes: tuple[Shape, ...]
    captures: int
    widths: tuple[int, ...]
    """Page-table widths; the longest sequence must fit the last one."""
    stops: int = 8
    """Stop ids of a row."""

    @classmethod
    def of(
        cls, *, rows: int, shapes: tuple[Shape, ...], captures: int, max_length: int, page_size: int
    ) -> "RunnerOptions":
        """Table widths that grow by four up to `max_length` tokens."""
        most = -(-max_length // page_size)
        widths = [min(16, most)]
        while widths[-1] < most:
            widths.append(min(widths[-1] * 4, most))
        return cls(rows=rows, shapes=shapes, captures=captures, widths=tuple(widths))


class Ticket(NamedTuple):
    """Answers on their way to the host."""

    plan: Plan
    prefill: jax.Array | None
    decode: jax.Array | None


def drafter_of(model: Model) -> DSparkDrafter | None:
    """The model's draft. Raises `NotImplementedError` for drafters that know nothing of a cached prefix."""
    drafter = None if model.draft is None else model.draft.drafter
    if drafter is not None and not isinstance(drafter, DSparkDrafter):
        raise NotImplementedError(
            f"drafting with {type(drafter).__name__} is not served: its context is not on pages, so a cached prefix "
            "would be unknown to it; use a DSpark draft or none"
        )
    return drafter


def tokens_per_step(model: Model) -> int:
    """Most tokens that a row gets in a step."""
    drafter = drafter_of(model)
    return 1 if drafter is None else drafter.config.block_size + 1


class JaxRunner:
    """Owns the device state. Steps run in the order of dispatch; after `warm_up` nothing is compiled any more."""

    def __init__(self, model: Model, cache: CacheOptions, options: RunnerOptions) -> None:
        if any(shape.tokens < 2 for shape in options.shapes):
            raise ValueError("a prefill shape has one token per row, expected at least 2: one token is a decode step")
        self.model, self.options, self.cache_options = model, options, cache
        self._drafter = drafter_of(model)
        self.state = self.new_state()
        self._tables = upload.DecodeTables(options.rows, options.widths[-1])
        self.compile_seconds = 0.0
        self._watch = Compilations()
        self._warm = False

    def new_state(self) -> device.DeviceState:
        """Empty pools and rows."""
        model, rows = self.model, self.options.rows
        sizes = self.cache_options
        small = {
            "token": np.zeros(rows, np.int32),
            "alive": np.zeros(rows, bool),
            "params": Sampling.of(rows),
            "history": History.of([[]] * rows, model.config.vocab_size),
            "stop_ids": np.full((rows, self.options.stops), -1, np.int32),
            "length": np.zeros(rows, np.int32),
            "remaining": np.zeros(rows, np.int32),
            "context": (),
        }
        if self._drafter is not None:
            small["context"] = self._drafter.create(pages=sizes.pages, page_size=sizes.page_size, dtype=model.dtype)
        cache = model.new_cache(sizes.slots - 1, sizes.pages - 1, sizes.page_size)
        return device.DeviceState(cache=cache, **model.place(small))

    @property
    def compilations(self) -> int:
        """Programs that JAX compiled since `warm_up`, in the whole process."""
        return self._watch.count if self._warm else 0

    def warm_up(self, report: Callable[[str, float], None] = lambda name, seconds: None) -> None:
        """Compiles every program by running it on padding; `report` gets each one's name and seconds."""
        for width in self.options.widths:
            for shape in self.options.shapes:
                name = f"prefill {shape.rows} x {shape.tokens}, {width} pages"
                self._timed(report, name, lambda shape=shape, width=width: self._prefill([], shape, width))
            self._timed(
                report, f"decode {self.options.rows}, {width} pages", lambda width=width: self._decode([], width)
            )
        self._timed(report, "remember", lambda: self._remember(0, np.zeros(self.model.config.vocab_size, np.int32)))
        self._timed(report, "move prefixes", self._warm_up_transfer)
        self._watch.__enter__()
        self._warm = True

    def _timed(self, report: Callable[[str, float], None], name: str, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        jax.block_until_ready(self.state)
        self.compile_seconds += time.perf_counter() - start
        report(name, time.perf_counter() - start)

    def close(self) -> None:
        """Stops counting compilations."""
        if self._warm:
            self._watch.__exit__(None, None, None)
            self._warm = False

    # Steps.

    def dispatch(self, plan: Plan) -> Ticket:
        """Enqueues the programs of a step and the transfer of their answers."""
        prefill = decode = None
        if plan.prefill:
            assert plan.shape is not None
            for row in plan.prefill:
                if row.first and upload.has_penalties(row.sequence.request):
                    self._remember(row.row, upload.history_words(row, self.model.config.vocab_size))
            width = self._width(max(len(row.table) for row in plan.prefill))
            prefill = self._prefill(plan.prefill, plan.shape, width)
        if plan.decode:
            decode = self._decode(plan.decode, self._width(max(len(row.table) for row in plan.decode)))
        for answer in (prefill, decode):
            if answer is not None:
                answer.copy_to_host_async()
        return Ticket(plan, prefill, decode)

    def _width(self, pages: int) -> int:
        return next(width for width in self.options.widths if width >= pages)

    def _prefill(self, rows: Sequence[PrefillRow], shape: Shape, width: int) -> jax.Array:
        layout = device.Layout(shape.rows, shape.tokens, width, self.options.captures, self.options.stops)
        packed = self.model.place(upload.prefill(rows, layout))
        draft = () if self.model.draft is None else self.model.draft.leaves
        args = (self.model.graph, self.model.leaves, self.state, packed, draft)
        self.state, answer = device.prefill(*args, layout=layout, drafter=self._drafter)
        return answer

    def _decode(self, rows: Sequence[DecodeRow], width: int) -> jax.Array:
        packed = self.model.place(self._tables.pack(rows, width))
        args = (self.model.graph, self.model.leaves, self.state, packed)
        draft = self.model.draft
        if draft is None:
            self.state, answer = device.decode(*args)
        else:
            self.state, answer = device.speculate(*args, draft.leaves, drafter=self._drafter, rule=draft.rule)
        return answer

    def _remember(self, row: int, words: np.ndarray) -> None:
        self.state = device.remember(self.state, *self.model.place((np.asarray(row, np.int32), words)))

    def collect(self, ticket: Ticket) -> StepResult:
        """Waits for a step's answers."""
        prefill = _Answers(ticket.prefill)
        decode = (
            _Answers(ticket.decode) if self._drafter is None else _Blocks(ticket.decode, tokens_per_step(self.model))
        )
        return StepResult(
            [prefill.row(n) for n in range(len(ticket.plan.prefill))],
            [prefill.captures(n, len(row.captures)) for n, row in enumerate(ticket.plan.prefill)],
            [decode.row(row.row) for row in ticket.plan.decode],
        )

    # Prefixes that leave the device and come back.

    def read(self, pages: list[int], slot: int) -> "Reading":
        """Starts to copy a prefix to the host. The copy sees the device as it is after the steps dispatched so far."""
        pieces = []
        for start in range(0, max(len(pages), 1), TRANSFER_PAGES):
            chunk = pages[start : start + TRANSFER_PAGES]
            pieces.append(device.read_prefix(self.state.cache, self.state.context, *self._places(chunk, slot)))
        for piece in pieces:
            jax.tree.map(lambda array: array.copy_to_host_async(), piece)
        return Reading(pieces, len(pages))

    def write(self, prefix: Prefix, pages: list[int], slot: int) -> None:
        """Stores a prefix into pages and a slot; steps dispatched later see it."""
        for start in range(0, max(len(pages), 1), TRANSFER_PAGES):
            chunk = pages[start : start + TRANSFER_PAGES]
            piece = self.model.place(prefix.piece(start, TRANSFER_PAGES))
            self.state = device.write_prefix(self.state, piece, *self._places(chunk, slot))

    def _places(self, pages: list[int], slot: int) -> tuple[jax.Array, jax.Array]:
        padded = np.zeros(TRANSFER_PAGES, np.int32)
        padded[: len(pages)] = pages
        return self.model.place((padded, np.asarray(slot, np.int32)))

    def _warm_up_transfer(self) -> None:
        self.write(self.read([0], 0).finish(), [0], 0)


class Reading:
    """A prefix on its way to the host."""

    def __init__(self, pieces: list[device.Piece], pages: int) -> None:
        self._pieces, self._pages = pieces, pages

    def finish(self) -> Prefix:
        """Waits for it."""
        return Prefix.join([jax.tree.map(np.asarray, piece) for piece in self._pieces], self._pages)


class _Answers:
    """An answer of `device.Answer.pack` as Python numbers, converted at once: row by row costs ten times as much."""

    def __init__(self, packed: jax.Array | None) -> None:
        host = np.zeros((0, 4), np.int32) if packed is None else np.asarray(packed)
        self._numbers: list[list[int]] = host.tolist()
        self._logprobs: list[float] = np.ascontiguousarray(host[:, 1]).view(np.float32).tolist()

    def row(self, index: int) -> RowResult:
        """The token of a row, if it has one."""
        token, _, valid, finite = self._numbers[index][:4]
        return RowResult([token], [self._logprobs[index]], finite != 0) if valid else RowResult([], [], finite != 0)

    def captures(self, index: int, count: int) -> list[bool]:
        """Whether the first `count` captured states of a row are finite."""
        return [finite != 0 for finite in self._numbers[index][4 : 4 + count]]


class _Blocks:
    """An answer of `device.speculate` as Python numbers."""

    def __init__(self, packed: jax.Array | None, width: int) -> None:
        host = np.zeros((0, 2 + 2 * width), np.int32) if packed is None else np.asarray(packed)
        self._flags: list[list[int]] = host[:, :2].tolist()
        self._tokens: list[list[int]] = host[:, 2 : 2 + width].tolist()
        self._logprobs: list[list[float]] = np.ascontiguousarray(host[:, 2 + width :]).view(np.float32).tolist()

    def row(self, index: int) -> RowResult:
        """The tokens of a row."""
        count, finite = self._flags[index]
        return RowResult(self._tokens[index][:count], self._logprobs[index][:count], finite != 0)
