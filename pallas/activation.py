"""SiTU, the gated activation of every MLP of Kimi K3 (report equation 12)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def situ(
    gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"], *, beta: float, linear_beta: float
) -> Float[Array, "*batch F"]:
    """SiTU(gate, up) = beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta).

    The sigmoid sees the uncapped gate. Computed in float32, rounded once to the dtype of `gate`.
    """
    gate32, up32 = gate.astype(jnp.float32), up.astype(jnp.float32)
    capped = beta * jnp.tanh(gate32 / beta) * jax.nn.sigmoid(gate32)
    return (capped * (linear_beta * jnp.tanh(up32 / linear_beta))).astype(gate.dtype)
