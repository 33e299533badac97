"""The portable KDA backend in plain JAX: any device, head size, activation dtype, and differentiable."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas.kda.chunked import chunked
from pallas.kda.inputs import TokenInputs, gated_norm, token_inputs, window_at
from pallas.kda.reference import step, write_token
from pallas.kda.types import Affine, Decode, KdaWeights, Pools, Prefill, Records, Verify


def valid_tokens(tokens: int, length: Int32[Array, "B"]) -> Bool[Array, "B T"]:
    """True for the first `length` tokens of each row."""
    return jnp.arange(tokens, dtype=jnp.int32)[None] < length[:, None]


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
) -> Prefill:
    """`api.prefill`, in chunks."""
    valid = valid_tokens(qkvz.shape[1], length)
    inputs = token_inputs(qkvz, decay_logits, beta_logits, weights, window, valid, lower_bound)
    position = None if boundaries is None else jnp.clip(boundaries, 0, length[:, None])
    readings, final, captured = chunked(inputs, state, position)
    output = gated_norm(readings, qkvz[..., 3, :], weights.norm, norm_eps)
    output = jnp.where(valid[:, :, None, None], output, jnp.zeros_like(output))
    raw = qkvz[..., :3, :]
    windows = None if position is None else window_at(raw, window, position)
    return Prefill(output, final, window_at(raw, window, length), captured, windows)


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
) -> Prefill:
    """`api.prefill_packed` by taking the rows apart: every row gets the memory of all tokens."""
    place = jnp.arange(qkvz.shape[0], dtype=jnp.int32)
    apart = (x[jnp.clip(start[:, None] + place[None], 0, len(place) - 1)] for x in (qkvz, decay_logits, beta_logits))
    result = prefill(*apart, weights, state, window, length, None, lower_bound, norm_eps)
    row = jnp.sum(place[:, None] >= start[None], axis=1) - 1
    return result._replace(output=result.output[row, place - start[row]])


def affine(
    qkvz: Float[Array, "B T H 4 D"],
    decay_logits: Float[Array, "B T H D"],
    beta_logits: Float[Array, "B T H"],
    weights: KdaWeights,
    window: Float[Array, "B 3 H 3 D"],
    length: Int32[Array, "B"],
    lower_bound: float,
) -> Affine:
    """`api.affine`: the recurrence on the state [I | 0] with values [0 | v] carries both parts at once."""
    rows, tokens, heads, _, channels = qkvz.shape
    valid = valid_tokens(tokens, length)
    inputs = token_inputs(qkvz, decay_logits, beta_logits, weights, window, valid, lower_bound)
    value = jnp.concatenate([jnp.zeros_like(inputs.value), inputs.value], axis=-1)
    start = jnp.eye(channels, 2 * channels, dtype=jnp.float32)
    start = jnp.broadcast_to(start[None, None], (rows, heads, channels, 2 * channels))
    _, end, _ = chunked(inputs._replace(value=value), start, None)
    return Affine(end[..., :channels], end[..., channels:])


def compose(first: Affine, second: Affine) -> Affine:
    """`api.compose`."""

    def apply(state: jax.Array) -> jax.Array:
        return jnp.matmul(second.transition, state, precision=jax.lax.Precision.HIGHEST)

    return Affine(apply(first.transition), apply(first.local_state) + second.local_state)


def targets(slot: Int32[Array, "B"], pool: Array) -> Int32[Array, "B"]:
    """Where a row writes: its slot, or for the dummy slot 0 past the end, where a scatter drops it."""
    return jnp.where(slot == 0, pool.shape[0], slot)


def one_token(
    carry: tuple[jax.Array, jax.Array],
    item: tuple[jax.Array, ...],
    weights: KdaWeights,
    lower_bound: float,
    norm_eps: float,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, Records]]:
    """Decode of one token per row on (state, window); `item` is (qkvz, decay logits, beta logits, valid), no T axis.

    Decode runs it once and verify in a scan: the same operations on the same shapes, so that both round alike.
    """
    state, window = carry
    qkvz, decay_logits, beta_logits, valid = item
    raw = qkvz[:, None]
    inputs = token_inputs(
        raw, decay_logits[:, None], beta_logits[:, None], weights, window, valid[:, None], lower_bound
    )
    # Barriers keep the compiler from fusing, hence rounding, these parts in one way here and in another there.
    token = jax.lax.optimization_barrier(TokenInputs(*(x[:, 0] for x in inputs)))
    state, reading, write = jax.lax.optimization_barrier(step(state, token))
    output = gated_norm(reading, qkvz[..., 3, :], weights.norm, norm_eps)
    output = jnp.where(valid[:, None, None], output, jnp.zeros_like(output))
    window = jnp.concatenate([window[:, 1:], raw[..., :3, :].astype(window.dtype)], axis=1)
    return (state, window), (output, Records(write, token.key, token.decay))


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
) -> Decode:
    """`api.decode`."""
    state = jnp.where(fresh[:, None, None, None], 0.0, state_pool[slot])
    window = window_pool[slot]
    window = jnp.where(fresh[:, None, None, None, None], jnp.zeros_like(window), window)
    item = (qkvz, decay_logits, beta_logits, slot != 0)
    (state, window), (output, _) = one_token((state, window), item, weights, lower_bound, norm_eps)
    place = targets(slot, state_pool)
    return Decode(output, state_pool.at[place].set(state, mode="drop"), window_pool.at[place].set(window, mode="drop"))


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
) -> Verify:
    """`api.verify`."""
    valid = valid_tokens(qkvz.shape[1], length) & (slot != 0)[:, None]
    items = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (qkvz, decay_logits, beta_logits, valid))
    body = partial(one_token, weights=weights, lower_bound=lower_bound, norm_eps=norm_eps)
    _, results = jax.lax.scan(body, (state_pool[slot], window_pool[slot]), items)
    return Verify(*jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), results))


def commit(
    records: Records,
    qkvz: Float[Array, "B W H 4 D"],
    state_pool: Float32[Array, "S H D D"],
    window_pool: Float[Array, "S 3 H 3 D"],
    slot: Int32[Array, "B"],
    accepted: Int32[Array, "B"],
) -> Pools:
    """`api.commit`."""

    def replay(state: jax.Array, item: tuple[jax.Array, Records]) -> tuple[jax.Array, None]:
        index, record = item
        written = write_token(state, record.key, record.decay, record.write)
        return jnp.where((index < accepted)[:, None, None, None], written, state), None

    index = jnp.arange(qkvz.shape[1], dtype=jnp.int32)
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), records)
    state, _ = jax.lax.scan(replay, state_pool[slot], (index, tokens))
    window = window_at(qkvz[..., :3, :], window_pool[slot], accepted).astype(window_pool.dtype)
    place = targets(slot, state_pool)
    return Pools(state_pool.at[place].set(state, mode="drop"), window_pool.at[place].set(window, mode="drop"))


def commit_layers(
    records: Sequence[Records],
    qkvz: Sequence[Float[Array, "B W H 4 D"]],
    pools: Sequence[Pools],
    slot: Int32[Array, "B"],
    accepted: Int32[Array, "B"],
) -> list[Pools]:
    """`api.commit_layers`, layer by layer."""
    return [commit(*layer, *pool, slot, accepted) for *layer, pool in zip(records, qkvz, pools)]
