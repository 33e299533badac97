"""The progress line: on terminals only."""

import io

import pytest

from checkpoints.progress import ProgressLine, size


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_silent_without_a_terminal():
    stream = io.StringIO()
    with ProgressLine("reading", stream) as progress:
        progress(1, 2)
        progress(2, 2)
    assert stream.getvalue() == ""


def test_shows_bytes_rate_and_time_left(monkeypatch):
    clock = iter([0.0, 10.0, 10.01, 20.0])
    monkeypatch.setattr("checkpoints.progress.time.monotonic", lambda: next(clock))
    stream = Terminal()
    with ProgressLine("reading", stream) as progress:
        progress(0, 4_000_000_000)
        progress(1_000_000_000, 4_000_000_000)
        progress(1_000_000_001, 4_000_000_000)
        progress(4_000_000_000, 4_000_000_000)
    lines = stream.getvalue().replace("\x1b[K", "").strip("\r\n").split("\r")
    assert lines[-2] == "reading  1.0 GB of 4.0 GB  25 %  100.0 MB/s  0:30 left"
    assert lines[-1] == "reading  4.0 GB of 4.0 GB  100 %  200.0 MB/s  0:00 left"
    assert stream.getvalue().endswith("\n")
    assert len(lines) == 2 or "0 B of" in lines[0]


def test_an_earlier_run_is_not_part_of_the_rate(monkeypatch):
    clock = iter([100.0, 101.0])
    monkeypatch.setattr("checkpoints.progress.time.monotonic", lambda: next(clock))
    stream = Terminal()
    with ProgressLine("converting", stream) as progress:
        progress(900, 1000)
        progress(910, 1000)
    assert "10 B/s  0:09 left" in stream.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_500_000, "2.5 MB"), (1_560_860_324_864, "1.56 TB")],
)
def test_size(count, text):
    assert size(count) == text
