"""KDA in chunks: matrix products inside a chunk, one short recurrence over chunks.

With G the inclusive cumulative log decay inside a chunk that starts at state S0 (arXiv 2510.26692, section 3):

    L_ij = beta_i <k_i, k_j exp(G_i - G_j)>  (j < i)        A_ij = <q_i, k_j exp(G_i - G_j)>  (j <= i)
    (I + L) [W | U] = beta [K exp(G) | V]                   u = U - W S0
    o = (Q exp(G)) S0 + A u                                 S1 = Diag(exp G_C) S0 + (K exp(G_C - G))^T u

G may fall by 5 a token, so exp(-G) of a whole chunk overflows. Rows are taken in tiles of 16, each with its own
reference point in the middle of the tile: no exponent passes 8 * 5 = 40, and keys of later tiles are masked before
the exponential.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas.kda.inputs import TokenInputs

TILE = 16
CHUNK = 64
HIGHEST = jax.lax.Precision.HIGHEST


class ChunkFactors(NamedTuple):
    """What the recurrence over chunks needs of a chunk; leading axes are [chunk, row, head]."""

    query: Float32[Array, "*N C D"]
    attention: Float32[Array, "*N C C"]
    pull: Float32[Array, "*N C D"]
    push: Float32[Array, "*N C V"]
    key: Float32[Array, "*N C D"]
    decay: Float32[Array, "*N D"]


def dot(left: jax.Array, right: jax.Array, spec: str) -> jax.Array:
    """Einsum at full float32 precision."""
    return jnp.einsum(spec, left, right, precision=HIGHEST)


def suffix_sum(x: Float32[Array, "*N C D"]) -> Float32[Array, "*N C D"]:
    """Sum of the rows after each row. Summed from the end, so small sums carry small errors."""
    inclusive = jax.lax.cumsum(x, axis=x.ndim - 2, reverse=True)
    return jnp.concatenate([inclusive[..., 1:, :], jnp.zeros_like(x[..., :1, :])], axis=-2)


def between_tiles(totals: Float32[Array, "*N A D"]) -> Float32[Array, "*N A A D"]:
    """[a, b]: decay of the tiles strictly between b and a, summed directly rather than as a difference."""
    index = jnp.arange(totals.shape[-2])
    inside = (index[None, None] > index[None, :, None]) & (index[None, None] < index[:, None, None])
    return dot(inside.astype(jnp.float32), totals, "abt,...td->...abd")


def tile_exponents(decay: Float32[Array, "*N C D"]) -> tuple[Float32[Array, "*N A R D"], Float32[Array, "*N A C D"]]:
    """Exponents with exp(row[a, i] + column[a, j]) = exp(G_i - G_j) for row i of tile a and j in tiles <= a."""
    *lead, length, channels = decay.shape
    tiles = decay.reshape(*lead, length // TILE, TILE, channels)
    within = jax.lax.cumsum(tiles, axis=tiles.ndim - 2)
    middle = within[..., TILE // 2 - 1 : TILE // 2, :]
    earlier = (middle + between_tiles(tiles.sum(axis=-2)))[..., None, :] + suffix_sum(tiles)[..., None, :, :, :]
    own = (middle - within)[..., None, :, :]
    index = jnp.arange(length // TILE)
    row, column = index[:, None, None, None], index[None, :, None, None]
    lead_axes = tuple(range(len(lead)))
    same, before = (jnp.expand_dims(x, lead_axes) for x in (row == column, row > column))
    exponents = jnp.where(same, own, jnp.where(before, earlier, -jnp.inf))
    return within - middle, exponents.reshape(*lead, length // TILE, length, channels)


def pair_products(inputs: TokenInputs) -> tuple[jax.Array, jax.Array]:
    """(<k_i, k_j exp(G_i - G_j)> for j < i, <q_i, k_j exp(G_i - G_j)> for j <= i), each [..., C, C], zero elsewhere."""
    row, column = tile_exponents(inputs.decay)
    *lead, length, channels = inputs.decay.shape
    keys = inputs.key[..., None, :, :] * jnp.exp(column)
    grow = jnp.exp(row)

    def against_keys(rows: jax.Array) -> jax.Array:
        scaled = rows.reshape(*lead, length // TILE, TILE, channels) * grow
        return dot(scaled, keys, "...ird,...ijd->...irj").reshape(*lead, length, length)

    lower = jnp.tri(length, k=-1, dtype=bool), jnp.tri(length, dtype=bool)
    products = against_keys(inputs.key), against_keys(inputs.query)
    below, at_most = (
        jnp.where(jnp.expand_dims(m, tuple(range(len(lead)))), p, 0.0) for m, p in zip(lower, products, strict=True)
    )
    return below, at_most


@jax.custom_vjp
def unit_lower_inverse(lower: Float32[Array, "*N C C"]) -> Float32[Array, "*N C C"]:
    """(I + L)^-1 for strictly lower L by block forward substitution, blocks of 1, 2, 4, ... rows.

    Joining two inverted diagonal blocks needs only -C^-1 B A^-1; unlike a Neumann series no power of L appears, so
    near-collinear keys cost no digits.
    """
    length = lower.shape[-1]
    index = jnp.arange(length)
    inverse = jnp.broadcast_to(jnp.eye(length, dtype=jnp.float32), lower.shape)
    size = 1
    while size < length:
        block = index // size
        joint = (block[:, None] == block[None] + 1) & (block[None] % 2 == 0)
        corner = jnp.where(jnp.expand_dims(joint, tuple(range(lower.ndim - 2))), lower, 0.0)
        if size > 1:
            corner = dot(dot(inverse, corner, "...ij,...jk->...ik"), inverse, "...ij,...jk->...ik")
        inverse = inverse - corner
        size *= 2
    return inverse


def _inverse_forward(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    """d(M^-1) = -M^-1 dM M^-1: two products instead of the twenty of the substitution's own transpose."""
    left = dot(inverse, gradient, "...ji,...jk->...ik")
    return (-dot(left, inverse, "...ij,...kj->...ik"),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def chunk_factors(inputs: TokenInputs) -> ChunkFactors:
    """Everything of a chunk that does not depend on the state; `inputs` are [..., C, channels], beta [..., C]."""
    lower, attention = pair_products(inputs)
    beta = inputs.beta[..., None]
    from_start = jnp.exp(jax.lax.cumsum(inputs.decay, axis=inputs.decay.ndim - 2))
    inverse = unit_lower_inverse(beta * lower)
    return ChunkFactors(
        query=inputs.query * from_start,
        attention=attention,
        pull=dot(inverse, beta * inputs.key * from_start, "...ij,...jd->...id"),
        push=dot(inverse, beta * inputs.value, "...ij,...jd->...id"),
        key=inputs.key * jnp.exp(suffix_sum(inputs.decay)),
        decay=jnp.exp(jnp.sum(inputs.decay, axis=-2)),
    )


def into_chunks(inputs: TokenInputs, size: int) -> TokenInputs:
    """[B, T, H, ...] -> [N, B, H, size, ...]; the tail is filled with inert (zero) tokens."""

    def split(x: jax.Array) -> jax.Array:
        rows, tokens = x.shape[:2]
        x = jnp.pad(x, [(0, 0), (0, -tokens % size)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, -1, size, *x.shape[2:]), (1, 2), (0, 3))

    return TokenInputs(*map(split, inputs))


def chunk_size(tokens: int) -> int:
    """A short call takes a short chunk: 16, 32 or 64 tokens."""
    return next((size for size in (TILE, 2 * TILE) if tokens <= size), CHUNK)


def advance(state: jax.Array, factors: ChunkFactors) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One chunk: (state after it, readings [..., C, V], write vectors u [..., C, V])."""
    write = factors.push - dot(factors.pull, state, "...cd,...dv->...cv")
    reading = dot(factors.query, state, "...cd,...dv->...cv") + dot(factors.attention, write, "...ij,...jv->...iv")
    state = factors.decay[..., None] * state + dot(factors.key, write, "...cd,...cv->...dv")
    return state, reading, write


def partial_state(
    state: jax.Array, key: jax.Array, decay: jax.Array, write: jax.Array, count: Int32[Array, "B"]
) -> jax.Array:
    """The state `count` tokens into the chunk that starts at `state`; key, decay, write are [B, H, C, channels]."""
    inside = (jnp.arange(key.shape[-2])[None] < count[:, None])[:, None, :, None]
    decay = jnp.where(inside, decay, 0.0)
    key = jnp.where(inside, key * jnp.exp(suffix_sum(decay)), 0.0)
    return jnp.exp(jnp.sum(decay, axis=-2))[..., None] * state + dot(key, write, "...cd,...cv->...dv")


def chunked(
    inputs: TokenInputs, state: Float32[Array, "B H D V"], boundaries: Int32[Array, "B N"] | None
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B H D V"], Float32[Array, "B N H D V"] | None]:
    """(readings, final state, states after `boundaries` tokens); boundaries must lie in [0, T]."""
    tokens = inputs.key.shape[1]
    size = chunk_size(tokens)
    chunks = into_chunks(inputs, size)
    factors = chunk_factors(chunks)
    home = None if boundaries is None else boundaries // size
    captured = None if boundaries is None else jnp.repeat(state[:, None], boundaries.shape[1], axis=1)

    def body(carry: tuple, item: tuple[jax.Array, ChunkFactors]) -> tuple[tuple, tuple]:
        state, captured = carry
        index, chunk = item
        if captured is not None:
            captured = jnp.where((home == index)[:, :, None, None, None], state[:, None], captured)
        state, reading, write = advance(state, chunk)
        return (state, captured), (reading, None if captured is None else write)

    index = jnp.arange(chunks.key.shape[0], dtype=jnp.int32)
    (state, captured), (readings, writes) = jax.lax.scan(body, (state, captured), (index, factors))
    rows, heads, _, values = state.shape
    readings = jnp.moveaxis(readings, (0, 3), (1, 2)).reshape(rows, -1, heads, values)
    if boundaries is not None:
        captured = boundary_states(captured, state, chunks, writes, boundaries, size)
    return readings[:, :tokens], state, captured


def boundary_states(
    captured: jax.Array, final: jax.Array, chunks: TokenInputs, writes: jax.Array, boundaries: jax.Array, size: int
) -> Float32[Array, "B N H D V"]:
    """Replays the chunk of each boundary up to it; a boundary on the end of the last chunk is the final state."""
    home = jnp.minimum(boundaries // size, chunks.key.shape[0] - 1)
    rows = jnp.arange(final.shape[0])
    states = []
    for n in range(boundaries.shape[1]):
        key, decay, write = (x[home[:, n], rows] for x in (chunks.key, chunks.decay, writes))
        state = partial_state(captured[:, n], key, decay, write, boundaries[:, n] % size)
        at_end = (boundaries[:, n] == chunks.key.shape[0] * size)[:, None, None, None]
        states.append(jnp.where(at_end, final, state))
    return jnp.stack(states, axis=1)
