"""Peers written for PyTorch, measured in a child process of a benchmark.

The child prepares and captures its calls in CUDA graphs while JAX compiles ours, says when it is ready, and waits to be
asked for a time, so that only one of both uses the GPU. A module that offers such peers ends with

    if __name__ == "__main__":
        serve(prepare)

where `prepare(*call)` gives the functions to run one after another in one graph.
"""

import contextlib
import importlib.util
import json
import select
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

Prepare = Callable[..., list[Callable[[], Any]]]


class PeerProcess:
    """`python -m MODULE` with the given calls; as a context manager it ends with the block."""

    def __init__(self, module: str, calls: Sequence[tuple]) -> None:
        self._waited = False
        self._child: subprocess.Popen[str] | None = None
        if importlib.util.find_spec("torch"):
            command = [sys.executable, "-m", module, json.dumps(list(calls))]
            pipe = subprocess.PIPE
            self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the child."""
        if self._child is not None:
            self._child.kill()
            for pipe in (self._child.stdin, self._child.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):  # a line that it did not live to read
                    pipe.close()
            self._child.wait()

    def wait(self, seconds: float | None = None) -> None:
        """Until the calls are ready; ends a child that takes longer, for it would disturb what is measured then."""
        if self._child is None or self._waited:
            return
        self._waited = True
        assert self._child.stdout is not None
        if not select.select([self._child.stdout], [], [], seconds)[0]:
            self._child.kill()
        self._child.stdout.readline()

    def time(self, call: tuple) -> float:
        """Median microseconds of a call; raises `ImportError` without torch and `RuntimeError` where there is none."""
        if self._child is None:
            raise ImportError("torch is not installed", name="torch")
        self.wait()
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: then there is no answer either
            self._child.stdin.write(json.dumps(call) + "\n")
        answer = self._child.stdout.readline()
        if not answer.startswith("{"):
            raise RuntimeError(f"no time for {call}: it failed, or was not ready in time")
        return json.loads(answer)["us"]


def captured(runs: list[Callable[[], Any]]) -> Callable[[], float]:
    """Warms the calls up and captures them in one CUDA graph; the result measures microseconds a call.

    A graph keeps no tensor alive: the result holds `runs`, and with them what they read and write.
    """
    import torch

    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()

    def measure() -> float:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        samples = []
        for _ in range(12):
            marks[0].record()
            graph.replay()
            marks[1].record()
            torch.cuda.synchronize()
            samples.append(marks[0].elapsed_time(marks[1]) * 1e3 / len(runs))
        return statistics.median(samples[2:])

    return measure


def serve(prepare: Prepare) -> None:
    """The child's work: prepares the calls on its command line, then answers each line of standard input."""
    import torch

    answers, sys.stdout = sys.stdout, sys.stderr  # what the libraries print must not be taken for an answer
    ready = {}
    with torch.inference_mode():
        for call in json.loads(sys.argv[1]):
            try:
                ready[json.dumps(call)] = captured(prepare(*call))
            except Exception as error:  # whatever goes wrong with one call must leave the others
                print(f"note: peer {call}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            measure = ready.get(line.strip())
            print("no" if measure is None else json.dumps({"us": measure()}), file=answers, flush=True)
