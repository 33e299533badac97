"""The child process that measures other houses' kernels, here without a GPU: torch is a module that counts."""

import importlib.util

import pytest

from pallas import peers
from pallas.kda.peers import Fla

TORCH = """
import contextlib

def nothing(*_, **__):
    return contextlib.nullcontext()

class CUDAGraph:
    replayed = 0

    def replay(self):
        CUDAGraph.replayed += 1

class Event:
    def __init__(self, enable_timing):
        self.at = 0

    def record(self):
        self.at = CUDAGraph.replayed

    def elapsed_time(self, later):
        return 0.005 * (later.at - self.at)

class cuda:
    synchronize = graph = staticmethod(nothing)
    CUDAGraph, Event = CUDAGraph, Event

inference_mode = nothing
"""

ANSWERS = """
from pallas.peers import serve

def prepare(number):
    print("noise of a library")
    if number == 2:
        raise ValueError("refused")
    return [lambda: None] * 2

serve(prepare)
"""


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Writes modules that children find, and lets torch and fla look installed."""

    def write(**modules):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return write


def test_without_torch_a_peer_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with peers.PeerProcess("pallas.attn_res.peers", [(9, 1)]) as process, pytest.raises(ImportError, match="torch"):
        process.time((9, 1))
    with pytest.raises(ImportError, match="fla"):
        Fla([("chunk", 1, 8192, 96, False)]).time(("chunk", 1, 8192, 96, False))


def test_a_child_captures_its_calls_and_answers(child):
    """A graph of two calls that takes 5 us is 2.5 us a call; a call that failed leaves the others."""
    child(torch=TORCH, answers=ANSWERS)
    with peers.PeerProcess("answers", [(1,), (2,), (3,)]) as process:
        assert process.time((3,)) == 2.5
        with pytest.raises(RuntimeError, match="no time"):
            process.time((2,))
        assert process.time((1,)) == 2.5


def test_a_child_that_is_not_ready_in_time_is_ended(child):
    child(sleeper="import time\ntime.sleep(60)\n")
    with peers.PeerProcess("sleeper", [(1,)]) as process:
        process.wait(0.01)
        with pytest.raises(RuntimeError, match="not ready in time"):
            process.time((1,))


def test_children_of_fla_are_ended_together(child, monkeypatch):
    child(sleeper="import time\ntime.sleep(60)\n")
    calls = [("recurrent", 1, 1, 96, False), ("chunk", 1, 8192, 96, False)]
    start = peers.PeerProcess
    monkeypatch.setattr("pallas.kda.peers.PeerProcess", lambda module, calls: start("sleeper", calls))
    fla = Fla(calls)
    fla.wait(0.01)
    for call in calls:
        with pytest.raises(RuntimeError, match="no time"):
            fla.time(call)
    fla.close()
