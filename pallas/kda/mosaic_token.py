"""KDA tokens of one head inside a Mosaic GPU kernel: what decode, verify and commit share, so that they round alike.

One warpgroup (128 threads) owns the whole 128 x 128 state of a head in registers. Values are split over the four warps,
so that sums over keys never leave a warp: a lane sums a quarter of the keys for four neighbouring values, and two
shuffles add the quarters.

The kernels insert no barriers of their own around shared memory; `plgpu.commit_smem` stands where threads exchange
data.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas.kda.types import KEY_EPS, WINDOW

CHANNELS = 128
MULTIPROCESSORS = 132
"""Of an H100 or H200."""
ROWS = 4
"""Rows of a `ROW_LAYOUT` array, one a warp; token counts are rounded up to it in shared memory."""
QUERY, KEY, VALUE, GATE, RETAIN = range(5)
"""Planes of `vectors` [5, tokens, 128]: q, k, v, output-gate logits, exp of the log decay."""

ROW_LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((ROWS, CHANNELS), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
"""[4, 128]: a row per warp, so that sums over channels stay inside a warp."""

STATE_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((CHANNELS, CHANNELS), (32, 32), (4,))), warp_dims=(-4,), lane_dims=(-5, -2), vector_dim=-1
)
"""[128, 128]: 32 values a warp, of which a lane holds four for a quarter of the keys."""
KEY_LAYOUT = STATE_LAYOUT.reduce(1)
VALUE_LAYOUT = STATE_LAYOUT.reduce(0)
PARAMS = plgpu.CompilerParams(
    approx_math=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=4 * CHANNELS * 4,
)


def pl_ds(start: int, size: int) -> slice:
    """A static slice."""
    return slice(start, start + size)


def padded(tokens: int) -> int:
    """Tokens rounded up to whole `ROW_LAYOUT` arrays."""
    return -(-tokens // ROWS) * ROWS


def token_starts(tokens: int) -> list[int]:
    """First tokens of groups of four that cover all of them; the last two may overlap, which copies some twice."""
    return sorted({*range(0, tokens - ROWS + 1, ROWS), max(tokens - ROWS, 0)})


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x)) within a few units in the last place.

    The reciprocal is a squared rsqrt: a division has a slow path, and the branch keeps neighbouring tokens apart.
    """
    root = lax.rsqrt(1.0 + jnp.exp(-x))
    return root * root


def spread(x: jax.Array, axis: int, shape: tuple[int, int], layout: Any) -> jax.Array:
    """`x` along `axis` of a matrix in the given layout."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (axis,)), layout)


def scratch(tokens: int, dtype: jnp.dtype) -> dict[str, Any]:
    """Shared memory and barriers of a kernel over `tokens` tokens a row; `overlaps` holds <k, q>."""
    smem = plgpu.SMEM
    return {
        "state": smem((CHANNELS, CHANNELS), jnp.float32),
        "raw": smem((4 * (tokens + WINDOW), CHANNELS), dtype),
        "taps": smem((13, CHANNELS), jnp.float32),
        "logits": smem((padded(tokens), CHANNELS), dtype),
        "vectors": smem((5, padded(tokens), CHANNELS), jnp.float32),
        "overlaps": smem((padded(tokens),), jnp.float32),
        "inputs_ready": plgpu.Barrier(num_arrivals=2 * tokens + 4),
        "window_ready": plgpu.Barrier(num_arrivals=WINDOW),
        "state_ready": plgpu.Barrier(),
    }


def fetch(source: Any, target: Any, ready: Any) -> None:
    """Starts the copy of a contiguous piece. Promised to lie inside, it needs no descriptor, whose fetch takes time."""
    plgpu.copy_gmem_to_smem(source, target, ready, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def fetch_inputs(sources: list[tuple], conv: Any, head: jax.Array, buffers: dict[str, Any]) -> None:
    """Starts the copies that depend on no slot: each token's (q, k, v, z; decay logits), the convolution's taps."""
    barrier = buffers["inputs_ready"]
    for token, (qkvz, logits) in enumerate(sources):
        fetch(qkvz, buffers["raw"].at[pl_ds(4 * (token + WINDOW), 4)], barrier)
        fetch(logits, buffers["logits"].at[token], barrier)
    for tap in range(4):
        fetch(conv.at[tap, head], buffers["taps"].at[pl_ds(3 * tap, 3)], barrier)


def fetch_slot(state_pool: Any, window_pool: Any, slot: jax.Array, head: jax.Array, buffers: dict[str, Any]) -> None:
    """Starts the copies of the slot's state and window."""
    for age in range(WINDOW):
        target = buffers["raw"].at[pl_ds(4 * age, 3)]
        fetch(window_pool.at[slot, age, head], target, buffers["window_ready"])
    fetch(state_pool.at[slot, head], buffers["state"], buffers["state_ready"])


def gate_parameters(a_log: Any, dt_bias: Any, head: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(exp(a_log), dt_bias spread over rows), read from device memory: to be called before anything is waited for."""
    bias = plgpu.load(dt_bias.at[head], layout=ROW_LAYOUT.reduce(0), optimized=False)
    return jnp.exp(a_log[head]), spread(bias, 1, (ROWS, CHANNELS), ROW_LAYOUT)


def gate_vectors(
    buffers: dict[str, Any], parameters: tuple[jax.Array, jax.Array], lower_bound: float, decays: Any = None
) -> None:
    """Writes exp(g) of every token to `vectors`, and g to `decays` where given."""
    speed, bias = parameters
    for first in range(0, buffers["logits"].shape[0], ROWS):
        rows = pl_ds(first, ROWS)
        logits = plgpu.load(buffers["logits"].at[rows], layout=ROW_LAYOUT, optimized=False).astype(jnp.float32)
        decay = lower_bound * sigmoid(speed * (logits + bias))
        buffers["vectors"][RETAIN, rows, :] = jnp.exp(decay)
        if decays is not None:
            decays[rows, :] = decay


def token_rows(rows: list[jax.Array], taps: list[jax.Array]) -> jax.Array:
    """A token's normalised q and k, v and output-gate logits [4, 128] from four raw rows, its own the last."""
    mixed = plgpu.layout_cast(jnp.zeros((ROWS, CHANNELS), jnp.float32), ROW_LAYOUT)
    for row, tap in zip(rows, taps):
        mixed = mixed + row.astype(jnp.float32) * tap
    active = (mixed * sigmoid(mixed)).astype(rows[-1].dtype).astype(jnp.float32)
    inverse = lax.rsqrt((active * active).sum(axis=1) + KEY_EPS)
    unit = active * spread(inverse, 0, (ROWS, CHANNELS), ROW_LAYOUT)
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS, CHANNELS), 0, layout=ROW_LAYOUT)
    plain = jnp.where(row == VALUE, active, rows[-1].astype(jnp.float32))
    scaled = jnp.where(row == QUERY, unit * CHANNELS**-0.5, unit)
    return jnp.where(row <= KEY, scaled, plain)


def token_vectors(buffers: dict[str, Any], token: int | jax.Array) -> None:
    """Convolution, SiLU and L2 norms of a token: its q, k, v and z in `vectors`."""
    load = lambda ref: plgpu.load(ref, layout=ROW_LAYOUT, optimized=False)  # noqa: E731
    rows = [load(buffers["raw"].at[pl.ds(4 * (token + tap), 4)]) for tap in range(4)]
    taps = [load(buffers["taps"].at[pl_ds(3 * tap, 4)]) for tap in range(4)]
    buffers["vectors"][pl_ds(0, 4), token, :] = token_rows(rows, taps)


def overlap_vectors(buffers: dict[str, Any]) -> None:
    """Writes <k, q> of every token to `overlaps`."""
    vectors, overlaps = buffers["vectors"], buffers["overlaps"]
    for first in range(0, overlaps.shape[0], ROWS):
        rows = pl_ds(first, ROWS)
        query, key = (plgpu.load(vectors.at[plane, rows], layout=ROW_LAYOUT, optimized=False) for plane in (QUERY, KEY))
        overlaps[rows] = (query * key).sum(axis=1)


def write_token(state: jax.Array, key: jax.Array, retain: jax.Array, write: jax.Array) -> jax.Array:
    """Diag(exp g) S + k u^T, with `key` and `retain` spread over the state.

    The barrier keeps both products apart, so that decode, verify and commit round alike.
    """
    return lax.optimization_barrier(state * retain) + key * spread(write, 1, (CHANNELS, CHANNELS), STATE_LAYOUT)


def step(
    state: jax.Array, vectors: Any, token: int | jax.Array, beta: jax.Array, overlap: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Decay, predict, write, read: (new state, reading o, write vector u).

    o = S^T q is taken before the write as (decayed S)^T q + <k, q> u, so that both sums over keys wait for nothing
    but the decayed state. `overlap` is <k, q>.
    """
    load = lambda plane, layout: plgpu.load(vectors.at[plane, token], layout=layout, optimized=False)  # noqa: E731
    shape = (CHANNELS, CHANNELS)
    query, key, retain = (spread(load(plane, KEY_LAYOUT), 0, shape, STATE_LAYOUT) for plane in (QUERY, KEY, RETAIN))
    decayed = lax.optimization_barrier(state * retain)
    predicted = (decayed * key).sum(axis=0)
    reading = (decayed * query).sum(axis=0)
    write = beta * (load(VALUE, VALUE_LAYOUT) - predicted)
    return write_token(state, key, retain, write), reading + overlap * write, write


def gated_norm(reading: jax.Array, gate: jax.Array, norm: jax.Array, eps: float, dtype: jnp.dtype) -> jax.Array:
    """RMSNorm(reading) * norm * sigmoid(gate) over the last axis, rounded to `dtype`; [128] or [4, 128]."""
    rounded = reading.astype(dtype).astype(jnp.float32)
    scale = lax.rsqrt((rounded * rounded).sum(axis=-1) / CHANNELS + eps)
    if reading.ndim == 2:
        scale = spread(scale, 0, reading.shape, ROW_LAYOUT)
    return (rounded * scale * norm * sigmoid(gate)).astype(dtype)
