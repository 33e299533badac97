"""One KDA token of one head inside a Mosaic GPU kernel, shared by decode, verify and commit.

One warpgroup (128 threads) owns the whole 128 x 128 state of a head in registers. Keys are split over the four warps and
values over the lanes, four neighbouring values a lane: a row of the state is one 512-byte access of a warp, sums over keys
are local up to one exchange between warps, and a key is a register that all lanes of a warp share.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas.kda.types import KEY_EPS

CHANNELS = 128
ROWS = 5
"""Rows that `token_vectors` leaves per token: query, key, value, output-gate logits, exp of the decay."""

ROW_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((4, CHANNELS), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
"""[4, 128]: a row per warp, so that sums over channels stay inside a warp."""

STATE_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((CHANNELS, CHANNELS), (32, CHANNELS), (4,))), warp_dims=(-5,), lane_dims=(-2,), vector_dim=-1
)
KEY_LAYOUT = STATE_LAYOUT.reduce(1)
VALUE_LAYOUT = STATE_LAYOUT.reduce(0)


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + jnp.exp(-x))


def spread(x: jax.Array, axis: int, shape: tuple[int, int], layout: Any) -> jax.Array:
    """`x` along `axis` of a matrix in the given layout."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (axis,)), layout)


def token_vectors(raw: Any, taps: Any, vectors: Any, token: int) -> None:
    """Convolution, SiLU and L2 norms of a token: rows `ROWS * token` .. + 3 of `vectors` become q, k, v and z.

    `raw` [4 * (tokens + 3), 128] holds q, k, v, z of the window's three tokens and of the new ones; `taps` [13, 128] the
    convolution weights, three rows a tap.
    """
    mixed = jnp.zeros((4, CHANNELS), jnp.float32)
    mixed = plgpu.layout_cast(mixed, ROW_LAYOUT)
    for tap in range(4):
        rows = plgpu.load(raw.at[pl_ds(4 * (token + tap), 4)], layout=ROW_LAYOUT)
        mixed = mixed + rows.astype(jnp.float32) * plgpu.load(taps.at[pl_ds(3 * tap, 4)], layout=ROW_LAYOUT)
    active = (mixed * sigmoid(mixed)).astype(raw.dtype).astype(jnp.float32)
    inverse = lax.rsqrt((active * active).sum(axis=1) + KEY_EPS)
    unit = active * spread(inverse, 0, (4, CHANNELS), ROW_LAYOUT)
    row = plgpu.broadcasted_iota(jnp.int32, (4, CHANNELS), 0, layout=ROW_LAYOUT)
    now = plgpu.load(raw.at[pl_ds(4 * (token + 3), 4)], layout=ROW_LAYOUT).astype(jnp.float32)
    result = jnp.where(row == 0, unit * CHANNELS**-0.5, jnp.where(row == 1, unit, jnp.where(row == 2, active, now)))
    vectors[pl_ds(ROWS * token, 4), :] = result


def pl_ds(start: int, size: int) -> slice:
    """A static slice."""
    return slice(start, start + size)


def log_decay(logits: jax.Array, a_log: jax.Array, dt_bias: jax.Array, lower_bound: float) -> jax.Array:
    """g of a token of a head, [128]; `a_log` is a scalar."""
    return lower_bound * sigmoid(jnp.exp(a_log) * (logits.astype(jnp.float32) + dt_bias))


def write_token(state: jax.Array, key: jax.Array, retain: jax.Array, write: jax.Array) -> jax.Array:
    """Diag(exp g) S + k u^T with `key` and `retain` spread over the state; the barrier keeps both products apart, so that
    decode, verify and commit round alike."""
    return lax.optimization_barrier(state * retain) + key * spread(write, 1, (CHANNELS, CHANNELS), STATE_LAYOUT)


def step(
    state: jax.Array, vectors: Any, token: int | jax.Array, beta: jax.Array, overlap: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Decay, predict, write, read: (new state, reading o, write vector u).

    o = S^T q is taken before the write as (decayed S)^T q + <k, q> u, so that both sums over keys wait for nothing but the
    decayed state. `overlap` is <k, q>.
    """
    load = lambda row, layout: plgpu.load(vectors.at[ROWS * token + row], layout=layout)  # noqa: E731
    shape = (CHANNELS, CHANNELS)
    query, key, retain = (spread(load(row, KEY_LAYOUT), 0, shape, STATE_LAYOUT) for row in (0, 1, 4))
    decayed = lax.optimization_barrier(state * retain)
    predicted = (decayed * key).sum(axis=0)
    reading = (decayed * query).sum(axis=0)
    write = beta * (load(2, VALUE_LAYOUT) - predicted)
    return write_token(state, key, retain, write), reading + overlap * write, write


def gated_norm(reading: jax.Array, gate: jax.Array, norm: jax.Array, eps: float, dtype: jnp.dtype) -> jax.Array:
    """RMSNorm(reading) * norm * sigmoid(gate) over the 128 values, rounded to `dtype`."""
    rounded = reading.astype(dtype).astype(jnp.float32)
    scale = lax.rsqrt((rounded * rounded).sum(axis=0) / CHANNELS + eps)
    return (rounded * scale * norm * sigmoid(gate)).astype(dtype)
