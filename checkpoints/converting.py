"""Released format to orbax, one decoder layer at a time, resumable after a kill at any point."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints import native
from checkpoints.checking import check, read_config
from checkpoints.errors import CheckpointError
from checkpoints.source import Source
from checkpoints.streaming import Progress, load_tree, model_dtype
from k3jax import params
from k3jax.config import K3Config

COMPANIONS = (
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "preprocessor_config.json",
    "chat_template.jinja",
)
"""Small files beside the weights that travel with them."""


def convert(
    path: str | Path,
    target: str | Path,
    config: K3Config | None = None,
    *,
    dtype: Any = jnp.bfloat16,
    progress: Progress | None = None,
) -> None:
    """Converts the released-format checkpoint at `path` to an orbax checkpoint at `target`.

    Works in `target.partial`, which appears as `target` when everything is written. A run that was stopped is
    taken up where it ended: finished layers are not read again. Host memory is bounded by one layer
    and 1 GiB of writes. Raises `CheckpointError`, also when a partial target came from another source.
    """
    config = config or read_config(path)
    source = check(path, config)
    target_dtype = model_dtype(dtype)
    identity = fingerprint(source, config, target_dtype)
    partial = native.begin(target, resume=_resumable(native.partial_path(target), identity))
    _record(partial / native.CONVERSION, identity)

    def produce(specs: params.Tree) -> params.Tree:
        return load_tree(source, specs, dtype=target_dtype)

    native.write_groups(partial, config, target_dtype, produce, progress)
    copy_companions(source.directory, partial)
    native.commit(partial, target, config, target_dtype)


def fingerprint(source: Source, config: K3Config, dtype: np.dtype[Any]) -> dict[str, Any]:
    """What decides the outcome of a conversion: configuration, dtype, and the identity of every shard."""
    digest = hashlib.sha256(json.dumps(config.to_hf(), sort_keys=True).encode())
    for file, header in sorted(source.shards.items()):
        stat = (source.directory / file).stat()
        digest.update(repr((file, stat.st_size, stat.st_mtime_ns, sorted(header.tensors.items()))).encode())
    return {"source": source.directory.name, "dtype": str(dtype), "sha256": digest.hexdigest()}


def copy_companions(directory: Path, target: Path) -> None:
    """Copies tokenizer and generation files, where there are any."""
    for name in COMPANIONS:
        if (directory / name).is_file():
            shutil.copyfile(directory / name, target / name)


def _record(file: Path, identity: dict[str, Any]) -> None:
    """Writes the fingerprint so that a kill leaves all of it or nothing."""
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")
    draft.replace(file)


def _resumable(partial: Path, identity: dict[str, Any]) -> bool:
    """Whether `partial` was begun from the same source; raises when it was begun from another."""
    try:
        begun = json.loads((partial / native.CONVERSION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # nothing there, or killed before anything was written
    if begun != identity:
        raise CheckpointError(
            f"{partial}: was begun from another source or with other settings ({begun} against {identity}); "
            "remove it to start again"
        )
    return True
