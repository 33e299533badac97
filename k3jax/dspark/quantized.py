"""Drafts in 8 bits: half the bytes to read in a step. What is said follows the target's distribution all the same."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from k3jax.params import Tree
from pallas import gemv

DraftWeights = Literal["auto", "model", "int8"]
"""Kind of a draft's matrices: the model's dtype, or int8; auto: int8 for a bfloat16 model on a GPU."""

INPUTS = {
    "context_proj": 1,
    "q_down": 1,
    "kv_down": 1,
    "q_up": 1,
    "q": 1,
    "k": 1,
    "v": 1,
    "out": 2,
    "gate_up": 1,
    "down": 1,
    "head": 1,
}
"""Matrices that a step reads whole, and how many of their last axes are inputs."""
TURNED = {"key_up": "key_up_turned"}
"""Matrices that stay as they are, but with their last two axes exchanged: a head's inputs are then neighbours."""
PAIRED = ("gate_up",)
"""Matrices [2, outputs, inputs] in int8 whose two rows of an output become neighbours: [outputs, 2, inputs]."""


def chosen(weights: str, dtype: Any) -> Literal["model", "int8"]:
    """What `weights` means for a model of `dtype` on the default device. Raises ValueError for an unknown kind."""
    if weights not in get_args(DraftWeights):
        raise ValueError(f"draft_weights is {weights!r}, expected {', '.join(get_args(DraftWeights))}")
    if weights == "auto":
        return "int8" if jnp.dtype(dtype) == jnp.bfloat16 and jax.default_backend() == "gpu" else "model"
    return "int8" if weights == "int8" else "model"


def quantize(parameters: Mapping[str, Any], head: Float[Array, "V D"] | None = None) -> Tree:
    """The parameters with every matrix of `INPUTS` in int8; norms, tables and small matrices stay as they are.

    `head` is the target's: a draft without one gets a copy in 8 bits, V * D bytes of memory for half the bytes to read.
    """
    tree = {TURNED.get(name, name): _entry(name, value) for name, value in parameters.items()}
    return tree if head is None or "head" in tree else {**tree, "head": gemv.quantize(head)}


def _entry(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return quantize(value)
    value = jnp.swapaxes(value, 0, 1) if name in PAIRED else value
    value = jnp.swapaxes(value, 1, 2) if name in TURNED else value
    return gemv.quantize(value, contract=INPUTS[name]) if name in INPUTS else value
