"""Loads a checkpoint in either format."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints.checking import check, read_config
from checkpoints.source import NATIVE_MANIFEST
from checkpoints.streaming import Keys, Progress, Shardings, load_tree, stream
from k3jax import params
from k3jax.config import K3Config


def load(
    path: str | Path,
    config: K3Config | None = None,
    *,
    dtype: Any = jnp.bfloat16,
    shardings: Shardings | None = None,
    progress: Progress | None = None,
) -> tuple[K3Config, params.Tree]:
    """Loads the text model at `path`: a directory with safetensors shards, one safetensors file, or a saved model.

    Returns the configuration and arrays in the structure of `params.model_specs`. `dtype` is the model's:
    bfloat16 keeps the released values, float32 casts them exactly, None takes what is stored; float32 and packed
    uint8 parameters stay what they are. Without `shardings` the arrays lie uncommitted on the default device.

    Headers are checked completely before data is read (`check`). Host memory is bounded by one device's shard of
    one parameter plus `streaming.IN_FLIGHT_BYTES`, besides arrays that live on the host anyway (CPU backend).
    Raises `CheckpointError` or `ConfigError`.
    """
    if is_native(path):
        from checkpoints import native  # costs an import of orbax

        return native.restore(path, shardings, config=config, dtype=dtype, progress=progress)
    config = config or read_config(path)
    source = check(path, config)
    specs = params.model_specs(config)
    model = jnp.bfloat16 if dtype is None else dtype
    return config, load_tree(source, specs, dtype=model, shardings=shardings, progress=progress)


def open_stream(path: str | Path) -> tuple[K3Config, Iterator[tuple[Keys, jax.Array]]]:
    """The configuration and parameters of a checkpoint in either format, one parameter or layer in memory at a time."""
    if is_native(path):
        from checkpoints import native

        return native.read_manifest(Path(path))[0], native.stream(Path(path))
    config = read_config(path)
    return config, stream(check(path, config), params.model_specs(config))


def is_native(path: str | Path) -> bool:
    """Whether `save` or `convert` wrote the checkpoint at `path`."""
    return (Path(path) / NATIVE_MANIFEST).is_file()
