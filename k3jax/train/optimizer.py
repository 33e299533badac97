"""The report's recipe: per-head Muon and AdamW in one transformation, cosine schedule with 1 % warm-up."""

import math
from typing import Any

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


def optimizer(specs: Tree, *, momentum: float = 0.95, muon_dtype: Any = jnp.bfloat16) -> optax.GradientTransformation:
    """Ascent directions of unit learning rate; the step multiplies them by minus the learning rate.

    Weight decay acts on matrices, router and embeddings, never on norms, biases and other vectors. Correction
    biases get no update: Quantile Balancing sets them.
    """
    adam = optax.scale_by_adam(*ADAM_BETAS, eps=1e-10)
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
