"""KDA decode as one Mosaic GPU kernel per call: raw projections in, gated output out.

A block walks over heads of rows. States go through a ring of three buffers in shared memory by bulk copies, so each is
read and written once, and while one is updated the next arrives and the last leaves; conv, norms and gates of a token
are computed before its state is there. Pools are updated in place by slot.
"""

import dataclasses
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
    MULTIPROCESSORS,
    PARAMS,
    ROW_LAYOUT,
    ROWS,
    STATE_LAYOUT,
    VALUE,
    VALUE_LAYOUT,
    fetch_inputs,
    fetch_slot,
    gate_vectors,
    gated_norm,
    overlap_vectors,
    pl_ds,
    scratch,
    sigmoid,
    spread,
    step,
    token_vectors,
)
from pallas.kda.types import WINDOW, Decode, KdaWeights

STATES, INPUTS = 3, 2
"""Buffers of a block: one state is updated while another arrives and a third leaves; inputs of this item and the next
one."""


def require_supported(channels: int, dtype: jnp.dtype) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernels do not serve."""
    if channels != CHANNELS:
        raise NotImplementedError(f"kda mosaic kernels serve head dimension {CHANNELS}, got {channels}")
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"kda mosaic kernels serve bfloat16 activations, got {dtype}")


def ring_scratch(dtype: jnp.dtype) -> dict[str, Any]:
    """`scratch` for one token with a leading axis: states and inputs of several items, vectors of one."""
    few = {"state": STATES, "state_ready": STATES, "vectors": 1}

    def repeat(name: str, buffer: Any) -> Any:
        count = few.get(name, INPUTS)
        if isinstance(buffer, plgpu.Barrier):
            return dataclasses.replace(buffer, num_barriers=count)
        return plgpu.SMEM((count, *buffer.shape), buffer.dtype)

    return {name: repeat(name, buffer) for name, buffer in scratch(1, dtype).items() if name != "overlaps"}


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

    items = rows * heads
    workers = min(items, MULTIPROCESSORS)

    def body(qkvz, decay, beta, conv, a_log, dt_bias, norm, code, state_pool, window_pool, output, **ring: Any):
        weight = plgpu.load(norm, layout=VALUE_LAYOUT, optimized=False)

        def place(turn: jax.Array) -> tuple[jax.Array, jax.Array]:
            item = lax.axis_index("workers") + turn * workers
            return item // heads, item % heads

        def parameters_of(turn: jax.Array) -> tuple[jax.Array, ...]:
            """What is read straight into registers, a turn ahead: dt_bias, a_log, beta logit, the row's code."""
            row, head = place(turn)
            row = jnp.minimum(row, rows - 1)
            bias = plgpu.load(dt_bias.at[head], layout=ROW_LAYOUT.reduce(0), optimized=False)
            return bias, a_log[head], beta[row, head].astype(jnp.float32), code[row]

        def buffers_of(turn: jax.Array) -> dict[str, Any]:
            index = {"state": turn % STATES, "state_ready": turn % STATES, "vectors": 0}
            # The vectors' rows beyond the only token are free: one of them takes <k, q>.
            overlaps = ring["vectors"].at[0, VALUE, 1, pl_ds(0, ROWS)]
            return {name: ref.at[index.get(name, turn % INPUTS)] for name, ref in ring.items()} | {"overlaps": overlaps}

        def fetch(turn: jax.Array, mark: jax.Array) -> None:
            row, head = place(turn)

            @pl.when(row < rows)
            def _fetch() -> None:
                buffers = buffers_of(turn)
                fetch_inputs([(qkvz.at[row, head], decay.at[row, head])], conv, head, buffers)
                pl.when(mark != 0)(lambda: fetch_slot(state_pool, window_pool, jnp.abs(mark), head, buffers))

        def run(turn: jax.Array, current: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            following, later = parameters_of(turn + 1), mark_of(turn + INPUTS)
            row, head = place(turn)
            pl.when(row < rows)(lambda: work(turn, row, head, *current))
            fetch(turn + INPUTS, later)
            return following

        def mark_of(turn: jax.Array) -> jax.Array:
            return code[jnp.minimum(place(turn)[0], rows - 1)]

        def work(turn: jax.Array, row: jax.Array, head: jax.Array, bias, speed, logit, mark) -> None:
            buffers = buffers_of(turn)
            slot, fresh = jnp.abs(mark), mark < 0
            strength = sigmoid(logit)
            plgpu.barrier_wait(buffers["inputs_ready"])
            parameters = jnp.exp(speed), spread(bias, 1, (ROWS, CHANNELS), ROW_LAYOUT)
            gate_vectors(buffers, parameters, lower_bound)

            @pl.when(mark == 0)
            def _inert() -> None:
                output[row, head] = jnp.zeros((CHANNELS,), output.dtype)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

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
                gate = plgpu.load(vectors.at[GATE, 0], layout=VALUE_LAYOUT, optimized=False)
                plgpu.barrier_wait(buffers["state_ready"])
                before = jnp.where(fresh, 0.0, plgpu.load(state, layout=STATE_LAYOUT, optimized=False))
                after, reading, _ = step(before, vectors, 0, strength, buffers["overlaps"][0])
                state[...] = after
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(state, state_pool.at[slot, head])
                output[row, head] = gated_norm(reading, gate, weight, norm_eps, output.dtype)
                # All but this state have left: the buffers of the item after next are free.
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)

        first = parameters_of(jnp.int32(0))
        fetch(jnp.int32(0), first[-1])
        fetch(jnp.int32(1), mark_of(jnp.int32(1)))
        lax.fori_loop(0, -(-items // workers), run, first)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    states, windows = jax.new_ref(state_pool), jax.new_ref(window_pool)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, heads, channels), qkvz.dtype),
        grid=(workers,),
        grid_names=("workers",),
        scratch_types=ring_scratch(qkvz.dtype),
        compiler_params=dataclasses.replace(PARAMS, reduction_scratch_bytes=512),
        interpret=interpret,
        kernel_name="kda_decode",
    )
    output = kernel(qkvz, decay_logits, beta_logits, *weights, code, states, windows)
    return Decode(output, jax.freeze(states), jax.freeze(windows))
