"""Other implementations of KDA, timed on the same GPU where they are installed."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas import timing
from pallas.kda.shapes import HEAD_DIM


def available(peer: Callable[[], float]) -> float | None:
    """The peer's time, or None where it is not installed."""
    try:
        return peer()
    except ImportError:
        return None


def jla_prefill_us(heads: int, tokens: int, slow: bool) -> float:
    """jax-linear-attention's Mosaic GPU KDA, gates and convolved inputs given, with the final state."""
    from jla import ops

    keys = jax.random.split(jax.random.key(0), 5)
    query, key, value = (jax.random.normal(k, (1, tokens, heads, HEAD_DIM), jnp.bfloat16) for k in keys[:3])
    uniform = jax.random.uniform(keys[3], query.shape, jnp.float32)
    decay = -(1e-4 + 0.05 * uniform) if slow else -5 * jax.nn.sigmoid(4 * uniform - 2)
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], (1, tokens, heads), jnp.float32))
    attend = functools.partial(
        ops.linear_attention, "kda", use_qk_l2norm=True, output_final_state=True, impl="mosaic_gpu"
    )
    calls = 4

    def chain(state: jax.Array) -> jax.Array:
        for _ in range(calls):
            _, state = attend(query, key, value, g=decay, beta=beta, initial_state=state)
        return state

    start = jnp.zeros((1, heads, HEAD_DIM, HEAD_DIM), jnp.float32)
    return timing.median_call_us(jax.jit(chain), start, calls)


def fla_decode_us(rows: int, heads: int) -> float:
    """Fla's recurrent KDA kernel in a CUDA graph: gates inside, neither convolution nor output norm."""
    import torch
    from fla.ops.kda import fused_recurrent_kda

    def normal(*shape: int) -> "torch.Tensor":
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    tokens = [normal(rows, 1, heads, HEAD_DIM) for _ in range(4)]
    beta, a_log = normal(rows, 1, heads), torch.zeros(heads, device="cuda")
    bias = torch.zeros(heads * HEAD_DIM, device="cuda")
    sets = max(2, 32 // rows)
    states = [torch.zeros(rows, heads, HEAD_DIM, HEAD_DIM, device="cuda") for _ in range(sets)]

    def walk() -> None:
        for state in states:
            fused_recurrent_kda(
                *tokens,
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
            )

    walk()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        walk()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    samples = []
    for _ in range(20):
        marks[0].record()
        graph.replay()
        marks[1].record()
        torch.cuda.synchronize()
        samples.append(marks[0].elapsed_time(marks[1]) * 1e3 / sets)
    return sorted(samples)[len(samples) // 2]
