"""A released-format checkpoint on disk: its shards, their headers, and lazy views of its tensors."""

import dataclasses
import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.header import Header, HeaderError, TensorEntry, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
NATIVE_MANIFEST = "checkpoint.json"
"""Marks a directory that `save` or `convert` wrote."""

NUMPY_DTYPE: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(jnp.bfloat16),
    "F32": np.dtype(np.float32),
    "U8": np.dtype(np.uint8),
}
"""Dtypes that a K3 checkpoint uses; they are little-endian on disk, as on every machine JAX runs on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Shards of a checkpoint with validated headers, and which shard holds each tensor."""

    directory: Path
    shards: dict[str, Header]
    index: dict[str, Any] | None

    @property
    def tensors(self) -> dict[str, tuple[str, TensorEntry]]:
        """Tensor name -> (shard file, entry), over all shards."""
        return {name: (file, entry) for file, header in self.shards.items() for name, entry in header.tensors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for header in self.shards.values() for entry in header.tensors.values())


def find_source(path: str | Path) -> tuple[Source, list[str]]:
    """Reads every header of the checkpoint at `path` (a directory or one safetensors file).

    Returns the source and a list of everything wrong with files, index and headers. Raises
    `CheckpointError` only when no checkpoint is there at all. No tensor data is read.
    """
    root = Path(path)
    try:
        directory, files, index, problems = _locate(root)
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read ({error.strerror}); expected a checkpoint directory") from error
    shards: dict[str, Header] = {}
    for file in files:
        try:
            shards[file] = read_header(directory / file)
        except HeaderError as error:
            problems.append(f"{file}: {error}" if (directory / file).exists() else f"{file}: missing shard")
    problems += _index_problems(index, shards)
    return Source(directory, shards, index), problems


def _locate(root: Path) -> tuple[Path, list[str], dict[str, Any] | None, list[str]]:
    """Directory, shard files, index and problems."""
    if not root.exists():
        raise CheckpointError(f"{root}: does not exist; expected a checkpoint directory or a .safetensors file")
    if root.is_file():
        return root.parent, [root.name], None, []
    names = sorted(entry.name for entry in root.iterdir() if entry.name.endswith(".safetensors"))
    if INDEX in (entry.name for entry in root.iterdir()):
        index = _read_index(root / INDEX)
        return root, sorted(set(index["weight_map"].values())), index, []
    if SINGLE in names or len(names) == 1:
        return root, [SINGLE if SINGLE in names else names[0]], None, []
    if not names:
        raise CheckpointError(f"{root}: holds no checkpoint; expected {SINGLE} or {INDEX} with its shards")
    return root, names, None, [f"{INDEX}: missing, but there are {len(names)} shards"]


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error})") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map; expected an object that maps tensors to shard files")
    plain = {file for file in {*filter(_is_text, weight_map.values())} if _is_file_name(file)}
    bad = [
        f"weight_map names {file!r} for {name}"
        for name, file in weight_map.items()
        if not _is_text(file) or file not in plain
    ]
    if bad:
        raise CheckpointError(f"{path}: shards must be plain .safetensors file names in the same directory", bad)
    return index


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_file_name(file: str) -> bool:
    """Whether an index entry stays inside the checkpoint's directory."""
    return file.endswith(".safetensors") and Path(file).name == file


def _index_problems(index: Mapping[str, Any] | None, shards: Mapping[str, Header]) -> Iterator[str]:
    """Where index and headers disagree; shards without a usable header are reported elsewhere."""
    if index is None:
        seen: dict[str, str] = {}
        for file, header in shards.items():
            yield from (f"{name}: in both {seen[name]} and {file}" for name in header.tensors if name in seen)
            seen |= dict.fromkeys(header.tensors, file)
        return
    weight_map = index["weight_map"]
    for name, file in weight_map.items():
        if file in shards and name not in shards[file].tensors:
            yield f"{name}: the index says {file}, whose header does not have it"
    for file, header in shards.items():
        for name in header.tensors:
            if name not in weight_map:
                yield f"{name}: in {file} but not in the index"
            elif weight_map[name] != file:
                yield f"{name}: in {file}, but the index says {weight_map[name]}"


class OpenTensors:
    """Lazy views of a source's tensors through memory maps; nothing is read until it is copied.

    A context manager. Views must not outlive it. `release` gives mapped pages back to the system, which
    bounds the resident memory by what was copied since the last call.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._tensors = source.tensors
        self._maps: dict[str, mmap.mmap] = {}

    def __enter__(self) -> "OpenTensors":
        return self

    def __exit__(self, *_: object) -> None:
        # A map closes once the last view of it is gone.
        self._maps.clear()

    def view(self, name: str) -> np.ndarray:
        """The tensor `name` as a read-only array over the file."""
        file, entry = self._tensors[name]
        data = np.frombuffer(self._map(file), np.uint8, entry.nbytes, entry.start)
        return data.view(NUMPY_DTYPE[entry.dtype]).reshape(entry.shape)

    def release(self) -> None:
        """Drops the pages read so far from this process."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            try:
                with (self._source.directory / file).open("rb") as handle:
                    self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise CheckpointError(f"{self._source.directory / file}: cannot be read ({error.strerror})") from error
        return self._maps[file]
