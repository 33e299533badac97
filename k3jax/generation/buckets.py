"""Static shapes: prompts of any length run through a handful of compiled programs.

A prompt is cut into chunks of a few fixed sizes, the last one padded; its pages are counted in powers of
four, later of two; a batch grows to a power of two by padding rows.
"""

from collections.abc import Iterator
from typing import NamedTuple

CHUNKS = (64, 256, 2048)
"""Tokens per prefill call."""

PAGE_SIZE = 64
"""Tokens per page of the latent cache."""

NARROWEST = 16
"""Pages of the smallest page table."""

WIDEST_STEP = 256
"""Page tables up to this width grow by four, wider ones by two: padding costs memory there."""


class Chunk(NamedTuple):
    """Tokens `start` to `start + size` of a prompt; the last chunk may reach past the end."""

    start: int
    size: int


def chunks(length: int) -> Iterator[Chunk]:
    """Covers `length` tokens; a chunk is padded only when more than half of it is used."""
    start = 0
    while start < length:
        size = chunk_size(length - start)
        yield Chunk(start, size)
        start += size


def chunk_size(remaining: int) -> int:
    """Size of the next chunk when `remaining` tokens are left."""
    smaller = CHUNKS[0]
    for size in CHUNKS:
        if size >= remaining:
            return size if 2 * remaining > size else smaller
        smaller = size
    return smaller


def table_width(tokens: int, longest: int) -> int:
    """Pages in a row's table that holds `tokens`; not wider than `longest` tokens, the most there can be, need."""
    needed, most = -(-tokens // PAGE_SIZE), -(-longest // PAGE_SIZE)
    width = NARROWEST
    while width < needed:
        width *= 4 if width < WIDEST_STEP else 2
    return min(width, most)


def power_of_two(count: int, least: int = 1) -> int:
    """The smallest power of two that is at least `count` and `least`."""
    return 1 << (max(count, least) - 1).bit_length()
