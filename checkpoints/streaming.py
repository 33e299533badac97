"""Streams released tensors, parameter by parameter, straight into their shardings."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.assemble import READERS, InFlight, padding_problems, place
from checkpoints.errors import CheckpointError
from checkpoints.source import OpenTensors, Source
from k3jax import params

IN_FLIGHT_BYTES = 1 << 30
"""Host bytes whose transfer to a device may still be running.

Beyond the parameters themselves, loading needs at most this plus one device's shard of one parameter.
"""

Keys = tuple[str, ...]
"""Where a parameter is in the nested dict."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each parameter."""

Shardings = Mapping[str, Any]
"""Nested dict of `jax.sharding.Sharding`, one per parameter."""


def load_tree(
    source: Source,
    specs: params.Tree,
    *,
    dtype: Any = jnp.bfloat16,
    shardings: Shardings | None = None,
    progress: Progress | None = None,
) -> params.Tree:
    """Loads any tree of specs, in order, from a source whose headers were checked against them."""
    arrays = stream(source, specs, dtype=dtype, shardings=shardings)
    return nested(reported(arrays, tree_bytes(specs, model_dtype(dtype)), progress))


def stream(
    source: Source, specs: params.Tree, *, dtype: Any = jnp.bfloat16, shardings: Shardings | None = None
) -> Iterator[tuple[Keys, jax.Array]]:
    """Yields the parameters of `specs` one by one, so that a consumer may drop them again.

    Raises `CheckpointError` for padding that is not zero and scales with which a weight is not finite.
    """
    activations = model_dtype(dtype)
    flat = dict(params.flatten(specs))
    placement = targets(flat, shardings)
    in_flight = InFlight(IN_FLIGHT_BYTES)
    with OpenTensors(source) as tensors, ThreadPoolExecutor(READERS) as executor:
        if problems := padding_problems(tuple(flat.values()), tensors):
            raise CheckpointError(f"{source.directory} cannot be used", problems)
        for keys, spec in flat.items():
            array = place(spec, tensors, spec.array_dtype(activations), placement[keys], in_flight, executor)
            tensors.release()
            yield keys, array


def reported(
    arrays: Iterable[tuple[Keys, jax.Array]], total: int, progress: Progress | None
) -> Iterator[tuple[Keys, jax.Array]]:
    """Passes parameters on and calls `progress` after each."""
    done = 0
    for keys, array in arrays:
        yield keys, array
        done += array.nbytes
        if progress is not None:
            progress(done, total)


def tree_bytes(specs: Mapping[str, Any], dtype: Any) -> int:
    """Bytes of all parameters of `specs`."""
    return sum(parameter_bytes(spec, dtype) for _, spec in params.flatten(specs))


def nested(leaves: Iterable[tuple[Keys, Any]]) -> params.Tree:
    """A nested dict from its leaves; the inverse of `params.flatten`."""
    tree: params.Tree = {}
    for keys, value in leaves:
        branch = tree
        for key in keys[:-1]:
            branch = branch.setdefault(key, {})
        branch[keys[-1]] = value
    return tree


def parameter_bytes(spec: params.ParamSpec, dtype: Any) -> int:
    """Bytes of one parameter when activations have `dtype`."""
    return math.prod(spec.shape) * spec.array_dtype(dtype).itemsize


def model_dtype(dtype: Any) -> np.dtype[Any]:
    """`dtype` as a NumPy dtype, if the released weights fit in it exactly."""
    wanted = jnp.dtype(dtype)
    if wanted not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise ValueError(f"dtype is {wanted}, expected bfloat16 or float32 (others cannot hold the weights exactly)")
    return wanted


def targets(
    specs: Mapping[Keys, params.ParamSpec], shardings: Shardings | None
) -> dict[Keys, jax.sharding.Sharding | None]:
    """A sharding, or None, per parameter; everything that does not fit in one error."""
    if shardings is None:
        return dict.fromkeys(specs)
    given = dict(params.flatten(shardings))
    problems = [f"{dotted(keys)}: no sharding" for keys in specs if keys not in given]
    problems += [f"{dotted(keys)}: a sharding, but no such parameter" for keys in given if keys not in specs]
    for keys in (keys for keys in specs if keys in given):
        try:
            given[keys].shard_shape(specs[keys].shape)
        except (ValueError, IndexError) as error:  # JAX indexes past the end when a spec has too many axes
            problems.append(f"{dotted(keys)}: shape {list(specs[keys].shape)} cannot be split so: {error}")
    if problems:
        raise CheckpointError("shardings do not fit the parameters", problems)
    return {keys: given[keys] for keys in specs}


def dotted(keys: Keys) -> str:
    """A parameter's keys as one name."""
    return ".".join(keys)
