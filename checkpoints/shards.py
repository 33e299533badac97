"""Which tensor goes into which file at which byte: the layouts that an export can have."""

import bisect
import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from checkpoints.checking import check
from checkpoints.errors import CheckpointError
from checkpoints.header import ITEM_BYTES, LENGTH_BYTES, Header, TensorEntry
from checkpoints.source import INDEX, SINGLE, Source
from k3jax import params
from k3jax.config import K3Config

ALIGNMENT = 8

Tensors = Mapping[str, tuple[tuple[int, ...], str]]
"""Name -> (shape, safetensors dtype)."""


@dataclasses.dataclass(frozen=True, slots=True)
class ShardPlan:
    """One file: its header and the exact bytes of it."""

    file: str
    header: Header
    header_bytes: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """All files of a checkpoint, and the text of its index (None for a lone `model.safetensors`)."""

    shards: tuple[ShardPlan, ...]
    index: bytes | None
    like: Source | None = None
    """The checkpoint whose layout this is."""


def make_plan(
    config: K3Config,
    *,
    shards: int | None = None,
    max_shard_bytes: int | None = None,
    like: str | Path | None = None,
) -> Plan:
    """The layout that at most one option selects; see `export`."""
    if sum(option is not None for option in (shards, max_shard_bytes, like)) > 1:
        raise ValueError("give at most one of shards, max_shard_bytes and like")
    if like is not None:
        return plan_like(check(like, config))
    if shards is not None:
        return plan_count(config, shards)
    if max_shard_bytes is not None:
        return plan_bytes(config, max_shard_bytes)
    return plan_released(config)


def plan_released(config: K3Config) -> Plan:
    """Decoder layer l in file l + 1, everything else in the last one (spec: released checkpoint layout)."""
    specs = params.model_specs(config)
    layers = specs.pop("layers")
    return _plan([params.hf_tensors(layer) for layer in layers.values()] + [params.hf_tensors(specs)])


def plan_count(config: K3Config, count: int) -> Plan:
    """`count` files of about equal size, none empty, tensors in the order of the model."""
    tensors = list(params.hf_tensors(params.model_specs(config)).items())
    if not 0 < count <= len(tensors):
        raise CheckpointError(f"shards is {count}, expected 1..{len(tensors)} (no file may be empty)")
    ends = list(itertools.accumulate(_nbytes(tensor) for _, tensor in tensors))
    cuts = [0]
    for number in range(1, count):
        even = bisect.bisect_left(ends, ends[-1] * number // count)
        cuts.append(min(max(even, cuts[-1] + 1), len(tensors) - count + number))
    return _plan([dict(tensors[start:stop]) for start, stop in itertools.pairwise([*cuts, len(tensors)])])


def plan_bytes(config: K3Config, limit: int) -> Plan:
    """Files of at most `limit` bytes of data (or one larger tensor); one file alone has no index."""
    files: list[dict[str, tuple[tuple[int, ...], str]]] = [{}]
    used = 0
    for name, tensor in params.hf_tensors(params.model_specs(config)).items():
        if files[-1] and used + _nbytes(tensor) > limit:
            files.append({})
            used = 0
        files[-1][name] = tensor
        used += _nbytes(tensor)
    if len(files) == 1:
        return Plan((plan_shard(SINGLE, files[0]),), None)
    return _plan(files)


def plan_like(source: Source) -> Plan:
    """The files, headers and index of an existing checkpoint, byte for byte."""
    shards: list[ShardPlan] = []
    for file, header in source.shards.items():
        with (source.directory / file).open("rb") as handle:
            shards.append(ShardPlan(file, header, handle.read(header.data_start)))
    index = None if source.index is None else (source.directory / INDEX).read_bytes()
    return Plan(tuple(shards), index, source)


def _plan(files: Sequence[Tensors]) -> Plan:
    names = [f"model-{number:05d}-of-{len(files):06d}.safetensors" for number in range(1, len(files) + 1)]
    shards = tuple(plan_shard(name, tensors) for name, tensors in zip(names, files, strict=True))
    return Plan(shards, _index(shards))


def plan_shard(file: str, tensors: Tensors) -> ShardPlan:
    """Tensors in the order of the safetensors library: wider dtypes first, then by name."""
    entries: dict[str, TensorEntry] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name][1]], name)):
        shape, dtype = tensors[name]
        entries[name] = TensorEntry(dtype, shape, end, end + _nbytes(tensors[name]))
        end = entries[name].stop
    text = _header_text(entries)
    placed = {
        name: entry._replace(start=entry.start + len(text), stop=entry.stop + len(text))
        for name, entry in entries.items()
    }
    return ShardPlan(file, Header(None, placed, len(text), len(text) + end), text)


def _header_text(entries: Mapping[str, TensorEntry]) -> bytes:
    """The length and the JSON of a header; `entries` count from the beginning of the data.

    No `__metadata__`: only so do the 94 text files of K3 have the released sizes, to the byte.
    """
    fields: dict[str, object] = {}
    for name, entry in entries.items():
        fields[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.start, entry.stop]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _index(shards: Sequence[ShardPlan]) -> bytes:
    weight_map = {name: shard.file for shard in shards for name in shard.header.tensors}
    total = sum(entry.nbytes for shard in shards for entry in shard.header.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _nbytes(tensor: tuple[tuple[int, ...], str]) -> int:
    shape, dtype = tensor
    return math.prod(shape) * ITEM_BYTES[dtype]
