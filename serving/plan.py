"""One step of the engine: what the scheduler decides, and what the device answers."""

import dataclasses
from collections.abc import Sequence as Listing
from typing import NamedTuple

from serving.hashing import Digest
from serving.request import Alternatives
from serving.sequence import Sequence


class Shape(NamedTuple):
    """Static shape of a prefill program."""

    rows: int
    tokens: int
    """Tokens per row."""

    @property
    def size(self) -> int:
        """Tokens that the program computes, padding included."""
        return self.rows * self.tokens


@dataclasses.dataclass(eq=False, slots=True)
class Capture:
    """A state on its way into the prefix cache. It has references of its own: its request may end before it arrives."""

    sequence: Sequence
    tokens: int
    """Length of the prefix."""
    name: Digest
    slot: int
    table: list[int]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PrefillRow:
    """A chunk of one sequence."""

    sequence: Sequence
    row: int
    slot: int
    source: int
    """Slot to start from: a cached one for the first chunk after a hit, otherwise the own one."""
    start: int
    ids: Listing[int]
    final: bool
    """Whether a token is sampled after the chunk."""
    first: bool
    """Whether the row is new: its sampling settings have to be set."""
    copy: tuple[int, int]
    captures: list[Capture]
    table: list[int]


class DecodeRow(NamedTuple):
    """The next tokens of one sequence: up to `tokens` of them where drafts may be accepted."""

    sequence: Sequence
    row: int
    slot: int
    length: int
    """Tokens in the cache before the step; at most so many while steps with drafts are in flight."""
    table: list[int]
    tokens: int = 1


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """A step: at most one prefill program, then at most one decode program."""

    prefill: list[PrefillRow]
    shape: Shape | None
    decode: list[DecodeRow]


class RowResult(NamedTuple):
    """What came out of a row."""

    tokens: list[int]
    """Empty for a chunk that is not final, and for a row that the device had retired."""
    logprobs: list[float]
    finite: bool
    """False when the logits held a NaN or an infinity."""
    top: list[Alternatives] | None = None
    """Alternatives of each token, where the request wants them."""
    prompt: list[tuple[float, Alternatives]] | None = None
    """How likely each token after the chunk's first one was, where the request wants to know."""


class StepResult(NamedTuple):
    """Answers in the order of the plan's rows."""

    prefill: list[RowResult]
    captures: list[list[bool]]
    """For each prefill row and capture, whether the state is finite."""
    decode: list[RowResult]
