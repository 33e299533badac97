"""KDA decode of few heads as one Mosaic GPU kernel: a cluster of four blocks a head, see `mosaic_cluster`.

The state goes from device memory to registers and back without a stop in shared memory; while it is under way a block
computes convolution, norms and gates of its head, of which it needs all keys.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas.kda import mosaic_cluster
from pallas.kda.mosaic_cluster import CHANNEL, COLUMN, TILE, TOKENS, split_scratch
from pallas.kda.mosaic_decode import require_supported
from pallas.kda.mosaic_token import (
    PARAMS,
    RETAIN,
    ROW_LAYOUT,
    ROWS,
    overlap_vectors,
    pl_ds,
    sigmoid,
    spread,
    token_rows,
)
from pallas.kda.types import WINDOW, Decode, KdaWeights


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
    split = (mosaic_cluster.Cluster if interpret is None else mosaic_cluster.Alone)(ROWS)
    parts = split.parts
    code = jnp.where(fresh, -slot, slot)

    def body(qkvz, decay, beta, conv, a_log, dt_bias, norm, code, state_pool, window_pool, output, **buffers: Any):
        row, head = lax.axis_index("rows"), lax.axis_index("heads")
        part = lax.axis_index("part") if parts > 1 else jnp.int32(0)
        columns = pl.ds(part * split.columns, split.columns)
        mark = code[row]
        slot, fresh, live = jnp.abs(mark), mark < 0, mark != 0
        load = lambda ref, layout: plgpu.load(ref, layout=layout, optimized=False)  # noqa: E731
        past = [split.load_rows(window_pool.at[slot, age, head]) for age in range(WINDOW)]
        state = load(state_pool.at[slot, head, :, columns], TILE)
        now, taps = load(qkvz.at[row, head], ROW_LAYOUT), [split.load_rows(conv.at[tap, head]) for tap in range(4)]
        logits = load(decay.at[row, head], CHANNEL).astype(jnp.float32) + load(dt_bias.at[head], CHANNEL)
        strength = sigmoid(beta[row, head].astype(jnp.float32))
        weight = load(norm.at[columns], TOKENS.reduce(0))
        vectors, readings = buffers["vectors"], buffers["readings"]
        vectors[RETAIN, 0, :] = jnp.exp(lower_bound * sigmoid(jnp.exp(a_log[head]) * logits))
        past = [jnp.where(fresh, jnp.zeros_like(x), x) for x in past]
        vectors[pl_ds(0, 4), 0, :] = token_rows([*past, now], taps)
        plgpu.commit_smem()
        overlap_vectors(buffers)
        plgpu.commit_smem()
        before = jnp.where(fresh, 0.0, state)
        overlap = buffers["overlaps"][0]
        after, reading, _ = mosaic_cluster.step(
            split, before, vectors, 0, columns, strength, overlap, buffers["partial"].at[0]
        )

        @pl.when(live)
        def _keep() -> None:
            state_pool[slot, head, :, columns] = after

        readings[0, :] = reading
        plgpu.commit_smem()
        mosaic_cluster.exchange_sums(split, readings, buffers["sums"], part, output.dtype)

        # Only now has every block of the head read the window.
        @pl.when(live & (part == 0))
        def _shift() -> None:
            for age, rows in enumerate((*past[1:], now)):
                split.store_rows(window_pool.at[slot, age, head], rows)

        wide = spread(weight, 1, (ROWS, split.columns), TOKENS)
        result = mosaic_cluster.outputs(split, 0, buffers, columns, wide, norm_eps, output.dtype)
        buffers["gated"][...] = result
        plgpu.commit_smem()
        first = load(buffers["gated"].at[0], COLUMN)
        output[row, head, columns] = jnp.where(live, first.astype(jnp.float32), 0.0).astype(output.dtype)

    states, windows = jax.new_ref(state_pool), jax.new_ref(window_pool)
    cluster = {} if parts == 1 else {"cluster": (parts,), "cluster_names": ("part",)}
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, heads, channels), qkvz.dtype),
        grid=(rows, heads),
        grid_names=("rows", "heads"),
        scratch_types={
            "gated": plgpu.SMEM((ROWS, split.columns), qkvz.dtype),
            **split_scratch(split, 1),
        },
        compiler_params=dataclasses.replace(PARAMS, reduction_scratch_bytes=512),
        interpret=interpret,
        kernel_name="kda_decode_cluster",
        **cluster,
    )
    output = kernel(qkvz, decay_logits, beta_logits, *weights, code, states, windows)
    return Decode(output, jax.freeze(states), jax.freeze(windows))
