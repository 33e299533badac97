"""A server of one's own, for programs that load or torment one."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

SMALL = ("--max-num-seqs", "8", "--max-length", "512", "--max-prefill-tokens", "64", "--log-level", "warning")
"""Flags of a server of the shipped model that starts soon."""


class Server(NamedTuple):
    """Where a server is."""

    target: str
    pid: int


@contextlib.contextmanager
def own_server(flags: Sequence[str] = SMALL) -> Iterator[Server]:
    """Starts `python -m serving` on a free port and ends it after the block. RuntimeError if it does not start."""
    command = [sys.executable, "-m", "serving", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        word, _, target = process.stdout.readline().strip().partition(" ")
        if word != "ready":
            raise RuntimeError(f"the server did not start: {' '.join(command)}")
        yield Server(target, process.pid)
    finally:
        process.terminate()
        process.wait(60)
