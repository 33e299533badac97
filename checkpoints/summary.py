"""What `inspect` prints: configuration, tensors by dtype, shards. Headers and metadata only."""

import collections
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from checkpoints import native, reading
from checkpoints.checking import OTHER_PARTS, read_config
from checkpoints.errors import CheckpointError
from checkpoints.progress import size
from checkpoints.source import Source, find_source
from checkpoints.streaming import parameter_bytes
from k3jax import params
from k3jax.config import ConfigError, K3Config

MAX_SHARDS = 12
"""Shard lines printed before the middle is left out."""


@dataclasses.dataclass(slots=True)
class Count:
    """A number of tensors and their bytes."""

    tensors: int = 0
    nbytes: int = 0

    def add(self, nbytes: int) -> None:
        """Counts one more tensor."""
        self.tensors += 1
        self.nbytes += nbytes

    def __str__(self) -> str:
        return f"{self.tensors:>9,} tensors {size(self.nbytes):>10}"


def describe(path: str | Path) -> Iterator[str]:
    """Lines that describe the checkpoint at `path`, in either format, usable or not."""
    if reading.is_native(path):
        yield from _describe_native(Path(path))
        return
    source, problems = find_source(path)
    yield f"{path}: released format, {len(source.shards)} shard(s), {size(source.nbytes)} of tensors"
    try:
        yield from config_lines(read_config(path))
    except (CheckpointError, ConfigError) as error:
        problems.append(str(error))
    yield from _census(source)
    yield from _shard_lines(source)
    yield from (f"problem: {problem}" for problem in problems)


def config_lines(config: K3Config) -> Iterator[str]:
    """The architecture on a few lines."""
    kda, mla, moe = config.kda, config.mla, config.moe
    yield (
        f"model    {config.num_layers} layers ({len(config.kda_layers)} KDA, {len(config.mla_layers)} MLA), "
        f"hidden {config.hidden_size}, vocabulary {config.vocab_size}, AttnRes block {config.attn_res_block_size}"
    )
    yield f"kda      {kda.num_heads} heads of {kda.head_dim}, convolution {kda.conv_kernel_size}"
    yield (
        f"mla      {mla.num_heads} heads, query {mla.qk_nope_head_dim}+{mla.qk_rope_head_dim}, value {mla.v_head_dim}, "
        f"latent {mla.kv_lora_rank}, query rank {mla.q_lora_rank}"
    )
    yield (
        f"moe      {len(config.moe_layers)} layers, {moe.num_experts} experts, {moe.num_experts_per_token} per token, "
        f"{moe.num_shared_experts} shared, latent {moe.latent_size}, inner {moe.intermediate_size}"
    )


def _census(source: Source) -> Iterator[str]:
    dtypes: dict[str, Count] = collections.defaultdict(Count)
    parts: dict[str, Count] = collections.defaultdict(Count)
    for name, (_, entry) in source.tensors.items():
        dtypes[entry.dtype].add(entry.nbytes)
        part = next((prefix for prefix in (params.PREFIX, *OTHER_PARTS) if name.startswith(prefix)), "other")
        parts[part.rstrip(".")].add(entry.nbytes)
    for title, counts in (("dtype", dtypes), ("part", parts)):
        yield from (f"{title:<8} {key:<16} {counts[key]}" for key in sorted(counts))


def _shard_lines(source: Source) -> Iterator[str]:
    lines = [
        f"shard    {file}  {len(header.tensors):,} tensors  {size(header.file_bytes)}"
        for file, header in source.shards.items()
    ]
    half = MAX_SHARDS // 2
    left_out = [f"shard    ... {len(lines) - MAX_SHARDS} more"] if len(lines) > MAX_SHARDS else []
    yield from [*lines[:half], *left_out, *lines[-half:]] if left_out else lines


def _describe_native(root: Path) -> Iterator[str]:
    config, dtype = native.read_manifest(root)
    counts: dict[str, Count] = collections.defaultdict(Count)
    for _, spec in params.flatten(params.model_specs(config)):
        counts[str(spec.array_dtype(dtype))].add(parameter_bytes(spec, dtype))
    total = sum(count.nbytes for count in counts.values())
    yield f"{root}: orbax, {len(native.groups(config))} groups, {size(total)} of parameters, model dtype {dtype}"
    yield from config_lines(config)
    yield from (f"dtype    {name:<16} {counts[name]}" for name in sorted(counts))
