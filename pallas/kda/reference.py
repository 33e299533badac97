"""KDA token by token in float32: the definition that every faster form is compared with.

State S [key, value] per head, in this order (spec: decay, predict, write, read):

    S <- Diag(exp g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas.kda.inputs import TokenInputs, gated_norm, token_inputs, window_at
from pallas.kda.types import KdaWeights, Prefill, Records


def rounded(product: jax.Array) -> jax.Array:
    """The product itself, in a form that no compiler contracts with a following sum into a fused multiply-add."""
    return jnp.minimum(product, jnp.finfo(product.dtype).max)


def write_token(
    state: Float32[Array, "B H D V"],
    key: Float32[Array, "B H D"],
    decay: Float32[Array, "B H D"],
    write: Float32[Array, "B H V"],
) -> Float32[Array, "B H D V"]:
    """Diag(exp g) S + k u^T: all of the recurrence once u is known.

    `step` and `commit` share it and agree bit for bit: of two products under a sum a compiler contracts one, not the
    same one in every program, hence `rounded`.
    """
    return rounded(jnp.exp(decay)[..., None] * state) + rounded(key[..., None] * write[..., None, :])


def step(
    state: Float32[Array, "B H D V"], token: TokenInputs
) -> tuple[Float32[Array, "B H D V"], Float32[Array, "B H V"], Float32[Array, "B H V"]]:
    """One token for every row and head: (new state, reading o, write vector u). `token` has no T axis."""
    decayed = jnp.exp(token.decay)[..., None] * state
    predicted = jnp.sum(decayed * token.key[..., None], axis=-2)
    write = token.beta[..., None] * (token.value - predicted)
    state = write_token(state, token.key, token.decay, write)
    return state, jnp.sum(state * token.query[..., None], axis=-2), write


def scan_tokens(
    inputs: TokenInputs, state: Float32[Array, "B H D D"]
) -> tuple[Float32[Array, "B H D D"], Float32[Array, "B T H D"], Records]:
    """All tokens in order: (final state, readings, records)."""

    def body(state: jax.Array, token: TokenInputs) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        state, reading, write = step(state, token)
        return state, (reading, write)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
    state, outputs = jax.lax.scan(body, state, tokens)
    readings, writes = (jnp.moveaxis(x, 0, 1) for x in outputs)
    return state, readings, Records(writes, inputs.key, inputs.decay)


def states_at(
    records: Records, state: Float32[Array, "B H D D"], position: Int32[Array, "B N"]
) -> Float32[Array, "B N H D D"]:
    """The state after `position` tokens, by replay of the records."""

    def body(states: jax.Array, item: tuple[jax.Array, Records]) -> tuple[jax.Array, None]:
        index, record = item
        written = jax.vmap(write_token, in_axes=(1, None, None, None), out_axes=1)(
            states, record.key, record.decay, record.write
        )
        return jnp.where((index < position)[:, :, None, None, None], written, states), None

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), records)
    start = jnp.broadcast_to(state[:, None], (state.shape[0], position.shape[1], *state.shape[1:]))
    index = jnp.arange(records.key.shape[1], dtype=jnp.int32)
    return jax.lax.scan(body, start, (index, tokens))[0]


def recurrent(
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
) -> Prefill:
    """`api.recurrent` without dispatch."""
    valid = jnp.arange(qkvz.shape[1], dtype=jnp.int32)[None] < length[:, None]
    inputs = token_inputs(qkvz, decay_logits, beta_logits, weights, window, valid, lower_bound)
    final, readings, records = scan_tokens(inputs, state)
    output = gated_norm(readings, qkvz[..., 3, :], weights.norm, norm_eps)
    output = jnp.where(valid[:, :, None, None], output, jnp.zeros_like(output))
    raw = qkvz[..., :3, :]
    last = window_at(raw, window, length)
    if boundaries is None:
        return Prefill(output, final, last, None, None)
    position = jnp.clip(boundaries, 0, length[:, None])
    return Prefill(output, final, last, states_at(records, state, position), window_at(raw, window, position))
