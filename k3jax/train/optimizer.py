"""The report's recipe: per-head Muon and AdamW in one transformation, cosine schedule with 1 % warm-up."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from k3jax.params import Tree
from k3jax.train import specs as training
from k3jax.train.muon import scale_by_muon

WARMUP_FRACTION = 0.01
WEIGHT_DECAY = 0.1
ADAM_BETAS = (0.9, 0.95)


def learning_rate(step: int, total: int, peak: float, final_fraction: float = 0.02) -> float:
    """Linear warm-up over 1 % of `total` steps, then a cosine down to `final_fraction` of the peak."""
    warmup = max(1, round(total * WARMUP_FRACTION))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return peak * (final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress)))


class AdamState(NamedTuple):
    """First and second moments, and the number of updates."""

    count: jax.Array
    mean: Any
    square: Any


def scale_by_adam(*, betas: tuple[float, float] = ADAM_BETAS, eps: float = 1e-10) -> optax.GradientTransformation:
    """Adam's direction. Unlike `optax.scale_by_adam` it runs under strict dtype promotion."""
    first, second = betas

    def init(params: Any) -> AdamState:
        return AdamState(jnp.zeros((), jnp.int32), *(jax.tree.map(jnp.zeros_like, params) for _ in betas))

    def update(gradients: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        count = state.count + 1
        mean = jax.tree.map(lambda m, g: first * m + (1 - first) * g, state.mean, gradients)
        square = jax.tree.map(lambda v, g: second * v + (1 - second) * g * g, state.square, gradients)
        correct, correct_square = (1 - jnp.float32(beta) ** count.astype(jnp.float32) for beta in betas)
        updates = jax.tree.map(lambda m, v: m / correct / (jnp.sqrt(v / correct_square) + eps), mean, square)
        return updates, AdamState(count, mean, square)

    return optax.GradientTransformation(init, update)


def optimizer(specs: Tree, *, momentum: float = 0.95, muon_dtype: Any = jnp.bfloat16) -> optax.GradientTransformation:
    """Ascent directions of unit learning rate; the step multiplies them by minus the learning rate.

    Weight decay acts on matrices, router and embeddings, never on norms, biases and other vectors. Correction
    biases get no update: Quantile Balancing sets them.
    """
    adam = scale_by_adam()
    decay = optax.add_decayed_weights(WEIGHT_DECAY)
    muon = scale_by_muon(training.matrix_views(specs), momentum=momentum, dtype=jnp.dtype(muon_dtype))
    return optax.partition(
        {
            "muon": optax.chain(muon, decay),
            "decayed_adam": optax.chain(adam, decay),
            "adam": adam,
            "balanced": optax.set_to_zero(),
        },
        training.labels(specs),
    )
