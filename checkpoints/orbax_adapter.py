"""The only file that imports orbax: one tree of arrays in, one tree out (v1 API, still experimental)."""

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint.experimental.v1 as ocp

CHUNK_BYTES = 128 << 20
"""Arrays are stored in chunks of at most this size, the least that another topology has to read."""
CONCURRENT_BYTES = 1 << 30
"""Bound on the host memory of reads and writes in flight."""

Tree = dict[str, Any]


class StoredError(ValueError):
    """Data that orbax cannot read or write."""


def is_complete(path: Path) -> bool:
    """Whether `path` holds a tree whose `write` has finished."""
    return path.is_dir() and ocp.is_orbax_checkpoint(str(path))


def write(path: Path, tree: Mapping[str, Any]) -> None:
    """Writes a nested dict of arrays; `path` appears only once everything is on disk. Raises `StoredError`."""
    with _context():
        _guarded(lambda: ocp.save(str(path), dict(tree)))


def describe(path: Path) -> dict[tuple[str, ...], tuple[tuple[int, ...], jnp.dtype]]:
    """Shape and dtype of every stored array, from the metadata alone; `StoredError` when it is damaged."""
    with _context():
        leaves = dict(_leaves(_guarded(lambda: ocp.metadata(str(path)).metadata), ()))
    if None in leaves.values():
        raise StoredError("descriptions of arrays are lost")
    return {keys: (tuple(leaf.shape), jnp.dtype(leaf.dtype)) for keys, leaf in leaves.items()}


def read(path: Path, abstract: Mapping[str, Any]) -> Tree:
    """Reads a nested dict of `jax.ShapeDtypeStruct` with shardings, which must have the stored structure.

    orbax casts silently to the requested dtypes; compare with `describe` first. Raises `StoredError`.
    """
    with _context():
        return _guarded(lambda: ocp.load(str(path), dict(abstract)))


def _guarded(function: Callable[[], Any]) -> Any:
    """Calls orbax and turns whatever it raises, of many types and lengths, into one short `StoredError`."""
    try:
        return function()
    except Exception as error:  # orbax and tensorstore share no base class
        reason = str(error).strip().split("\n", 1)[0].split(" [tensorstore_spec=", 1)[0]
    # Reads that failed beside the first one are never awaited; asyncio would print each of them some time later.
    logger = logging.getLogger("asyncio")
    logger.addFilter(_drop)
    gc.collect()
    logger.removeFilter(_drop)
    raise StoredError(reason)


def _drop(_: logging.LogRecord) -> bool:
    return False


def barrier(name: str) -> None:
    """Waits for every process."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def _context() -> ocp.Context:
    context = ocp.Context()
    # Packed MXFP4 does not compress; trying costs a third of the time.
    context.array.saving.use_compression = False
    context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES
    context.memory.write_concurrent_bytes = CONCURRENT_BYTES
    context.memory.read_concurrent_bytes = CONCURRENT_BYTES
    context.memory.deepcopy_host_arrays = False
    return context


def _leaves(tree: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*keys, str(key)))
    else:
        yield keys, tree
