"""Writes a parameter tree in the released format, byte for byte what `load` read.

The inverse of `assemble`: every parameter is copied into zero-filled files through the same pieces, read
backwards. Host memory is bounded by one parameter; the files are written through memory maps.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints.assemble import piece_view
from checkpoints.checking import OTHER_PARTS, check, read_config
from checkpoints.errors import CheckpointError
from checkpoints.native import partial_path, tree_dtype
from checkpoints.reading import Progress
from checkpoints.shards import Plan, ShardPlan, plan_bytes, plan_count, plan_like, plan_released
from checkpoints.source import CONFIG, INDEX, NUMPY_DTYPE, OpenTensors, Source
from k3jax import params
from k3jax.config import K3Config


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
    if sum(option is not None for option in (shards, max_shard_bytes, like)) > 1:
        raise ValueError("pass at most one of shards, max_shard_bytes and like")
    tree_dtype(config, tree)
    source = None if like is None else check(like, config)
    if source is not None:
        plan = plan_like(source)
    elif shards is not None:
        plan = plan_count(config, shards)
    elif max_shard_bytes is not None:
        plan = plan_bytes(config, max_shard_bytes)
    else:
        plan = plan_released(config)
    with _atomic_directory(Path(path)) as directory:
        _write_small_files(directory, config, plan, like)
        with ExitStack() as stack:
            files = _OutputFiles(directory, plan, stack)
            _write_parameters(files, config, tree, progress)
            if source is not None:
                _copy_other_parts(files, source)


@contextmanager
def _atomic_directory(path: Path) -> Iterator[Path]:
    """A directory that becomes `path` when the block ends well, and vanishes when it does not."""
    if path.exists():
        raise CheckpointError(f"{path}: already exists; remove it or choose another path")
    partial = partial_path(path)
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
    """Writable, zero-filled views of the tensors of a plan; a shard is created when first touched."""

    def __init__(self, directory: Path, plan: Plan, stack: ExitStack) -> None:
        self._directory = directory
        self._shard_of = {name: shard for shard in plan.shards for name in shard.header.tensors}
        self._maps: dict[str, np.memmap[Any, np.dtype[np.uint8]]] = {}
        for shard in plan.shards:
            _reserve(directory / shard.file, shard)
        stack.callback(self._maps.clear)

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
        if shard.header.file_bytes > len(shard.header_bytes):
            handle.flush()
            os.posix_fallocate(handle.fileno(), 0, shard.header.file_bytes)


def _write_parameters(
    files: _OutputFiles, config: K3Config, tree: Mapping[str, Any], progress: Progress | None
) -> None:
    specs = dict(params.flatten(params.model_specs(config)))
    arrays = dict(params.flatten(tree))
    total = sum(array.nbytes for array in arrays.values())
    done = 0
    for keys, spec in specs.items():
        values = _to_host(".".join(keys), arrays[keys])
        for piece in spec.pieces:
            target = piece_view(piece, files.view(piece.name))
            target[...] = values[piece.index].astype(target.dtype)
        files.flush()
        done += arrays[keys].nbytes
        if progress is not None:
            progress(done, total)


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


def _write_small_files(directory: Path, config: K3Config, plan: Plan, like: str | Path | None) -> None:
    if plan.index is not None:
        (directory / INDEX).write_bytes(plan.index)
    if like is not None and Path(like).is_dir() and read_config(like) == config:
        shutil.copyfile(Path(like) / CONFIG, directory / CONFIG)
    else:
        (directory / CONFIG).write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")


def tensor_names(plans: Sequence[ShardPlan]) -> list[str]:
    """Tensors of all shards, in file order."""
    return [name for shard in plans for name in shard.header.tensors]
