"""The last word of Quantile Balancing: biases from the pooled counts of many batches, before they are frozen.

A step balances its own batch. The bias that ships should balance the whole data, and histograms add up, so
the final quantile is read over many batches at fixed weights. Routing of a layer moves the inputs of the
next ones, hence a few rounds.
"""

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from k3jax.config import K3Config
from k3jax.params import Tree
from k3jax.train.balance import Routed
from k3jax.train.evaluate import Evaluate
from k3jax.train.forward import Batch
from k3jax.train.step import set_biases

ROUNDS, BATCHES = 5, 16


def settle(
    config: K3Config, evaluate: Evaluate, masters: Tree, batch: Callable[[int], Batch], *, rounds: int = ROUNDS
) -> Tree:
    """The parameters with settled correction biases; `batch(i)` for i below `BATCHES` are training batches."""
    update = jax.jit(lambda masters, routed: set_biases(config, masters, routed, jnp.array(True)))
    for _ in range(rounds):
        routed = _total(evaluate(masters, batch(i)).routed for i in range(BATCHES))
        masters = update(masters, routed)
    return masters


def _total(counts: Iterable[Routed]) -> Routed:
    return functools.reduce(functools.partial(jax.tree.map, jnp.add), counts)
