"""Which tensor goes into which file at which byte: the layouts that an export can have."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence

from checkpoints.errors import CheckpointError
from checkpoints.header import ITEM_BYTES, LENGTH_BYTES, Header, TensorEntry
from checkpoints.source import INDEX, SINGLE, Source
from k3jax import params
from k3jax.config import K3Config

METADATA = {"format": "pt"}
"""What the released files say; loaders of other frameworks look for it."""
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


def plan_released(config: K3Config) -> Plan:
    """Decoder layer l in file l + 1, everything else in the last one (spec: released checkpoint layout)."""
    specs = params.model_specs(config)
    layers = specs.pop("layers")
    return _plan([params.hf_tensors(layer) for layer in layers.values()] + [params.hf_tensors(specs)])


def plan_count(config: K3Config, count: int) -> Plan:
    """`count` files of about equal size, tensors in the order of the model."""
    tensors = params.hf_tensors(params.model_specs(config))
    if not 0 < count <= len(tensors):
        raise CheckpointError(f"shards is {count}, expected 1..{len(tensors)} (one tensor per file at most)")
    total, done = sum(map(_nbytes, tensors.values())), 0
    files: list[dict[str, tuple[tuple[int, ...], str]]] = [{} for _ in range(count)]
    current = 0
    for position, (name, tensor) in enumerate(tensors.items()):
        left = len(tensors) - position
        full = bool(files[current]) and done * count >= total * (current + 1)
        if current + 1 < count and (full or left < count - current):
            current += 1
        if files[current] and left == count - current - 1 and current + 1 < count:
            current += 1
        files[current][name] = tensor
        done += _nbytes(tensor)
    return _plan(files)


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
        return Plan((_shard(SINGLE, files[0]),), None)
    return _plan(files)


def plan_like(source: Source) -> Plan:
    """The files, headers and index of an existing checkpoint, byte for byte."""
    shards: list[ShardPlan] = []
    for file, header in source.shards.items():
        with (source.directory / file).open("rb") as handle:
            shards.append(ShardPlan(file, header, handle.read(header.data_start)))
    index = None if source.index is None else (source.directory / INDEX).read_bytes()
    return Plan(tuple(shards), index)


def _plan(files: Sequence[Tensors]) -> Plan:
    names = [f"model-{number:05d}-of-{len(files):06d}.safetensors" for number in range(1, len(files) + 1)]
    shards = tuple(_shard(name, tensors) for name, tensors in zip(names, files, strict=True))
    return Plan(shards, _index(shards))


def _shard(file: str, tensors: Tensors) -> ShardPlan:
    """Tensors in the order of the safetensors library: wider dtypes first, then by name."""
    order = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name][1]], name))
    stops: list[int] = []
    for name in order:
        stops.append((stops[-1] if stops else 0) + _nbytes(tensors[name]))
    starts = [0, *stops[:-1]]
    text = _header_text(tensors, zip(order, starts, stops, strict=True))
    data_start = len(text)
    entries = {
        name: TensorEntry(tensors[name][1], tensors[name][0], data_start + start, data_start + stop)
        for name, start, stop in zip(order, starts, stops, strict=True)
    }
    return ShardPlan(file, Header(dict(METADATA), entries, data_start, data_start + (stops[-1] if stops else 0)), text)


def _header_text(tensors: Tensors, ranges: Iterable[tuple[str, int, int]]) -> bytes:
    fields: dict[str, object] = {"__metadata__": METADATA}
    for name, start, stop in ranges:
        shape, dtype = tensors[name]
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
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
