"""KDA verify and commit as Mosaic GPU kernels, one block per (row, head), with the token arithmetic of decode.

Verify keeps the state in registers over the tokens of a row, so its cost beyond the first token is latency alone; it
never writes the pools. Commit replays u, k and g of the accepted prefix and rounds exactly as decode does.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas.kda.mosaic_decode import require_supported
from pallas.kda.mosaic_token import (
    CHANNELS,
    GATE,
    KEY,
    KEY_LAYOUT,
    PARAMS,
    ROW_LAYOUT,
    ROWS,
    STATE_LAYOUT,
    VALUE_LAYOUT,
    fetch,
    fetch_inputs,
    fetch_slot,
    gate_parameters,
    gate_vectors,
    gated_norm,
    overlap_vectors,
    padded,
    pl_ds,
    scratch,
    sigmoid,
    spread,
    step,
    token_vectors,
    write_token,
)
from pallas.kda.types import WINDOW, KdaWeights, Pools, Records, Verify

MOST_TOKENS = 16


def require_tokens(tokens: int) -> None:
    """Raises `NotImplementedError` for more tokens a row than shared memory is laid out for."""
    if tokens > MOST_TOKENS:
        raise NotImplementedError(f"kda mosaic verify serves up to {MOST_TOKENS} tokens a row, got {tokens}")


def verify(
    qkvz: Float[Array, "B W H 4 D"],
    decay_logits: Float[Array, "B W H D"],
    beta_logits: Float[Array, "B W H"],
    weights: KdaWeights,
    state_pool: Float32[Array, "S H D D"],
    window_pool: Float[Array, "S 3 H 3 D"],
    slot: Int32[Array, "B"],
    length: Int32[Array, "B"],
    lower_bound: float,
    norm_eps: float,
    interpret: Any = None,
) -> Verify:
    """`api.verify`."""
    rows, tokens, heads, _, channels = qkvz.shape
    require_supported(channels, qkvz.dtype)
    require_tokens(tokens)

    def body(
        qkvz,
        decay,
        beta,
        conv,
        a_log,
        dt_bias,
        norm,
        state_pool,
        window_pool,
        slots,
        lengths,
        output,
        write_out,
        key_out,
        decay_out,
        decays,
        writes,
        readings,
        gated,
        strengths,
        **buffers: Any,
    ):
        row, head = lax.axis_index("rows"), lax.axis_index("heads")
        slot = slots[row]
        sources = [(qkvz.at[row, token, head], decay.at[row, token, head]) for token in range(tokens)]
        fetch_inputs(sources, conv, head, buffers)
        # Rows on the dummy slot run on its contents like any other; `mask` then clears what they produced.
        fetch_slot(state_pool, window_pool, slot, head, buffers)
        length = jnp.where(slot == 0, 0, jnp.minimum(lengths[row], tokens))
        parameters = gate_parameters(a_log, dt_bias, head)
        for token in range(tokens):
            strengths[token] = sigmoid(beta[row, token, head].astype(jnp.float32))
        weight = spread(plgpu.load(norm, layout=ROW_LAYOUT.reduce(0), optimized=False), 1, (ROWS, CHANNELS), ROW_LAYOUT)
        plgpu.barrier_wait(buffers["inputs_ready"])
        gate_vectors(buffers, parameters, lower_bound, decays)
        plgpu.barrier_wait(buffers["window_ready"])
        lax.fori_loop(0, tokens, lambda token, _: token_vectors(buffers, token), None)
        plgpu.commit_smem()
        overlap_vectors(buffers)
        plgpu.commit_smem()
        vectors = buffers["vectors"]
        plgpu.barrier_wait(buffers["state_ready"])

        def advance(token: jax.Array, state: jax.Array) -> jax.Array:
            state, reading, write = step(state, vectors, token, strengths[token], buffers["overlaps"][token])
            writes[token, :] = write
            readings[token, :] = reading
            return state

        # Loops, because straight-line code of all tokens starves the instruction cache.
        lax.fori_loop(0, tokens, advance, plgpu.load(buffers["state"], layout=STATE_LAYOUT, optimized=False))
        plgpu.commit_smem()
        index = plgpu.broadcasted_iota(jnp.int32, (ROWS, CHANNELS), 0, layout=ROW_LAYOUT)
        for first in range(0, padded(tokens), ROWS):
            rows = pl_ds(first, ROWS)
            load = lambda ref: plgpu.load(ref.at[rows], layout=ROW_LAYOUT, optimized=False)  # noqa: E731
            mask = lambda x: jnp.where(index + first < length, x, 0.0)  # noqa: E731
            result = gated_norm(load(readings), load(vectors.at[GATE]), weight, norm_eps, gated.dtype)
            gated[rows, :] = mask(result.astype(jnp.float32)).astype(gated.dtype)
            for ref in (writes, decays, vectors.at[KEY]):
                ref[rows, :] = mask(load(ref))
        plgpu.commit_smem()
        valid = pl_ds(0, tokens)
        for source, target in ((gated, output), (writes, write_out), (vectors.at[KEY], key_out), (decays, decay_out)):
            plgpu.copy_smem_to_gmem(source.at[valid], target.at[row, :, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    record = jax.ShapeDtypeStruct((rows, tokens, heads, channels), jnp.float32)
    plane = plgpu.SMEM((padded(tokens), channels), jnp.float32)
    output, *records = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(record.shape, qkvz.dtype), record, record, record),
        grid=(heads, rows),
        grid_names=("heads", "rows"),
        scratch_types={
            "decays": plane,
            "writes": plane,
            "readings": plane,
            "gated": plgpu.SMEM((padded(tokens), channels), qkvz.dtype),
            "strengths": plgpu.SMEM((tokens,), jnp.float32),
            **scratch(tokens, qkvz.dtype),
        },
        compiler_params=PARAMS,
        interpret=interpret,
        kernel_name="kda_verify",
    )(qkvz, decay_logits, beta_logits, *weights, state_pool, window_pool, slot, length)
    return Verify(output, Records(*records))


def commit(
    records: Records,
    qkvz: Float[Array, "B W H 4 D"],
    state_pool: Float32[Array, "S H D D"],
    window_pool: Float[Array, "S 3 H 3 D"],
    slot: Int32[Array, "B"],
    accepted: Int32[Array, "B"],
    interpret: Any = None,
) -> Pools:
    """`api.commit`."""
    rows, tokens, heads, _, channels = qkvz.shape
    require_supported(channels, qkvz.dtype)
    require_tokens(tokens)

    def body(
        writes,
        keys,
        decays,
        qkvz,
        slots,
        counts,
        state_pool,
        window_pool,
        state,
        raw,
        vectors,
        inputs_ready,
        state_ready,
    ):
        row, head = lax.axis_index("rows"), lax.axis_index("heads")
        slot = slots[row]
        count = jnp.where(slot == 0, 0, jnp.minimum(counts[row], tokens))

        @pl.when(count > 0)
        def _live():
            fetch(state_pool.at[slot, head], state, state_ready)
            for age in range(WINDOW):
                fetch(window_pool.at[slot, age, head], raw.at[pl_ds(4 * age, 3)], inputs_ready)
            for token in range(tokens):
                fetch(qkvz.at[row, token, head], raw.at[pl_ds(4 * (token + WINDOW), 4)], inputs_ready)
            for plane, record in enumerate((keys, writes, decays)):
                target = vectors.at[plane, pl_ds(0, tokens)]
                plgpu.copy_gmem_to_smem(record.at[row, :, head], target, inputs_ready)
            plgpu.barrier_wait(inputs_ready)
            for first in range(0, padded(tokens), ROWS):
                decay = vectors.at[2, pl_ds(first, ROWS)]
                decay[...] = jnp.exp(plgpu.load(decay, layout=ROW_LAYOUT, optimized=False))
            plgpu.commit_smem()
            plgpu.barrier_wait(state_ready)

            def replay(token, state):
                load = lambda plane, layout: plgpu.load(vectors.at[plane, token], layout=layout, optimized=False)  # noqa: E731
                key, retain = (spread(load(plane, KEY_LAYOUT), 0, state.shape, STATE_LAYOUT) for plane in (0, 2))
                return write_token(state, key, retain, load(1, VALUE_LAYOUT))

            state[...] = lax.fori_loop(0, count, replay, plgpu.load(state, layout=STATE_LAYOUT, optimized=False))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(state, state_pool.at[slot, head])
            for age in range(WINDOW):
                plgpu.copy_smem_to_gmem(raw.at[pl.ds(4 * (count + age), 3)], window_pool.at[slot, age, head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    states, windows = jax.new_ref(state_pool), jax.new_ref(window_pool)
    plgpu.kernel(
        body,
        out_type=(),
        grid=(heads, rows),
        grid_names=("heads", "rows"),
        scratch_types=(
            plgpu.SMEM((channels, channels), jnp.float32),
            plgpu.SMEM((4 * (tokens + WINDOW), channels), qkvz.dtype),
            plgpu.SMEM((3, padded(tokens), channels), jnp.float32),
            plgpu.Barrier(num_arrivals=WINDOW + tokens + 3),
            plgpu.Barrier(),
        ),
        compiler_params=PARAMS,
        interpret=interpret,
        kernel_name="kda_commit",
    )(records.write, records.key, records.decay, qkvz, slot, accepted, states, windows)
    return Pools(jax.freeze(states), jax.freeze(windows))
