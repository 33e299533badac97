"""KDA prefill on Mosaic GPU: `mosaic_intra` over all blocks of 64 tokens, then `mosaic_state` along the sequence.

States at boundaries are captured by the second kernel at the chunk start before them, without splitting the launch;
the up to 31 tokens between are replayed by the portable form, and only when a boundary does not fall on a chunk.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas.kda.chunked import chunked
from pallas.kda.inputs import packed_windows, token_inputs, window_at
from pallas.kda.mosaic_affine import segment_maps, start_states
from pallas.kda.mosaic_chunk import BLOCK, CHUNK
from pallas.kda.mosaic_decode import require_supported
from pallas.kda.mosaic_intra import intra, packing
from pallas.kda.mosaic_state import recur
from pallas.kda.mosaic_token import MULTIPROCESSORS
from pallas.kda.types import Affine, KdaWeights, Prefill

SHORTEST_SEGMENT = 512
"""Tokens below which cutting costs more than the chip's idle part."""


def require_prefill(channels: int, dtype: jnp.dtype, lower_bound: float) -> None:
    """Raises `NotImplementedError` with the reason for a call that the prefill kernels do not serve."""
    require_supported(channels, dtype)
    if lower_bound < -5.0:
        raise NotImplementedError(f"kda mosaic prefill holds decays down to lower_bound -5, got {lower_bound}")


def pad_tokens(x: jax.Array) -> jax.Array:
    """Fills the token axis up to whole blocks; a copy, so callers that care pass whole blocks."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % BLOCK)] + [(0, 0)] * (x.ndim - 2))


def segment_count(sequences: int, tokens: int) -> int:
    """Pieces of every sequence: as many as keep the maps of all but the last in one wave, none too short to pay.

    Two pieces would not pay: both passes over half of the tokens take as long as one over all.
    """
    count = min(1 + MULTIPROCESSORS // (2 * sequences), tokens // SHORTEST_SEGMENT)
    return count if count > 2 else 1


def replay(
    tokens: tuple[jax.Array, jax.Array, jax.Array],
    weights: KdaWeights,
    window: Float[Array, "B 3 H 3 D"],
    captured: Float32[Array, "B N H D D"],
    position: Int32[Array, "B N"],
    lower_bound: float,
) -> Float32[Array, "B N H D D"]:
    """The states `position` tokens in, from those at the chunk starts before."""
    rows, count = position.shape
    start, rest = position // CHUNK * CHUNK, position % CHUNK
    qkvz = tokens[0]

    def piece(x: jax.Array) -> jax.Array:
        cut = lambda row, at: lax.dynamic_slice_in_dim(row, at, CHUNK, axis=0)  # noqa: E731
        pieces = jax.vmap(jax.vmap(cut, in_axes=(None, 0)))(x, start)
        return pieces.reshape(rows * count, *pieces.shape[2:])

    def run() -> jax.Array:
        windows = window_at(qkvz[..., :3, :], window, start)
        flat = windows.reshape(rows * count, *windows.shape[2:])
        valid = jnp.arange(CHUNK, dtype=jnp.int32)[None] < rest.reshape(-1)[:, None]
        inputs = token_inputs(*(piece(x) for x in tokens), weights, flat, valid, lower_bound)
        return chunked(inputs, captured.reshape(rows * count, *captured.shape[2:]), None)[1].reshape(captured.shape)

    return lax.cond(jnp.any(rest > 0), run, lambda: captured)


def prefill(
    qkvz: Float[Array, "B T H 4 D"],
    decay_logits: Float[Array, "B T H D"],
    beta_logits: Float[Array, "B T H"],
    weights: KdaWeights,
    state: Float32[Array, "B H D D"],
    window: Float[Array, "B 3 H 3 D"],
    length: Int32[Array, "B"],
    boundaries: Int32[Array, "B N"] | None,
    lower_bound: float,
    norm_eps: float,
    interpret: Any = None,
) -> Prefill:
    """`api.prefill`."""
    require_prefill(qkvz.shape[-1], qkvz.dtype, lower_bound)
    tokens = qkvz.shape[1]
    padded = tuple(pad_tokens(x) for x in (qkvz, decay_logits, beta_logits))
    operands = intra(*padded, weights, window, length, lower_bound, interpret)
    position = None if boundaries is None else jnp.clip(boundaries, 0, length[:, None])
    home = jnp.full((qkvz.shape[0], 1), -1, jnp.int32) if position is None else position // CHUNK
    turned = jnp.swapaxes(state, -1, -2)
    segments = segment_count(qkvz.shape[0] * qkvz.shape[2], padded[0].shape[1])
    if segments > 1:
        starts = start_states(turned, segment_maps(operands, length, segments, segments - 1, interpret), interpret)
    else:
        starts = turned[:, None]
    output, final, captured = recur(operands, padded[0], weights.norm, starts, length, home, norm_eps, interpret)
    final, captured = jnp.swapaxes(final, -1, -2), jnp.swapaxes(captured, -1, -2)
    raw = qkvz[..., :3, :]
    last = window_at(raw, window, length)
    if position is None:
        return Prefill(output[:, :tokens], final, last, None, None)
    states = replay(padded, weights, window, captured, position, lower_bound)
    return Prefill(output[:, :tokens], final, last, states, window_at(raw, window, position))


def prefill_packed(
    qkvz: Float[Array, "T H 4 D"],
    decay_logits: Float[Array, "T H D"],
    beta_logits: Float[Array, "T H"],
    weights: KdaWeights,
    state: Float32[Array, "R H D D"],
    window: Float[Array, "R 3 H 3 D"],
    start: Int32[Array, "R"],
    length: Int32[Array, "R"],
    lower_bound: float,
    norm_eps: float,
    interpret: Any = None,
) -> Prefill:
    """`api.prefill_packed`: the same kernels, whose pieces find their row in a table."""
    require_prefill(qkvz.shape[-1], qkvz.dtype, lower_bound)
    tokens = qkvz.shape[0]
    line = tuple(pad_tokens(x[None]) for x in (qkvz, decay_logits, beta_logits))
    packed = packing(start, line[0].shape[1])
    operands = intra(*line, weights, window, length, lower_bound, interpret, packed)
    turned, home = jnp.swapaxes(state, -1, -2)[:, None], jnp.full((len(start), 1), -1, jnp.int32)
    output, final, _ = recur(operands, line[0], weights.norm, turned, length, home, norm_eps, interpret, packed)
    last = packed_windows(qkvz[..., :3, :], window, start, length)
    return Prefill(output[0, :tokens], jnp.swapaxes(final, -1, -2), last, None, None)


def affine(
    qkvz: Float[Array, "B T H 4 D"],
    decay_logits: Float[Array, "B T H D"],
    beta_logits: Float[Array, "B T H"],
    weights: KdaWeights,
    window: Float[Array, "B 3 H 3 D"],
    length: Int32[Array, "B"],
    lower_bound: float,
    interpret: Any = None,
) -> Affine:
    """`api.affine`."""
    require_prefill(qkvz.shape[-1], qkvz.dtype, lower_bound)
    padded = tuple(pad_tokens(x) for x in (qkvz, decay_logits, beta_logits))
    maps = segment_maps(intra(*padded, weights, window, length, lower_bound, interpret), length, 1, 1, interpret)
    transition = maps.transition[:, 0].astype(jnp.float32).sum(axis=1)
    return Affine(jnp.swapaxes(transition, -1, -2), jnp.swapaxes(maps.local[:, 0], -1, -2))
