"""A progress line on a terminal, nothing elsewhere."""

import sys
import time
from typing import Protocol, runtime_checkable

PERIOD = 0.1
"""Seconds between two updates."""


@runtime_checkable
class Stream(Protocol):
    """What a progress line needs of `sys.stderr`."""

    def isatty(self) -> bool:
        """Whether a person may be looking."""
        ...

    def write(self, text: str, /) -> int:
        """Writes text."""
        ...

    def flush(self) -> None:
        """Makes it visible."""
        ...


class ProgressLine:
    """A context manager to be called with (bytes done, bytes in all): bytes, rate and time left on one line."""

    def __init__(self, label: str, stream: Stream | None = None) -> None:
        self._label = label
        self._stream = stream or sys.stderr
        self._tty = self._stream.isatty()
        self._begin: tuple[float, int] | None = None
        self._drawn = 0.0

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            self._stream.write("\n")
            self._stream.flush()

    def __call__(self, done: int, total: int) -> None:
        """Redraws the line, at most ten times a second and at the end."""
        now = time.monotonic()
        # What the first call reports may have been done by an earlier run; it is not part of the rate.
        self._begin = self._begin or (now, done)
        if not self._tty or (now - self._drawn < PERIOD and done < total):
            return
        self._drawn = now
        rate = (done - self._begin[1]) / max(now - self._begin[0], 1e-9)
        left = f"{_duration((total - done) / rate)} left" if rate > 0 else ""
        share = 100 * done / max(total, 1)
        self._stream.write(
            f"\r{self._label}  {size(done)} of {size(total)}  {share:.0f} %  {size(int(rate))}/s  {left}\x1b[K"
        )
        self._stream.flush()


def size(count: int) -> str:
    """Bytes in decimal units, as disks and the released index count them."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
