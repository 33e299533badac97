"""The device side of the engine: turns plans into program calls, and their answers into results."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from k3jax import capacity
from k3jax.generation.compilations import Compilations
from k3jax.logit_rules import LogitRules, mask_words
from k3jax.runtime import Model
from k3jax.sampling import History, Sampling
from k3jax.speculation.drafters import DSparkDrafter, NgramDrafter
from serving import answers, device, transfer, upload
from serving.grammar_step import GrammarStep
from serving.plan import DecodeRow, Plan, PrefillRow, Shape, StepResult
from serving.prefix_cache import CacheOptions
from serving.prefix_file import Prefix
from serving.sequence import Sequence as Running
from serving.warm_up import Call, compile_all

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
    biases: int = capacity.ROW_BIASES
    """Logit biases of a row."""
    top: int = 20
    """Alternatives that a request may ask for."""
    mask_group: int = 8
    """Masks that are sent at a time."""

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
    prefill: device.Prefilled | None
    decode: device.Decoded | None


def drafter_of(model: Model) -> device.Drafter | None:
    """The model's draft. Raises `NotImplementedError` for drafters that cannot be told of a cached prefix."""
    drafter = None if model.draft is None else model.draft.drafter
    if drafter is not None and not isinstance(drafter, DSparkDrafter | NgramDrafter):
        raise NotImplementedError(
            f"drafting with {type(drafter).__name__} is not served: its context is neither on pages nor a text, so a "
            "cached prefix would be unknown to it; use a DSpark draft, prompt lookup or none"
        )
    return drafter


def tokens_per_step(model: Model) -> int:
    """Most tokens that a row gets in a step."""
    drafter = drafter_of(model)
    if drafter is None:
        return 1
    return 1 + (drafter.block_size if isinstance(drafter, NgramDrafter) else drafter.config.block_size)


class JaxRunner:
    """Owns the device state. Steps run in the order of dispatch; after `warm_up` nothing is compiled any more."""

    def __init__(self, model: Model, cache: CacheOptions, options: RunnerOptions) -> None:
        if any(shape.tokens < 2 for shape in options.shapes):
            raise ValueError("a prefill shape has one token per row, expected at least 2: one token is a decode step")
        self.model, self.options, self.cache_options = model, options, cache
        self._drafter = drafter_of(model)
        self.state = self.new_state()
        self._tables = upload.DecodeTables(options.rows, options.widths[-1])
        self._grammar_step = None
        if model.draft is not None:
            block = tokens_per_step(model) - 1
            self._grammar_step = GrammarStep(model, model.draft, options.rows, block, options.mask_group, self.top)
        self._watch = Compilations()
        self._warm = False

    def new_state(self) -> device.DeviceState:
        """Empty pools and rows."""
        model, rows = self.model, self.options.rows
        sizes, vocab = self.cache_options, self.model.config.vocab_size
        small = {
            "token": np.zeros(rows, np.int32),
            "alive": np.zeros(rows, bool),
            "params": Sampling.of(rows),
            "history": History.of([[]] * rows, vocab),
            "stop_ids": np.full((rows, self.options.stops), -1, np.int32),
            "rules": LogitRules.none(rows, vocab, self.options.biases),
            "wants_top": np.zeros(rows, bool),
            "length": np.zeros(rows, np.int32),
            "remaining": np.zeros(rows, np.int32),
            "context": (),
        }
        if isinstance(self._drafter, NgramDrafter):
            small["text"] = self._drafter.create(rows, self._longest)
        if isinstance(self._drafter, DSparkDrafter):
            small["context"] = self._drafter.create(pages=sizes.pages, page_size=sizes.page_size, dtype=model.dtype)
        cache = model.new_cache(sizes.slots - 1, sizes.pages - 1, sizes.page_size)
        return device.DeviceState(cache=cache, **model.place(small))

    @property
    def _longest(self) -> int:
        """Tokens that the widest page table holds."""
        return self.options.widths[-1] * self.cache_options.page_size

    @property
    def top(self) -> int:
        """Alternatives that the programs give."""
        return min(self.options.top, self.model.config.vocab_size)

    @property
    def compilations(self) -> int:
        """Programs that JAX compiled since `warm_up`, in the whole process."""
        return self._watch.count if self._warm else 0

    def warm_up(self, report: Callable[[str, float], None] = lambda name, seconds: None) -> None:
        """Compiles every program and runs it once on padding; `report` gets each one's name and seconds."""
        compile_all(dict(self._steps_on_padding()), report)
        for _, call in self._steps_on_padding():
            self._run(call)
        if (step := self._grammar_step) is not None:
            for width in self.options.widths:
                name = f"decode {self.options.rows} under grammars, {width} pages"
                self._timed(report, name, lambda width=width, step=step: self._decode_ruled([], width, step))
        self._timed(report, "settings of a row", self._warm_up_settings)
        self._timed(report, "move prefixes", self._warm_up_transfer)
        self._watch.__enter__()
        self._warm = True

    def _steps_on_padding(self) -> Iterator[tuple[str, Call]]:
        """Every kind of step on the state as it is then, by name."""
        for width in self.options.widths:
            for shape in self.options.shapes:
                yield f"prefill {shape.rows} x {shape.tokens}, {width} pages", self._prefill([], shape, width)
            yield f"decode {self.options.rows}, {width} pages", self._decode([], width)

    def _run(self, call: Call) -> Any:
        """Enqueues a program that gives the state after it and an answer; returns the answer."""
        self.state, answer = call.run()
        return answer

    def _timed(self, report: Callable[[str, float], None], name: str, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        jax.block_until_ready(self.state)
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
                if row.first:
                    self._introduce(row)
            self._send_masks([row.sequence for row in plan.prefill if row.final])
            width = self._width(max(len(row.table) for row in plan.prefill))
            prefill = self._run(self._prefill(plan.prefill, plan.shape, width))
        if plan.decode:
            width = self._width(max(len(row.table) for row in plan.decode))
            if self._grammar_step is not None and any(row.sequence.looks_ahead for row in plan.decode):
                decode = self._decode_ruled(plan.decode, width, self._grammar_step)
            else:
                self._send_masks([row.sequence for row in plan.decode])
                decode = self._run(self._decode(plan.decode, width))
        for array in answers.wanted(plan, prefill, decode):
            array.copy_to_host_async()
        return Ticket(plan, prefill, decode)

    def _introduce(self, row: PrefillRow) -> None:
        """What a new row needs on the device and most requests do without."""
        request = row.sequence.request
        if upload.has_penalties(request):
            self._remember(row.row, upload.history_words(row, self.model.config.vocab_size))
        if request.logit_bias:
            packed = upload.bias(row.row, request, self.options.biases)
            self.state = device.set_bias(self.state, self.model.place(packed))
        if isinstance(self._drafter, NgramDrafter) and row.start:
            self._set_text(row.row, row.sequence.ids(0, row.start))

    def _set_text(self, row: int, known: list[int]) -> None:
        ids = np.full(self._longest, -1, np.int32)
        ids[: len(known)] = known
        self.state = device.set_text(self.state, *self.model.place((np.asarray(row, np.int32), ids)))

    def _send_masks(self, sequences: list[Running]) -> None:
        ruled = [s for s in sequences if s.request.constraint is not None]
        group, words = self.options.mask_group, mask_words(self.model.config.vocab_size)
        for start in range(0, len(ruled), group):
            packed = upload.masks(ruled[start : start + group], group, self.options.rows, words)
            self.state = device.set_masks(self.state, self.model.place(packed))

    def _width(self, pages: int) -> int:
        return next(width for width in self.options.widths if width >= pages)

    def _prefill(self, rows: Sequence[PrefillRow], shape: Shape, width: int) -> Call:
        layout = device.Layout(shape.rows, shape.tokens, width, self.options.captures, self.options.stops, self.top)
        packed = self.model.place(upload.prefill(rows, layout))
        draft = () if self.model.draft is None else self.model.draft.leaves
        args = (self.model.graph, self.model.leaves, self.state, packed, draft)
        return Call(device.prefill, args, {"layout": layout, "drafter": self._drafter})

    def _decode(self, rows: Sequence[DecodeRow], width: int) -> Call:
        packed = self.model.place(self._tables.pack(rows, width))
        args = (self.model.graph, self.model.leaves, self.state, packed)
        draft = self.model.draft
        if draft is None:
            return Call(device.decode, args, {"top": self.top})
        drafting = {"drafter": self._drafter, "rule": draft.rule, "widths": draft.widths, "top": self.top}
        return Call(device.speculate, (*args, draft.leaves), drafting)

    def _decode_ruled(self, rows: Sequence[DecodeRow], width: int, step: GrammarStep) -> device.Decoded:
        self.state, answer = step.run(self.state, self.model.place(self._tables.pack(rows, width)), rows)
        return answer

    def _remember(self, row: int, words: np.ndarray) -> None:
        self.state = device.remember(self.state, *self.model.place((np.asarray(row, np.int32), words)))

    def collect(self, ticket: Ticket) -> StepResult:
        """Waits for a step's answers."""
        blocks = self._drafter is not None
        return answers.read(ticket.plan, ticket.prefill, ticket.decode, blocks=blocks, top=self.top)

    # Prefixes that leave the device and come back.

    def read(self, pages: list[int], slot: int) -> "Reading":
        """Starts to copy a prefix to the host. The copy sees the device as it is after the steps dispatched so far."""
        pieces = []
        for start in range(0, max(len(pages), 1), TRANSFER_PAGES):
            chunk = pages[start : start + TRANSFER_PAGES]
            pieces.append(transfer.read_prefix(self.state.cache, self.state.context, *self._places(chunk, slot)))
        for piece in pieces:
            jax.tree.map(lambda array: array.copy_to_host_async(), piece)
        return Reading(pieces, len(pages))

    def write(self, prefix: Prefix, pages: list[int], slot: int) -> None:
        """Stores a prefix into pages and a slot; steps dispatched later see it."""
        for start in range(0, max(len(pages), 1), TRANSFER_PAGES):
            chunk = pages[start : start + TRANSFER_PAGES]
            piece = self.model.place(prefix.piece(start, TRANSFER_PAGES))
            self.state = transfer.write_prefix(self.state, piece, *self._places(chunk, slot))

    def _places(self, pages: list[int], slot: int) -> tuple[jax.Array, jax.Array]:
        padded = np.zeros(TRANSFER_PAGES, np.int32)
        padded[: len(pages)] = pages
        return self.model.place((padded, np.asarray(slot, np.int32)))

    def _warm_up_settings(self) -> None:
        vocab, rows = self.model.config.vocab_size, self.options.rows
        self._remember(0, np.zeros(vocab, np.int32))
        none = np.zeros(1 + 2 * self.options.biases, np.int32)
        self.state = device.set_bias(self.state, self.model.place(none))
        masks = upload.masks([], self.options.mask_group, rows, mask_words(vocab))
        self.state = device.set_masks(self.state, self.model.place(masks))
        if isinstance(self._drafter, NgramDrafter):
            self._set_text(0, [])

    def _warm_up_transfer(self) -> None:
        self.write(self.read([0], 0).finish(), [0], 0)


class Reading:
    """A prefix on its way to the host."""

    def __init__(self, pieces: list[transfer.Piece], pages: int) -> None:
        self._pieces, self._pages = pieces, pages

    def finish(self) -> Prefix:
        """Waits for it."""
        return Prefix.join([jax.tree.map(np.asarray, piece) for piece in self._pieces], self._pages)
