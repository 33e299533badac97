"""The draft's optimizer: Muon on its matrices, per head and per projection, AdamW without decay on the rest."""

from typing import Any

import jax.numpy as jnp
import optax

from k3jax.dspark.config import DSparkConfig
from k3jax.dspark.tensors import draft_specs
from k3jax.params import flatten
from k3jax.train.muon import scale_by_muon
from k3jax.train.optimizer import scale_by_adam
from k3jax.train.specs import Matrices, nest

_STACKED = ("q", "k", "v", "q_up", "key_up", "value_up", "gate_up")
_WHOLE = ("out", "down", "context_proj", "joint", "gate", "q_down", "kv_down")


def draft_optimizer(config: DSparkConfig, dtype: Any = jnp.bfloat16) -> optax.GradientTransformation:
    """Ascent directions of unit learning rate for the tree of `draft_specs`; Muon computes in `dtype`.

    Token tables and the confidence head belong to Adam: their rows are embeddings, not maps.
    """
    paths = [path for path, _ in flatten(draft_specs(config))]
    views = {path: Matrices(int(path[-1] in _STACKED)) for path in paths if path[-1] in (*_STACKED, *_WHOLE)}
    labels = nest({path: "muon" if path in views else "adam" for path in paths})
    return optax.partition({"muon": scale_by_muon(views, dtype=dtype), "adam": scale_by_adam()}, labels)
