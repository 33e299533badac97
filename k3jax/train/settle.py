"""The last word of Quantile Balancing: biases from the pooled counts of many batches, before they are frozen.

A step balances its own batch. The bias that ships should balance the whole data, and histograms add up, so
the final quantile is read over many batches at fixed weights. Routing of a layer moves the inputs of the
next ones, hence a few rounds.
"""

import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from k3jax.config import K3Config
from k3jax.params import Tree
from k3jax.train.balance import Routed
from k3jax.train.evaluate import Evaluate
from k3jax.train.forward import Batch
from k3jax.train.step import set_biases


def settle(config: K3Config, evaluate: Evaluate, masters: Tree, pool: Sequence[Batch], *, rounds: int) -> Tree:
    """The parameters with settled correction biases; `pool` are training batches."""
    update = jax.jit(lambda masters, routed: set_biases(config, masters, routed, jnp.array(True)))
    for _ in range(rounds):
        # One batch at a time: programs with collectives that pile up can starve each other on few cores.
        routed = _total(jax.block_until_ready(evaluate(masters, batch).routed) for batch in pool)
        masters = update(masters, routed)
    return masters


def _total(counts: Iterable[Routed]) -> Routed:
    return functools.reduce(functools.partial(jax.tree.map, jnp.add), counts)
