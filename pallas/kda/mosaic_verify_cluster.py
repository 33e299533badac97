"""KDA verify of few heads as one Mosaic GPU kernel: a cluster of four blocks a head, see `mosaic_cluster`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas.kda import mosaic_cluster
from pallas.kda.mosaic_cluster import TILE, TOKENS, split_scratch
from pallas.kda.mosaic_decode import require_supported
from pallas.kda.mosaic_token import (
    KEY,
    PARAMS,
    RETAIN,
    ROW_LAYOUT,
    ROWS,
    gate_parameters,
    overlap_vectors,
    padded,
    pl_ds,
    sigmoid,
    spread,
    token_rows,
    token_starts,
)
from pallas.kda.mosaic_verify import require_tokens
from pallas.kda.types import WINDOW, KdaWeights, Records, Verify


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
    """`api.verify` of at least four tokens a row."""
    rows, tokens, heads, _, channels = qkvz.shape
    require_supported(channels, qkvz.dtype)
    require_tokens("verify", tokens)
    split = (mosaic_cluster.Cluster if interpret is None else mosaic_cluster.Alone)(padded(tokens))
    parts = split.parts

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
        strengths,
        **buffers: Any,
    ):
        row, head = lax.axis_index("rows"), lax.axis_index("heads")
        part = lax.axis_index("part") if parts > 1 else jnp.int32(0)
        columns = pl.ds(part * split.columns, split.columns)
        slot = slots[row]
        load = lambda ref, layout: plgpu.load(ref, layout=layout, optimized=False)  # noqa: E731
        # Rows on the dummy slot run on its contents like any other; `mask` then clears what they produced.
        past = [split.load_rows(window_pool.at[slot, age, head]) for age in range(WINDOW)]
        state = load(state_pool.at[slot, head, :, columns], TILE)
        raw = [*past, *(load(qkvz.at[row, token, head], ROW_LAYOUT) for token in range(tokens))]
        taps = [split.load_rows(conv.at[tap, head]) for tap in range(4)]
        length = jnp.where(slot == 0, 0, jnp.minimum(lengths[row], tokens))
        speed, bias = gate_parameters(a_log, dt_bias, head)
        for token in range(tokens):
            strengths[token] = sigmoid(beta[row, token, head].astype(jnp.float32))
        weight = load(norm.at[columns], TOKENS.reduce(0))
        vectors, readings = buffers["vectors"], buffers["readings"]
        for first in token_starts(tokens):
            of_tokens = pl_ds(first, ROWS)
            logits = load(decay.at[row, of_tokens, head], ROW_LAYOUT).astype(jnp.float32)
            log_decay = lower_bound * sigmoid(speed * (logits + bias))
            decays[of_tokens, :] = log_decay
            vectors[RETAIN, of_tokens, :] = jnp.exp(log_decay)
        for token in range(tokens):
            vectors[pl_ds(0, 4), token, :] = token_rows(raw[token : token + 4], taps)
        plgpu.commit_smem()
        overlap_vectors(buffers)
        plgpu.commit_smem()

        def advance(token: jax.Array, state: jax.Array) -> jax.Array:
            scalars = strengths[token], buffers["overlaps"][token]
            state, reading, write = mosaic_cluster.step(
                split, state, vectors, token, columns, *scalars, buffers["partial"].at[token % 2]
            )
            writes[token, :] = write
            readings[token, :] = reading
            return state

        lax.fori_loop(0, tokens, advance, state)
        plgpu.commit_smem()
        mosaic_cluster.exchange_sums(split, readings, buffers["sums"], part, output.dtype)
        wide = spread(weight, 1, (ROWS, split.columns), TOKENS)
        index = plgpu.broadcasted_iota(jnp.int32, (ROWS, split.columns), 0, layout=TOKENS)
        for first in token_starts(tokens):
            place = (row, pl_ds(first, ROWS), head, columns)
            mask = lambda x: jnp.where(index + first < length, x, 0.0)  # noqa: E731
            result = mosaic_cluster.outputs(split, first, buffers, columns, wide, norm_eps, output.dtype)
            output[place] = mask(result.astype(jnp.float32)).astype(output.dtype)
            of_tokens = pl_ds(first, ROWS)
            for source, target in (
                (writes.at[of_tokens], write_out),
                (vectors.at[KEY, of_tokens, columns], key_out),
                (decays.at[of_tokens, columns], decay_out),
            ):
                target[place] = mask(load(source, TOKENS))

    record = jax.ShapeDtypeStruct((rows, tokens, heads, channels), jnp.float32)
    cluster = {} if parts == 1 else {"cluster": (parts,), "cluster_names": ("part",)}
    output, *records = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(record.shape, qkvz.dtype), record, record, record),
        grid=(rows, heads),
        grid_names=("rows", "heads"),
        scratch_types={
            "decays": plgpu.SMEM((padded(tokens), channels), jnp.float32),
            "writes": plgpu.SMEM((padded(tokens), split.columns), jnp.float32),
            "strengths": plgpu.SMEM((tokens,), jnp.float32),
            **split_scratch(split, tokens),
        },
        compiler_params=dataclasses.replace(PARAMS, reduction_scratch_bytes=512),
        interpret=interpret,
        kernel_name="kda_verify_cluster",
        **cluster,
    )(qkvz, decay_logits, beta_logits, *weights, state_pool, window_pool, slot, length)
    return Verify(output, Records(*records))
