"""Loads released-format checkpoints, parameter by parameter, straight into their shardings."""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.assemble import InFlight, padding_problems, place
from checkpoints.checking import check, read_config
from checkpoints.errors import CheckpointError
from checkpoints.source import OpenTensors, Source
from k3jax import params
from k3jax.config import K3Config

IN_FLIGHT_BYTES = 1 << 30
"""Host bytes whose transfer to a device may still be running.

Beyond the parameters themselves, loading needs at most this plus one device's shard of one parameter.
"""
READERS = 8
"""Threads that copy from the files; they wait for storage most of the time."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each parameter."""

Shardings = Mapping[str, Any]
"""Nested dict of `jax.sharding.Sharding`, one per parameter."""


def load(
    path: str | Path,
    config: K3Config | None = None,
    *,
    dtype: Any = jnp.bfloat16,
    shardings: Shardings | None = None,
    progress: Progress | None = None,
) -> tuple[K3Config, params.Tree]:
    """Loads the text model at `path`: a directory with safetensors shards, or one safetensors file.

    Returns the configuration and arrays in the structure of `params.model_specs`. `dtype` is the model's:
    bfloat16 keeps the released values, float32 casts them exactly; float32 and packed uint8 parameters stay
    what they are. Without `shardings` the arrays lie uncommitted on the default device.

    Headers are checked completely before data is read (`check`). Host memory is bounded by one shard of one
    parameter plus `IN_FLIGHT_BYTES`, on top of arrays that live on the host anyway (CPU backend). Raises
    `CheckpointError` or `ConfigError`.
    """
    source_config = config or read_config(path)
    source = check(path, source_config)
    specs = params.model_specs(source_config)
    return source_config, load_tree(source, specs, dtype=dtype, shardings=shardings, progress=progress)


def load_tree(
    source: Source,
    specs: params.Tree,
    *,
    dtype: Any = jnp.bfloat16,
    shardings: Shardings | None = None,
    progress: Progress | None = None,
) -> params.Tree:
    """Loads any tree of specs, in order, from a source whose headers were checked against them."""
    activations = model_dtype(dtype)
    flat = dict(params.flatten(specs))
    placement = targets(flat, shardings)
    total = sum(parameter_bytes(spec, activations) for spec in flat.values())
    tree: params.Tree = {}
    done = 0
    in_flight = InFlight(IN_FLIGHT_BYTES)
    with OpenTensors(source) as tensors, ThreadPoolExecutor(READERS) as executor:
        if problems := padding_problems(tuple(flat.values()), tensors):
            raise CheckpointError(f"{source.directory} cannot be used", problems)
        for path, spec in flat.items():
            array = place(spec, tensors, spec.array_dtype(activations), placement[path], in_flight, executor)
            insert(tree, path, array)
            tensors.release()
            done += parameter_bytes(spec, activations)
            if progress is not None:
                progress(done, total)
    return tree


def parameter_bytes(spec: params.ParamSpec, dtype: Any) -> int:
    """Bytes of one parameter when activations have `dtype`."""
    return math.prod(spec.shape) * spec.array_dtype(dtype).itemsize


def insert(tree: params.Tree, path: tuple[str, ...], value: Any) -> None:
    """Sets a leaf of a nested dict."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def model_dtype(dtype: Any) -> np.dtype[Any]:
    """`dtype` as a NumPy dtype, if the released weights fit in it exactly."""
    wanted = jnp.dtype(dtype)
    if wanted not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise ValueError(f"dtype is {wanted}, expected bfloat16 or float32 (others cannot hold the weights exactly)")
    return wanted


def targets(
    specs: Mapping[tuple[str, ...], params.ParamSpec], shardings: Shardings | None
) -> dict[tuple[str, ...], jax.sharding.Sharding | None]:
    """A sharding, or None, per parameter; everything that does not fit in one error."""
    if shardings is None:
        return dict.fromkeys(specs)
    given = dict(params.flatten(shardings))
    problems = [f"{dotted(path)}: no sharding" for path in specs if path not in given]
    problems += [f"{dotted(path)}: a sharding, but no such parameter" for path in given if path not in specs]
    for path in specs.keys() & given.keys():
        try:
            given[path].shard_shape(specs[path].shape)
        except ValueError as error:
            problems.append(f"{dotted(path)}: shape {list(specs[path].shape)} cannot be split so: {error}")
    if problems:
        raise CheckpointError("shardings do not fit the parameters", problems)
    return {path: given[path] for path in specs}


def dotted(path: tuple[str, ...]) -> str:
    """A parameter's path as one name."""
    return ".".join(path)
