"""KDA verify of many heads as one Mosaic GPU kernel, one block per (row, head), with the token arithmetic of decode.

It keeps the state in registers over the tokens of a row, so its cost beyond the first token is latency alone; it never
writes the pools. `mosaic_commit` replays u, k and g of the accepted prefix and rounds exactly as decode does.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas.kda.mosaic_decode import require_supported
from pallas.kda.mosaic_token import (
    CHANNELS,
    GATE,
    KEY,
    PARAMS,
    ROW_LAYOUT,
    ROWS,
    STATE_LAYOUT,
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
)
from pallas.kda.types import KdaWeights, Records, Verify

MOST_TOKENS = 16


def require_tokens(name: str, tokens: int) -> None:
    """Raises `NotImplementedError` for more tokens a row than shared memory is laid out for."""
    if tokens > MOST_TOKENS:
        raise NotImplementedError(f"kda mosaic {name} serves up to {MOST_TOKENS} tokens a row, got {tokens}")


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
    require_tokens("verify", tokens)

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
