"""From raw projections to what the recurrence reads, and from its reading to the gated output.

Kimi K3 report, section 2.1 (KDA): causal convolution and SiLU on q, k, v; L2-normalised q and k; bounded log decay g
= lower_bound * sigmoid(exp(a_log) * (f + dt_bias)); write strength beta = sigmoid(b). All in float32; a value that
the layer rounds to the activation dtype is rounded here too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas.kda.types import KEY_EPS, WINDOW, KdaWeights


class TokenInputs(NamedTuple):
    """Per-token operands of the recurrence, float32; the query is normalised and scaled by D**-0.5."""

    query: Float32[Array, "B T H D"]
    key: Float32[Array, "B T H D"]
    value: Float32[Array, "B T H V"]
    decay: Float32[Array, "B T H D"]
    beta: Float32[Array, "B T H"]


def unit(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """X / sqrt(sum of squares + 1e-6) over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + KEY_EPS)


def convolve(
    raw: Float[Array, "B T H 3 D"], window: Float[Array, "B 3 H 3 D"], taps: Float32[Array, "4 H 3 D"]
) -> Float32[Array, "B T H 3 D"]:
    """SiLU of the causal convolution, rounded to `raw.dtype` and widened again; `window` holds the rows before."""
    rows = jnp.concatenate([window.astype(raw.dtype), raw], axis=1).astype(jnp.float32)
    length = raw.shape[1]
    mixed = rows[:, :length] * taps[0][None, None]
    for tap in range(1, WINDOW + 1):
        mixed = mixed + rows[:, tap : tap + length] * taps[tap][None, None]
    return jax.nn.silu(mixed).astype(raw.dtype).astype(jnp.float32)


def log_decay(logits: Float[Array, "B T H D"], weights: KdaWeights, lower_bound: float) -> Float32[Array, "B T H D"]:
    """G = lower_bound * sigmoid(exp(a_log) * (f + dt_bias)), in (lower_bound, 0)."""
    speed = jnp.exp(weights.a_log)[None, None, :, None]
    return lower_bound * jax.nn.sigmoid(speed * (logits.astype(jnp.float32) + weights.dt_bias[None, None]))


def token_inputs(
    qkvz: Float[Array, "B T H 4 D"],
    decay_logits: Float[Array, "B T H D"],
    beta_logits: Float[Array, "B T H"],
    weights: KdaWeights,
    window: Float[Array, "B 3 H 3 D"],
    valid: Bool[Array, "B T"],
    lower_bound: float,
) -> TokenInputs:
    """Operands of the recurrence; all zero where not `valid`, so that the token neither changes nor reads the state."""
    mixed = convolve(qkvz[..., :3, :], window, weights.conv)
    scale = qkvz.shape[-1] ** -0.5
    inputs = TokenInputs(
        unit(mixed[..., 0, :]) * scale,
        unit(mixed[..., 1, :]),
        mixed[..., 2, :],
        log_decay(decay_logits, weights, lower_bound),
        jax.nn.sigmoid(beta_logits.astype(jnp.float32)),
    )
    return TokenInputs(*(jnp.where(jnp.expand_dims(valid, tuple(range(2, x.ndim))), x, 0.0) for x in inputs))


def gated_norm(
    reading: Float32[Array, "*rows H D"], gate: Float[Array, "*rows H D"], norm: Float32[Array, "D"], eps: float
) -> Float[Array, "*rows H D"]:
    """RMSNorm(reading) * norm * sigmoid(gate) per head in float32; reading and result are rounded to `gate.dtype`."""
    rounded = reading.astype(gate.dtype).astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(rounded * rounded, axis=-1, keepdims=True) + eps)
    open_ = jax.nn.sigmoid(gate.astype(jnp.float32))
    weight = jnp.expand_dims(norm, tuple(range(reading.ndim - 1)))
    return (rounded * scale * weight * open_).astype(gate.dtype)


def window_at(
    raw: Float[Array, "B T H 3 D"], window: Float[Array, "B 3 H 3 D"], position: Int32[Array, "B *N"]
) -> Float[Array, "B *N 3 H 3 D"]:
    """The window after `position` tokens of this call: the three rows before it, reaching back into `window`."""
    rows = jnp.concatenate([window.astype(raw.dtype), raw], axis=1)
    index = jnp.stack([position + offset for offset in range(WINDOW)], axis=-1)
    return jax.vmap(lambda row, at: row[at])(rows, index)


def packed_windows(
    raw: Float[Array, "T H 3 D"], window: Float[Array, "R 3 H 3 D"], start: Int32[Array, "R"], length: Int32[Array, "R"]
) -> Float[Array, "R 3 H 3 D"]:
    """The windows after rows of `length` tokens that start at `start` of one line: `window_at` for packed rows."""
    offset = jnp.arange(WINDOW, dtype=jnp.int32)[None]
    within = length[:, None] - WINDOW + offset
    new = raw[jnp.clip(start[:, None] + within, 0, raw.shape[0] - 1)]
    old = jax.vmap(lambda row, at: row[at])(window.astype(raw.dtype), jnp.minimum(length[:, None] + offset, WINDOW - 1))
    return jnp.where((within >= 0)[:, :, None, None, None], new, old)
