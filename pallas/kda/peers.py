"""Other implementations of KDA, timed on the same GPU where they are installed.

jax-linear-attention runs in this process. fla runs in a child (`python -m pallas.kda.peers`), which tunes and captures
its kernels while JAX compiles ours; it then waits to be asked for a time, so that only one of both uses the GPU.
"""

import functools
import importlib.util
import json
import select
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas.kda.shapes import HEAD_DIM


def jla_prefill(heads: int, tokens: int, slow: bool) -> tuple[Any, tuple[jax.Array, ...]]:
    """jax-linear-attention's Mosaic GPU KDA, jitted, and its arguments; the last is the state, which it returns.

    Gates and convolved inputs are given, so it does less than our prefill. Raises `ImportError` where not installed.
    """
    from jla import ops

    keys = jax.random.split(jax.random.key(0), 5)
    query, key, value = (jax.random.normal(k, (1, tokens, heads, HEAD_DIM), jnp.bfloat16) for k in keys[:3])
    uniform = jax.random.uniform(keys[3], query.shape, jnp.float32)
    decay = -(1e-4 + 0.05 * uniform) if slow else -5 * jax.nn.sigmoid(4 * uniform - 2)
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], (1, tokens, heads), jnp.float32))
    attend = functools.partial(
        ops.linear_attention, "kda", use_qk_l2norm=True, output_final_state=True, impl="mosaic_gpu"
    )

    @jax.jit
    def run(
        query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array, beta: jax.Array, state: jax.Array
    ) -> jax.Array:
        return attend(query, key, value, g=decay, beta=beta, initial_state=state)[1]

    return run, (query, key, value, decay, beta, jnp.zeros((1, heads, HEAD_DIM, HEAD_DIM), jnp.float32))


class Fla:
    """Children that measure fla, one for each group of calls, so that the slow tuning of one delays no other.

    Calls are tuples (name, rows, tokens, heads, slow) with the name "recurrent" or "chunk".
    """

    def __init__(self, calls: list[tuple]) -> None:
        groups: dict[tuple, list[tuple]] = {}
        for call in calls:
            groups.setdefault(call[:1] if call[0] == "recurrent" else call[:4], []).append(call)
        self._children: dict[tuple, subprocess.Popen[str]] = {}
        if importlib.util.find_spec("fla") and importlib.util.find_spec("torch"):
            for group in groups.values():
                command = [sys.executable, "-m", "pallas.kda.peers", json.dumps(group)]
                pipe = subprocess.PIPE
                child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)
                self._children.update(dict.fromkeys(group, child))

    def wait(self, seconds: float) -> None:
        """Until all are ready; ends those that take longer, for they would disturb what is measured then."""
        deadline = time.monotonic() + seconds
        for child in set(self._children.values()):
            assert child.stdout is not None
            left = max(0.0, deadline - time.monotonic())
            if not select.select([child.stdout], [], [], left)[0]:
                child.kill()
            child.stdout.readline()

    def close(self) -> None:
        """Ends all children."""
        for child in self._children.values():
            child.kill()
            child.wait()

    def time(self, call: tuple) -> float:
        """Median microseconds of a call; raises `ImportError` without fla and `TimeoutError` where it has none."""
        child = self._children.get(call)
        if child is None:
            raise ImportError("fla is not installed", name="fla-core")
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(call) + "\n")
        except BrokenPipeError:
            raise TimeoutError("fla was not tuned in time") from None
        answer = child.stdout.readline()
        if not answer.startswith("{"):
            raise TimeoutError("fla was not tuned in time")
        return json.loads(answer)["us"]


def fla_call(name: str, rows: int, tokens: int, heads: int, slow: bool) -> Callable[[Any], Any]:
    """A call of fla as a function of the state; gates inside, neither convolution nor output norm."""
    import torch
    from fla.ops import kda

    def normal(*shape: int) -> "torch.Tensor":
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    query, key, value, logits = (normal(rows, tokens, heads, HEAD_DIM) for _ in range(4))
    beta, a_log = normal(rows, tokens, heads), torch.zeros(heads, device="cuda")
    bias = torch.zeros(heads * HEAD_DIM, device="cuda")
    logits = logits.clamp(-2, 2) - 7 if slow else logits
    options = {"safe_gate": True} if name == "chunk" else {}
    attend = kda.chunk_kda if name == "chunk" else kda.fused_recurrent_kda

    def run(state: "torch.Tensor") -> "torch.Tensor":
        return attend(
            query,
            key,
            value,
            logits,
            beta,
            A_log=a_log,
            dt_bias=bias,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=-5.0,
            state_v_first=True,
            **options,
        )[1]

    return run


def fla_prepared(name: str, rows: int, tokens: int, heads: int, slow: bool) -> Callable[[], float]:
    """Compiles and tunes a call of fla and captures it in a CUDA graph; the result measures it, in microseconds."""
    import torch

    run = fla_call(name, rows, tokens, heads, slow)
    sets = max(2, 32 * 96 // (rows * heads)) if name == "recurrent" else 2
    states = [torch.zeros(rows, heads, HEAD_DIM, HEAD_DIM, device="cuda") for _ in range(sets)]
    run(states[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for state in states:
            run(state)

    # A graph keeps no tensor alive: inputs and states must live as long as it does.
    alive = types.SimpleNamespace(graph=graph, run=run, states=states)

    def measure() -> float:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        samples = []
        for _ in range(12):
            marks[0].record()
            alive.graph.replay()
            marks[1].record()
            torch.cuda.synchronize()
            samples.append(marks[0].elapsed_time(marks[1]) * 1e3 / sets)
        return statistics.median(samples[2:])

    return measure


def serve(calls: list[list]) -> None:
    """The child's work: prepares all calls, then answers each line on standard input with a line of JSON."""
    import torch

    answers, sys.stdout = sys.stdout, sys.stderr  # what the libraries print must not be taken for an answer
    ready = {}
    with torch.inference_mode():
        for call in calls:
            try:
                ready[json.dumps(call)] = fla_prepared(*call)
            except Exception as error:  # whatever goes wrong with one call must leave the others
                print(f"note: fla {call}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            measure = ready.get(line.strip())
            print("no" if measure is None else json.dumps({"us": measure()}), file=answers, flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
