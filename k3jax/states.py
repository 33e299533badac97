"""Everything that a run of the model leaves behind, as named NumPy arrays."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from k3jax.cache import K3Cache, KdaCache, MlaCache

ByLayer = dict[int, np.ndarray]
"""Arrays by 0-based layer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """What a prompt of T tokens leaves behind, and what feeding N more tokens one at a time does to it."""

    logits: Float[np.ndarray, "T V"]
    layer_prefix: Float[np.ndarray, "layers T D"]
    """Running AttnRes prefix after each layer."""
    router_ids: Int[np.ndarray, "moe_layers T k"]
    """Routed experts, best first."""
    router_weights: Float[np.ndarray, "moe_layers T k"]
    kda_state: ByLayer
    """float32 [head, key, value] after the prompt."""
    conv_state: ByLayer
    """Last three raw projection rows, [q/k/v, 3, channel], oldest first."""
    latent: ByLayer
    """Cached MLA rows of the prompt, [token, latent and shared key]."""
    decode_logits: Float[np.ndarray, "N V"]
    kda_state_after_decode: ByLayer
    conv_state_after_decode: ByLayer


def as_float(array: Any) -> np.ndarray:
    """A host copy; bfloat16 widened to float32, which NumPy's own functions understand."""
    host = np.asarray(array)
    return host.astype(np.float32) if host.dtype == jnp.bfloat16 else host


def kda_states(cache: K3Cache, slot: int = 1) -> ByLayer:
    """Recurrent states of one slot."""
    return {layer: as_float(entry.state[slot]) for layer, entry in _entries(cache, KdaCache)}


def conv_states(cache: K3Cache, slot: int = 1) -> ByLayer:
    """Convolution windows of one slot as [q/k/v, 3, channel]."""

    def arrange(window: Any) -> np.ndarray:
        rows = as_float(window).transpose(2, 0, 1, 3)  # [3, heads, q/k/v, dim] -> [q/k/v, 3, heads, dim]
        return rows.reshape(*rows.shape[:2], -1)

    return {layer: arrange(entry.window[slot]) for layer, entry in _entries(cache, KdaCache)}


def latents(cache: K3Cache, tokens: int) -> ByLayer:
    """Latent rows of a sequence whose pages are 1, 2, 3, ..."""

    def rows(entry: MlaCache) -> np.ndarray:
        values = as_float(entry.latent[1:])
        if entry.page_scale is not None:
            values = values * as_float(entry.page_scale)[1:, None, None]
        return values.reshape(-1, values.shape[-1])[:tokens]

    return {layer: rows(entry) for layer, entry in _entries(cache, MlaCache)}


def _entries(cache: K3Cache, kind: type) -> Iterator[tuple[int, Any]]:
    return ((layer, entry) for layer, entry in enumerate(cache.layers) if isinstance(entry, kind))
