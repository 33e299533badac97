"""What the host sends for a step: one int32 array per program."""

from collections.abc import Sequence

import numpy as np

from serving import following
from serving.device import BIASED, CONSTRAINED, PROMPT, SETTINGS, TOP, Layout, PrefillInput
from serving.plan import DecodeRow, PrefillRow
from serving.request import Request
from serving.sequence import Sequence as Running

NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Penalties that change nothing."""

DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0} | NEUTRAL
_INTEGERS = {"top_k": np.int32, "seed": np.uint32}


def has_penalties(request: Request) -> bool:
    """Whether what has been said changes what is said next."""
    return any(request.sampling.get(name, neutral) != neutral for name, neutral in NEUTRAL.items())


def history_words(row: PrefillRow, vocab_size: int) -> np.ndarray:
    """int32 [V]: twice the occurrences in the output, plus 1 for tokens of the prompt."""
    words = np.zeros(vocab_size, np.int32)
    if row.sequence.outputs:
        words += 2 * np.bincount(row.sequence.outputs, minlength=vocab_size).astype(np.int32)
    words[np.unique(np.asarray(row.sequence.request.tokens))] += 1
    return words


def settings(request: Request) -> list[int]:
    """Bits of the sampling settings in the order of `SETTINGS`."""

    def bits(name: str) -> int:
        value = request.sampling.get(name, DEFAULTS[name])
        return int(np.asarray(value, _INTEGERS.get(name, np.float32)).view(np.int32))

    return [bits(name) for name in SETTINGS]


def prefill(rows: Sequence[PrefillRow], layout: Layout) -> np.ndarray:
    """int32 [R, C] in the columns of `PrefillInput`; the rest of the rows is padding."""
    widths = PrefillInput.widths(layout)
    packed = np.zeros((layout.rows, sum(widths)), np.int32)
    ends = np.cumsum(widths)
    for numbers, row in zip(packed, rows):
        left = row.sequence.request.max_tokens - len(row.sequence.outputs)
        scalars = (row.row, row.slot, row.source, row.start, len(row.ids), row.final, *row.copy, left, *_wishes(row))
        numbers[: len(scalars)] = scalars
        fields = (
            settings(row.sequence.request),
            [capture.tokens - row.start for capture in row.captures],
            [capture.slot for capture in row.captures],
            _stops(row.sequence.request, layout.stops),
            row.table,
            row.ids,
        )
        for end, width, values in zip(ends[len(scalars) :], widths[len(scalars) :], fields, strict=True):
            numbers[end - width : end - width + len(values)] = values
    return packed


def _stops(request: Request, width: int) -> list[int]:
    stops = request.stops
    return [*stops, *[-1] * (width - len(stops))]


def _wishes(row: PrefillRow) -> tuple[int, int, int]:
    """`min_length`, `wants` and `following` of a chunk."""
    sequence, request = row.sequence, row.sequence.request
    end = row.start + len(row.ids)
    wants = (
        (BIASED if request.logit_bias else 0)
        | (CONSTRAINED if request.constraint is not None else 0)
        | (TOP if request.logprobs else 0)
        | (PROMPT if sequence.wants_prompt else 0)
    )
    following = sequence.ids(end, end + 1) if sequence.wants_prompt else None
    return (sequence.prompt_tokens + request.min_tokens if request.min_tokens else 0), wants, (following or [0])[0]


def bias(row: int, request: Request, width: int) -> np.ndarray:
    """int32 [1 + 2 K]: the columns of `device.set_bias`."""
    packed = np.zeros(1 + 2 * width, np.int32)
    packed[0], packed[1 : 1 + width] = row, -1
    count = len(request.logit_bias)
    packed[1 : 1 + count] = list(request.logit_bias)
    values = np.asarray(list(request.logit_bias.values()), np.float32)
    packed[1 + width : 1 + width + count] = values.view(np.int32)
    return packed


def masks(sequences: Sequence[Running], group: int, batch: int, words: int) -> np.ndarray:
    """int32 [group, 1 + W]: the columns of `device.set_masks`."""
    packed = np.full((group, 1 + words), -1, np.int32)
    packed[:, 0] = batch
    for numbers, sequence in zip(packed, sequences, strict=False):
        numbers[0] = sequence.row
        if sequence.mask is not None:
            numbers[1:] = sequence.mask
    return packed


def forced(rows: Sequence[DecodeRow], batch: int, drafts: int) -> np.ndarray:
    """int32 [batch, drafts]: what the grammar of each row leaves no choice about, filled with -1."""
    packed = np.full((batch, drafts), -1, np.int32)
    for row in rows:
        tokens = following.forced(row.sequence, drafts)
        packed[row.row, : len(tokens)] = tokens
    return packed


def block_masks(rows: Sequence[DecodeRow], drafts: np.ndarray, group: int, words: int) -> np.ndarray:
    """int32 [group, 2 + W * words]: the columns of `ruled_step.set_block_masks`, along int32 [B, G] `drafts`."""
    batch, count = drafts.shape
    packed = np.full((group, 2 + (count + 1) * words), -1, np.int32)
    packed[:, 0] = batch
    for numbers, row in zip(packed, rows, strict=False):
        masks, limit = following.look_ahead(row.sequence, drafts[row.row].tolist(), words)
        numbers[0], numbers[1], numbers[2:] = row.row, limit, masks.ravel()
    return packed


class DecodeTables:
    """The decode upload, kept from step to step: only what has changed is written again."""

    def __init__(self, batch: int, width: int) -> None:
        self._numbers = np.zeros((batch, 3 + width), np.int32)
        self._tables: list[list[int] | None] = [None] * batch
        self._filled = [0] * batch

    def pack(self, rows: Sequence[DecodeRow], width: int) -> np.ndarray:
        """int32 [B, 3 + P]: active, slot, length, page table of every row of the batch."""
        index = [row.row for row in rows]
        self._numbers[:, :3] = 0
        if rows:
            self._numbers[index, :3] = [(1, row.slot, row.length) for row in rows]
        for row in rows:
            if self._tables[row.row] is not row.table or self._filled[row.row] != len(row.table):
                self._write(row.row, row.table)
        # A copy: the transfer may still read it while the next step is packed.
        return self._numbers[:, : 3 + width].copy()

    def _write(self, row: int, table: list[int]) -> None:
        """A table that is still the same list has only grown."""
        start = self._filled[row] if self._tables[row] is table else 0
        self._numbers[row, 3 + start : 3 + len(table)] = table[start:]
        self._numbers[row, 3 + len(table) :] = 0
        self._tables[row], self._filled[row] = table, len(table)
