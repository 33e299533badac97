"""Where a text ends: stop strings, found across the borders of pieces."""

from collections.abc import Sequence
from typing import NamedTuple


class Cut(NamedTuple):
    """What may be shown of a growing text, and whether a stop string ended it."""

    text: str
    stopped: bool


class StopStrings:
    """Passes text on, but never a stop string or what may still become one.

    The pieces that come out, joined, are the text up to the first stop string. Of several that could match,
    the one that is complete first wins, and among those the one that begins first.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty, expected at least one character")
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Cut:
        """Takes the next piece of the text and gives what can no longer be part of a stop string."""
        if not self._stops:
            return Cut(text, False)
        self._held += text
        match = self._first_match()
        if match is not None:
            shown, self._held = self._held[:match], ""
            return Cut(shown, True)
        safe = len(self._held) - self._open_suffix()
        shown, self._held = self._held[:safe], self._held[safe:]
        return Cut(shown, False)

    def finish(self) -> str:
        """What was held back when the text ends otherwise."""
        shown, self._held = self._held, ""
        return shown

    def _first_match(self) -> int | None:
        """Where the stop string begins that is complete first."""
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _open_suffix(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        return max(map(self._overlap, self._stops))

    def _overlap(self, stop: str) -> int:
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
