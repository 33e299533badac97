"""KDA decode as one Mosaic GPU kernel per call, one block per (row, head): raw projections in, gated output out.

The state goes through shared memory by bulk copies, so it is read and written once; conv, norms and gates of the
token are computed while it arrives. Pools are updated in place by slot.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas.kda.mosaic_token import (
    CHANNELS,
    GATE,
    PARAMS,
    STATE_LAYOUT,
    VALUE_LAYOUT,
    fetch_inputs,
    fetch_slot,
    gate_parameters,
    gate_vectors,
    gated_norm,
    overlap_vectors,
    pl_ds,
    scratch,
    sigmoid,
    step,
    token_vectors,
)
from pallas.kda.types import WINDOW, Decode, KdaWeights


def require_supported(channels: int, dtype: jnp.dtype) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernels do not serve."""
    if channels != CHANNELS:
        raise NotImplementedError(f"kda mosaic kernels serve head dimension {CHANNELS}, got {channels}")
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"kda mosaic kernels serve bfloat16 activations, got {dtype}")


def decode(
    qkvz: Float[Array, "B H 4 D"],
    decay_logits: Float[Array, "B H D"],
    beta_logits: Float[Array, "B H"],
    weights: KdaWeights,
    state_pool: Float32[Array, "S H D D"],
    window_pool: Float[Array, "S 3 H 3 D"],
    slot: Int32[Array, "B"],
    fresh: Bool[Array, "B"],
    lower_bound: float,
    norm_eps: float,
    interpret: Any = None,
) -> Decode:
    """`api.decode`."""
    rows, heads, _, channels = qkvz.shape
    require_supported(channels, qkvz.dtype)
    # One signed number per row: negative for fresh. The same for every layer, so XLA computes it once per step.
    code = jnp.where(fresh, -slot, slot)

    def body(qkvz, decay, beta, conv, a_log, dt_bias, norm, code, state_pool, window_pool, output, **buffers: Any):
        row, head = lax.axis_index("rows"), lax.axis_index("heads")
        fetch_inputs([qkvz.at[row, head]], decay.at[pl.ds(row, 1), head], conv, head, buffers)
        mark = code[row]
        slot, fresh = jnp.abs(mark), mark < 0
        pl.when(mark != 0)(lambda: fetch_slot(state_pool, window_pool, slot, head, buffers))
        parameters = gate_parameters(a_log, dt_bias, head)
        strength = sigmoid(beta[row, head].astype(jnp.float32))
        weight = plgpu.load(norm, layout=VALUE_LAYOUT, optimized=False)
        plgpu.barrier_wait(buffers["inputs_ready"])
        gate_vectors(buffers, parameters, lower_bound)

        @pl.when(mark == 0)
        def _inert() -> None:
            output[row, head] = jnp.zeros((CHANNELS,), output.dtype)

        @pl.when(mark != 0)
        def _live() -> None:
            state, raw, vectors = (buffers[name] for name in ("state", "raw", "vectors"))
            plgpu.barrier_wait(buffers["window_ready"])

            @pl.when(fresh)
            def _forget() -> None:
                raw[pl_ds(0, 4 * WINDOW), :] = jnp.zeros((4 * WINDOW, CHANNELS), raw.dtype)
                plgpu.commit_smem()

            token_vectors(buffers, 0)
            plgpu.commit_smem()
            for age in range(WINDOW):
                plgpu.copy_smem_to_gmem(raw.at[pl_ds(4 * age + 4, 3)], window_pool.at[slot, age, head])
            overlap_vectors(buffers)
            plgpu.commit_smem()
            gate = plgpu.load(vectors.at[GATE, 0], layout=VALUE_LAYOUT)
            plgpu.barrier_wait(buffers["state_ready"])
            before = jnp.where(fresh, 0.0, plgpu.load(state, layout=STATE_LAYOUT))
            after, reading, _ = step(before, vectors, 0, strength, buffers["overlaps"][0])
            state[...] = after
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(state, state_pool.at[slot, head])
            output[row, head] = gated_norm(reading, gate, weight, norm_eps, output.dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    states, windows = jax.new_ref(state_pool), jax.new_ref(window_pool)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, heads, channels), qkvz.dtype),
        grid=(heads, rows),
        grid_names=("heads", "rows"),
        scratch_types=scratch(1, qkvz.dtype),
        compiler_params=PARAMS,
        interpret=interpret,
        kernel_name="kda_decode",
    )
    output = kernel(qkvz, decay_logits, beta_logits, *weights, code, states, windows)
    return Decode(output, jax.freeze(states), jax.freeze(windows))
