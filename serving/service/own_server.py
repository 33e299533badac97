"""The server that programs load or torment: one that runs already, or one of their own."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from serving.gateway import processes

FLAGS = ("--port", "0", "--max-num-seqs", "8", "--max-length", "512", "--max-prefill-tokens", "64")
"""Flags of a server of the shipped model that starts soon."""


class Server(NamedTuple):
    """Where a server is."""

    target: str
    pid: int | None


@contextlib.contextmanager
def server_at(target: str | None, pid: int | None = None, flags: Sequence[str] = ()) -> Iterator[Server]:
    """The server at `target`; without one, a server for the block alone, with `flags` instead of its own.

    Raises RuntimeError if that does not start.
    """
    if target is not None:
        yield Server(target, pid)
        return
    command = processes.service_command([*own_flags(flags), "--log-level", "warning"])
    with processes.running(command, stdout=subprocess.PIPE) as process:
        yield Server(processes.service_address(process), process.pid)


def own_flags(flags: Sequence[str]) -> list[str]:
    """`FLAGS` with these pairs of name and value in place of their own."""
    pairs = dict(zip(FLAGS[::2], FLAGS[1::2], strict=True)) | dict(zip(flags[::2], flags[1::2], strict=True))
    return [text for pair in pairs.items() for text in pair]
