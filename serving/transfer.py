"""Prefixes on their way between the device and the host: one program in each direction."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from k3jax.cache import K3Cache, KdaCache, LayerCache, Leaf, MlaCache
from serving.device import DeviceState


class Piece(NamedTuple):
    """Some pages and the state of a prefix, without batch."""

    latents: tuple[Leaf, ...]
    """[P, page, L] of each MLA layer, then the rows of each draft layer."""
    states: tuple[Leaf, ...]
    """[H, D, D] of each KDA layer."""
    windows: tuple[Leaf, ...]


@jax.jit
def read_prefix(cache: K3Cache, context: tuple[Array, ...], pages: Int32[Array, " P"], slot: Int32[Array, ""]) -> Piece:
    """Pages, in order, and state of a prefix."""
    pools = [*(entry.latent for entry in cache.layers if isinstance(entry, MlaCache)), *context]
    kda = [entry for entry in cache.layers if isinstance(entry, KdaCache)]
    return Piece(
        tuple(pool[pages] for pool in pools),
        tuple(entry.state[slot] for entry in kda),
        tuple(entry.window[slot] for entry in kda),
    )


@functools.partial(jax.jit, donate_argnames="state")
def write_prefix(state: DeviceState, piece: Piece, pages: Int32[Array, " P"], slot: Int32[Array, ""]) -> DeviceState:
    """Stores what `read_prefix` gave into `pages` (0: nothing) and `slot` (0: nothing). Donates the state."""

    def put(pool: Array, index: Array, values: Array) -> Array:
        return pool.at[jnp.where(index > 0, index, pool.shape[0])].set(values, mode="drop")

    latents, kda = iter(piece.latents), iter(zip(piece.states, piece.windows, strict=True))

    def write(entry: LayerCache) -> LayerCache:
        if isinstance(entry, MlaCache):
            return MlaCache(put(entry.latent, pages, next(latents)))
        new_state, window = next(kda)
        return KdaCache(put(entry.state, slot, new_state), put(entry.window, slot, window))

    cache = K3Cache(tuple(map(write, state.cache.layers)))
    return dataclasses.replace(
        state, cache=cache, context=tuple(put(pool, pages, next(latents)) for pool in state.context)
    )
