"""What the host sends for a step: one int32 array per program."""

from collections.abc import Sequence

import numpy as np

from serving.device import SETTINGS, Layout, PrefillInput
from serving.plan import DecodeRow, PrefillRow
from serving.request import Request

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
        scalars = (row.row, row.slot, row.source, row.start, len(row.ids), row.final, *row.copy, left)
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
    return [*request.stop_ids, *[-1] * (width - len(request.stop_ids))]


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
