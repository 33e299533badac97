"""Stable LatentMoE as the report writes it: every expert on every token, then the chosen ones summed."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas.moe.types import DenseExperts


def experts(
    x: Float[Array, "N L"],
    ids: Int32[Array, "N k"],
    weights: Float[Array, "N k"],
    experts: DenseExperts,
    *,
    beta: float,
    linear_beta: float,
) -> Float[Array, "N L"]:
    """The definition in float32; see `pallas.moe.experts`."""
    highest = jax.lax.Precision.HIGHEST
    hidden = jnp.einsum("nl,eifl->neif", x.astype(jnp.float32), experts.gate_up.astype(jnp.float32), precision=highest)
    gate, up = hidden[:, :, 0], hidden[:, :, 1]
    activation = beta * jnp.tanh(gate / beta) / (1 + jnp.exp(-gate)) * linear_beta * jnp.tanh(up / linear_beta)
    outputs = jnp.einsum("nef,elf->nel", activation, experts.down.astype(jnp.float32), precision=highest)
    dense = jnp.zeros(outputs.shape[:2], jnp.float32).at[jnp.arange(x.shape[0])[:, None], ids].add(weights)
    return jnp.einsum("ne,nel->nl", dense, outputs, precision=highest).astype(x.dtype)
