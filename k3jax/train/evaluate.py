"""Held-out loss and expert load."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from k3jax.config import K3Config
from k3jax.params import Tree
from k3jax.train import specs
from k3jax.train.forward import Batch, Losses, losses
from k3jax.train.step import AXIS


class Evaluation(NamedTuple):
    """Sums over the evaluated tokens."""

    nats: float
    tokens: float
    load: np.ndarray
    """Tokens per expert, [MoE layers, experts]."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def imbalance(self) -> np.ndarray:
        """Largest over mean load of each layer."""
        return self.load.max(axis=1) / self.load.mean(axis=1)

    def bits_per_byte(self, text_bytes: int) -> float:
        """Bits per byte of the evaluated text, which must be all of it."""
        return self.nats / math.log(2) / text_bytes


Evaluate = Callable[[Tree, Batch], Losses]


def make_evaluate(config: K3Config, mesh: Mesh, *, dtype: Any = jnp.bfloat16) -> Evaluate:
    """The compiled sums (master parameters, batch) -> `Losses`, rows split over the mesh."""
    whole = PartitionSpec()

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(whole, PartitionSpec(AXIS)), out_specs=whole, check_vma=False)
    def evaluate(masters: Tree, batch: Batch) -> Losses:
        parameters = specs.compute_parameters(specs.training_specs(config), masters, dtype)
        return jax.lax.psum(losses(config, parameters, batch, remat=False), AXIS)

    return evaluate


def evaluate_batches(evaluate: Evaluate, masters: Tree, batches: Iterable[Batch]) -> Evaluation:
    """Sums of `evaluate` over `batches`."""
    results = [
        jax.device_get((sums.nats, sums.weight, sums.routed.load)) for sums in (evaluate(masters, b) for b in batches)
    ]
    nats, weight, load = (sum(values[1:], values[0]) for values in zip(*results, strict=True))
    return Evaluation(float(nats), float(weight), np.asarray(load))
