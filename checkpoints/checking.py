"""Header-only checks: everything wrong with a checkpoint, before a byte of data is read."""

import collections
from collections.abc import Iterator, Mapping
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.source import CONFIG, Source, find_source
from k3jax import params
from k3jax.config import K3Config

OTHER_PARTS = ("vision_tower.", "mm_projector.")
"""Prefixes of tensors that are not the text model's; they are accepted and skipped."""

Expected = Mapping[str, tuple[tuple[int, ...], str]]
"""Tensor name -> (shape, safetensors dtype)."""


def check(path: str | Path, config: K3Config | None = None) -> Source:
    """Checks every name, shape, dtype and file size of a released-format checkpoint against `config`.

    `config` defaults to the checkpoint's own `config.json`. Reads headers only and returns the checkpoint's
    shards and tensors. Raises one `CheckpointError` that lists every missing, extra, mis-shaped and mis-typed
    tensor, every missing or truncated shard and every disagreement with the index; `ConfigError` for a
    configuration that cannot be used.
    """
    source, problems = find_source(path)
    expected = params.hf_tensors(params.model_specs(config or read_config(path)))
    return require(path, source, problems + list(tensor_problems(source, expected, OTHER_PARTS)))


def require(path: str | Path, source: Source, problems: list[str]) -> Source:
    """Returns `source`, or raises one error with all `problems`."""
    if problems:
        raise CheckpointError(f"{path} cannot be used", problems)
    return source


def read_config(path: str | Path) -> K3Config:
    """The configuration in, or beside, the checkpoint at `path`."""
    root = Path(path)
    if not root.exists():
        raise CheckpointError(f"{root}: does not exist; expected a checkpoint directory or a .safetensors file")
    file = (root if root.is_dir() else root.parent) / CONFIG
    if not file.exists():
        raise CheckpointError(f"{file}: missing; expected the checkpoint's configuration, or pass `config`")
    return K3Config.from_file(file)


def tensor_problems(source: Source, expected: Expected, skipped: tuple[str, ...] = ()) -> Iterator[str]:
    """Differences between a checkpoint's tensors and the expected ones, except names that begin with `skipped`."""
    found = source.tensors
    unread = set(source.index["weight_map"].values()) - source.shards.keys() if source.index else set()
    lost: collections.Counter[str] = collections.Counter()
    for name, (shape, dtype) in expected.items():
        if name in found:
            entry = found[name][1]
            if entry.shape != shape:
                yield f"{name}: shape is {list(entry.shape)}, expected {list(shape)}"
            if entry.dtype != dtype:
                yield f"{name}: dtype is {entry.dtype}, expected {dtype}"
        elif source.index is None or (file := source.index["weight_map"].get(name)) is None:
            yield f"{name}: missing, expected {dtype} {list(shape)}"
        elif file in unread:
            lost[file] += 1
    for file, count in lost.items():
        yield f"{file}: cannot be read, and {count:,} tensor(s) with it"
    for name, (file, entry) in found.items():
        if name not in expected and not name.startswith(skipped):
            yield f"{name}: unexpected tensor {entry.dtype} {list(entry.shape)} in {file}"
