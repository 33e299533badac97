"""Other implementations of KDA, timed on the same GPU where they are installed.

jax-linear-attention runs in this process, fla in children of `pallas.peers`, which tune its kernels while JAX compiles
ours.
"""

import contextlib
import functools
import importlib.util
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from pallas.kda.shapes import HEAD_DIM
from pallas.peers import PeerProcess, serve


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
        self._children: dict[tuple, PeerProcess] = {}
        if importlib.util.find_spec("fla"):
            for group in groups.values():
                self._children.update(dict.fromkeys(group, PeerProcess("pallas.kda.peers", group)))

    def wait(self, seconds: float) -> None:
        """Until all are ready; ends those that take longer."""
        deadline = time.monotonic() + seconds
        for child in set(self._children.values()):
            child.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Ends all children."""
        for child in set(self._children.values()):
            child.close()

    def time(self, call: tuple) -> float:
        """Median microseconds of a call; raises `ImportError` without fla and `RuntimeError` where it has none."""
        if call not in self._children:
            raise ImportError("fla is not installed", name="fla-core")
        return self._children[call].time(call)


def tune_quickly(threads: int = 8) -> None:
    """Lets Triton compile all configurations of a kernel at the same time, before it times the first of them.

    One by one, the ninety of fla's chunked form take minutes. All stay in the race, each timed for a shorter while.
    """
    import triton
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    configurations = Autotuner.prune_configs

    def compiled(tuner: Any, options: dict[str, Any]) -> list[Any]:
        chosen = configurations(tuner, options)
        tuner._do_bench = functools.partial(do_bench, warmup=5, rep=30)
        with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for configuration in chosen:
                # As the tuner calls it, but for the launch; one that cannot be compiled is reported when it is timed.
                tuner.fn.run(*tuner.nargs.values(), **{**options, "warmup": True}, **configuration.all_kwargs())
        return chosen

    Autotuner.prune_configs = compiled


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


def prepare(name: str, rows: int, tokens: int, heads: int, slow: bool) -> list[Callable[[], Any]]:
    """Calls of fla with a state each: many of the recurrent form, whose states would otherwise stay in the cache."""
    import torch

    run = fla_call(name, rows, tokens, heads, slow)
    sets = max(2, 32 * 96 // (rows * heads)) if name == "recurrent" else 2
    states = [torch.zeros(rows, heads, HEAD_DIM, HEAD_DIM, device="cuda") for _ in range(sets)]
    return [functools.partial(run, state) for state in states]


if __name__ == "__main__":
    with contextlib.suppress(ImportError):  # without Triton there is no fla either, which `prepare` says
        tune_quickly()
    serve(prepare)
