"""KDA decode as one Mosaic GPU kernel per call, one block per (row, head): raw projections in, gated output out.

The state goes through shared memory by bulk copies, so it is read and written once; conv, norms and gates of the token are
computed while it arrives. Pools are updated in place by slot.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas.kda.mosaic_token import (
    CHANNELS, ROWS, STATE_LAYOUT, VALUE_LAYOUT, gated_norm, log_decay, pl_ds, sigmoid, step, token_vectors,
)
from pallas.kda.types import Decode, KdaWeights


def require_supported(channels: int, dtype: jnp.dtype) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernels do not serve."""
    if channels != CHANNELS:
        raise NotImplementedError(f"kda mosaic kernels serve head dimension {CHANNELS}, got {channels}")
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"kda mosaic kernels serve bfloat16 activations, got {dtype}")


def fetch_inputs(qkvz, conv, window_pool, slot, head, raw, taps, barrier, tokens: int) -> None:
    """Starts the copies that fill `raw` and `taps` (8 + tokens arrivals)."""
    for token in range(tokens):
        plgpu.copy_gmem_to_smem(qkvz[token], raw.at[pl_ds(4 * (token + 3), 4)], barrier)
    for tap in range(4):
        plgpu.copy_gmem_to_smem(conv.at[tap, head], taps.at[pl_ds(3 * tap, 3)], barrier)
    for age in range(3):
        plgpu.copy_gmem_to_smem(window_pool.at[slot, age, head], raw.at[pl_ds(4 * age, 3)], barrier)


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

    def body(qkvz, decay, beta, conv, a_log, dt_bias, norm, code, state_pool, window_pool, output,
             state, raw, taps, vectors, inputs_ready, state_ready):
        row, head = lax.axis_index("rows"), lax.axis_index("heads")
        mark = code[row]
        slot, fresh = jnp.abs(mark), mark < 0

        @pl.when(mark == 0)
        def _inert():
            output[row, head] = jnp.zeros((CHANNELS,), output.dtype)

        @pl.when(mark != 0)
        def _live():
            plgpu.copy_gmem_to_smem(state_pool.at[slot, head], state, state_ready)
            fetch_inputs([qkvz.at[row, head]], conv, window_pool, slot, head, raw, taps, inputs_ready, 1)
            retain = jnp.exp(log_decay(decay[row, head], a_log[head], dt_bias[head], lower_bound))
            strength = sigmoid(beta[row, head].astype(jnp.float32))
            plgpu.barrier_wait(inputs_ready)

            @pl.when(fresh)
            def _forget():
                raw[pl_ds(0, 12), :] = jnp.zeros((12, CHANNELS), raw.dtype)

            token_vectors(raw, taps, vectors, 0)
            vectors[4, :] = retain
            overlap = (vectors[0, :] * vectors[1, :]).sum()
            plgpu.barrier_wait(state_ready)
            before = jnp.where(fresh, 0.0, plgpu.load(state, layout=STATE_LAYOUT))
            after, reading, _ = step(before, vectors, 0, strength, overlap)
            state[...] = after
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(state, state_pool.at[slot, head])
            for age in range(3):
                plgpu.copy_smem_to_gmem(raw.at[pl_ds(4 * age + 4, 3)], window_pool.at[slot, age, head])
            gate = plgpu.load(vectors.at[3], layout=VALUE_LAYOUT)
            weight = plgpu.load(norm, layout=VALUE_LAYOUT, optimized=False)
            output[row, head] = gated_norm(reading, gate, weight, norm_eps, output.dtype)
            plgpu.wait_smem_to_gmem(0)

    states, windows = jax.new_ref(state_pool), jax.new_ref(window_pool)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, heads, channels), qkvz.dtype),
        grid=(heads, rows),
        grid_names=("heads", "rows"),
        scratch_types=(
            plgpu.SMEM((channels, channels), jnp.float32),
            plgpu.SMEM((16, channels), qkvz.dtype),
            plgpu.SMEM((13, channels), jnp.float32),
            plgpu.SMEM((ROWS, channels), jnp.float32),
            plgpu.Barrier(num_arrivals=8),
            plgpu.Barrier(),
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="kda_decode",
    )
    output = kernel(qkvz, decay_logits, beta_logits, *weights, code, states, windows)
    return Decode(output, jax.freeze(states), jax.freeze(windows))
