"""Random checkpoints in the released format, for tests and demonstrations."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.exporting import export
from k3jax import params
from k3jax.config import K3Config

NOISE = 0.1
"""Spread of parameters that training starts at a constant, so that exchanging two of them shows."""


def write_random(
    path: str | Path,
    config: K3Config,
    seed: int = 0,
    *,
    shards: int | None = None,
    max_shard_bytes: int | None = None,
) -> params.Tree:
    """Writes a random model of `config` at `path` (layouts as in `export`) and returns its parameters."""
    tree = random_tree(config, seed)
    export(path, config, tree, shards=shards, max_shard_bytes=max_shard_bytes)
    return tree


def random_tree(config: K3Config, seed: int = 0) -> params.Tree:
    """Parameters of `config` in bfloat16, every element random.

    Unlike `params.initialize` this leaves no norm, decay, query or scale at its constant, and it compiles
    nothing (NumPy draws; 0.3 s for `nano`).
    """
    rng = np.random.default_rng(seed)
    return params.map_tree(lambda spec: _draw(spec, rng, config.initializer_range), params.model_specs(config))


def _draw(spec: params.ParamSpec, rng: np.random.Generator, std: float) -> jax.Array:
    def normal(mean: float, deviation: float) -> np.ndarray:
        return rng.standard_normal(spec.shape, np.float32) * np.float32(deviation) + np.float32(mean)

    match spec.init:
        case "packed":
            values = rng.integers(0, 256, spec.shape, np.uint8)
        case "scale":  # an E2M1 code is about 2.6 rms, so weights are about `std` rms
            middle = 127 + round(math.log2(std / 2.6))
            values = rng.integers(middle - 1, middle + 2, spec.shape, np.uint8)
        case "dt_bias":  # log of a step in [1e-3, 1e-1]
            values = rng.uniform(math.log(1e-3), math.log(1e-1), spec.shape).astype(np.float32)
        case "zeros" | "ones":
            values = normal(float(spec.init == "ones"), NOISE)
        case "normal":
            values = normal(0.0, std)
    return jnp.asarray(values.astype(spec.array_dtype(jnp.bfloat16)))
