"""Experts spread over devices: every token goes once to each device that holds one of its experts, and comes back.

Runs inside `jax.shard_map` with tokens and experts split over one mesh axis. Rows travel in rounds of a fixed number
of rows per pair of devices, as many rounds as the fullest pair needs, so nothing is ever dropped. Each device sums
its own experts of a token in float32; the sums are added in the order of devices and rounded once.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas.dispatch import Implementation
from pallas.moe import api
from pallas.moe.types import Experts


class _Routes(NamedTuple):
    """Which devices each token goes to, and its place among the tokens that go there."""

    goes: Bool[Array, "N P"]
    rank: Int32[Array, "N P"]


def rows_per_round(tokens: int, k: int, devices: int) -> int:
    """Rows from one device to another in a round: an even share and a quarter, at most all tokens."""
    share = min(k, devices) * tokens / devices
    return max(1, min(tokens, -(-int(5 * share) // 4)))


def experts(
    x: Float[Array, "N L"],
    ids: Int32[Array, "N k"],
    weights: Float[Array, "N k"],
    experts: Experts,
    *,
    axis: str,
    beta: float,
    linear_beta: float,
    rows: int | None = None,
    implementation: Implementation = None,
) -> Float[Array, "N L"]:
    """`pallas.moe.experts` where this device holds `E / devices` consecutive experts and its own tokens.

    `ids` count over all experts. `rows` is the size of a round, see `rows_per_round`.
    """
    devices, held = lax.axis_size(axis), experts[0].shape[0]
    size = rows or rows_per_round(*ids.shape, devices)
    owner = jnp.where(ids < 0, devices, ids // held)
    goes = jnp.any(owner[:, None, :] == jnp.arange(devices, dtype=jnp.int32)[None, :, None], axis=2)
    routes = _Routes(goes, jnp.cumsum(goes, axis=0).astype(jnp.int32) - 1)
    fullest = lax.pmax(jnp.max(jnp.sum(goes, axis=0)), axis)
    run = partial(api.experts, experts=experts, beta=beta, linear_beta=linear_beta, implementation=implementation)

    def round_(state: tuple[Array, Array]) -> tuple[Array, Array]:
        number, total = state
        index = _rows_of_round(routes, number, size)
        there = jnp.maximum(index, 0)
        local = ids[there] - held * jnp.arange(devices, dtype=jnp.int32)[:, None, None]
        mine = (index[..., None] >= 0) & (local >= 0) & (local < held) & (ids[there] >= 0)
        sent = (
            jnp.where(index[..., None] >= 0, x[there], jnp.zeros((), x.dtype)),
            jnp.where(mine, local, -1).astype(jnp.int32),
            weights[there],
        )
        arrived = [_exchange(array, axis).reshape(devices * size, -1) for array in sent]
        sums = run(*arrived, dtype=jnp.float32)
        back = _exchange(sums.reshape(devices, size, -1), axis)
        return number + 1, total + _collect(back, routes, number, size)

    def unfinished(state: tuple[Array, Array]) -> Array:
        return state[0] * size < fullest

    start = jnp.int32(0), jnp.zeros(x.shape, jnp.float32)
    return lax.while_loop(unfinished, round_, start)[1].astype(x.dtype)


def _exchange(array: Array, axis: str) -> Array:
    """Block d to device d; block d of the result came from device d."""
    return lax.all_to_all(array, axis, split_axis=0, concat_axis=0, tiled=True)


def _rows_of_round(routes: _Routes, number: Array, size: int) -> Int32[Array, "P size"]:
    """Tokens that go to each device in this round, -1 in unused rows."""
    tokens, devices = routes.goes.shape
    place = routes.rank - number * size
    place = jnp.where(routes.goes & (place >= 0) & (place < size), place, size)
    token = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], (tokens, devices))
    device = jnp.broadcast_to(jnp.arange(devices, dtype=jnp.int32)[None], (tokens, devices))
    return jnp.full((devices, size), -1, jnp.int32).at[device, place].set(token, mode="drop")


def _collect(back: Float[Array, "P size L"], routes: _Routes, number: Array, size: int) -> Float[Array, "N L"]:
    """The sum of what came back for each token, in the order of devices."""
    total: Any = 0.0
    for device in range(back.shape[0]):
        place = routes.rank[:, device] - number * size
        here = routes.goes[:, device] & (place >= 0) & (place < size)
        total = total + jnp.where(here[:, None], back[device, jnp.clip(place, 0, size - 1)], 0.0)
    return total
