"""Writes a parameter tree in the released format, byte for byte what `load` read.

The inverse of `assemble`: every parameter is copied into zero-filled files through the same pieces, read
backwards. Host memory is bounded by two parameters; the files are written through memory maps.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.assemble import piece_view
from checkpoints.checking import OTHER_PARTS, read_config
from checkpoints.errors import CheckpointError
from checkpoints.native import tree_dtype
from checkpoints.shards import Plan, ShardPlan, make_plan
from checkpoints.source import CONFIG, INDEX, NUMPY_DTYPE, OpenTensors, Source
from checkpoints.streaming import Keys, Progress, dotted, reported, tree_bytes
from k3jax import params
from k3jax.config import K3Config

PARTIAL = ".exporting"
"""Suffix of the directory until it is complete; not that of conversions, which may be resumed."""


def export(
    path: str | Path,
    config: K3Config,
    tree: Mapping[str, Any],
    *,
    shards: int | None = None,
    max_shard_bytes: int | None = None,
    like: str | Path | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes a released-format checkpoint at `path`, which must not exist yet.

    The default layout is the released one: decoder layer l alone in `model-{l+1:05d}-of-NNNNNN.safetensors`,
    the rest in the last file. `shards` spreads the tensors over that many files, `max_shard_bytes` starts a
    new file when one is full (a single file is then `model.safetensors` without an index), and `like` repeats
    the files, headers and index of another checkpoint, including the bytes of its vision tensors.

    Model-dtype values are rounded to bfloat16, which is exact for values that came from a checkpoint. Appears
    atomically. Raises `CheckpointError` for a tree that is not `config`'s, or a path that cannot be written.
    """
    tree_dtype(config, tree)
    plan = make_plan(config, shards=shards, max_shard_bytes=max_shard_bytes, like=like)
    total = tree_bytes(params.model_specs(config), jnp.bfloat16)
    write_released(path, config, reported(params.flatten(tree), total, progress), plan)


def write_released(
    path: str | Path, config: K3Config, parameters: Iterable[tuple[Keys, jax.Array]], plan: Plan
) -> None:
    """Writes every parameter of `config` by `plan`, each dropped before the next is asked for."""
    specs = dict(params.flatten(params.model_specs(config)))
    with _atomic_directory(Path(path)) as directory:
        _write_small_files(directory, config, plan)
        files = _OutputFiles(directory, plan)
        for keys, array in parameters:
            _fill(files, specs[keys], _to_host(dotted(keys), array))
            files.flush()
        if plan.like is not None:
            _copy_other_parts(files, plan.like)
            files.flush()


@contextmanager
def _atomic_directory(path: Path) -> Iterator[Path]:
    """A directory that becomes `path` when the block ends well, and vanishes when it does not."""
    if path.exists():
        raise CheckpointError(f"{path}: already exists; remove it or choose another path")
    partial = path.with_name(path.name + PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        partial.rename(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class _OutputFiles:
    """Writable, zero-filled views of the tensors of a plan; all files are reserved at once, before any copy."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self._directory = directory
        self._shard_of = {name: shard for shard in plan.shards for name in shard.header.tensors}
        self._maps: dict[str, np.memmap[Any, np.dtype[np.uint8]]] = {}
        for shard in plan.shards:
            _reserve(directory / shard.file, shard)

    def view(self, name: str) -> np.ndarray:
        shard = self._shard_of[name]
        if shard.file not in self._maps:
            self._maps[shard.file] = np.memmap(self._directory / shard.file, np.uint8, "r+")
        entry = shard.header.tensors[name]
        return self._maps[shard.file][entry.start : entry.stop].view(NUMPY_DTYPE[entry.dtype]).reshape(entry.shape)

    def flush(self) -> None:
        """Hands written pages to the system, so that they do not count as this process's memory."""
        self._maps.clear()


def _reserve(file: Path, shard: ShardPlan) -> None:
    """Creates a shard with its header and zeros; a full disk fails here, not in a memory map."""
    with file.open("xb") as handle:
        handle.write(shard.header_bytes)
        handle.flush()
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle.fileno(), 0, shard.header.file_bytes)
        else:
            handle.truncate(shard.header.file_bytes)


def _fill(files: _OutputFiles, spec: params.ParamSpec, values: np.ndarray) -> None:
    """Copies one parameter into the released tensors that it was read from."""
    for piece in spec.pieces:
        target = piece_view(piece, files.view(piece.name))
        target[...] = values[piece.index].astype(target.dtype)


def _to_host(name: str, array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        raise CheckpointError(f"{name}: lies partly on other hosts; export from one process, after `restore`")
    return np.asarray(array)


def _copy_other_parts(files: _OutputFiles, source: Source) -> None:
    """Vision tensors are not in the tree; a checkpoint written `like` another keeps them."""
    with OpenTensors(source) as tensors:
        for name in source.tensors:
            if name.startswith(OTHER_PARTS):
                files.view(name)[...] = tensors.view(name)


def _write_small_files(directory: Path, config: K3Config, plan: Plan) -> None:
    if plan.index is not None:
        (directory / INDEX).write_bytes(plan.index)
    known = None if plan.like is None else plan.like.directory / CONFIG
    if known is not None and known.is_file() and read_config(known.parent) == config:
        shutil.copyfile(known, directory / CONFIG)
    else:
        (directory / CONFIG).write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
