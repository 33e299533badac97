"""Looks at, checks and converts checkpoints.

Examples:
    python -m checkpoints inspect path/to/Kimi-K3
    python -m checkpoints check path/to/Kimi-K3 --hash
    python -m checkpoints convert path/to/Kimi-K3 path/to/orbax
    python -m checkpoints export path/to/orbax path/to/released --max-shard-size 5GB

Exit codes: 0 done, 1 the checkpoint cannot be used or written, 2 wrong usage.
"""

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from k3jax import program

Dtype = Literal["bfloat16", "float32"]
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Print configuration, tensors by dtype, and shards; reads headers only.

    Example: python -m checkpoints inspect path/to/Kimi-K3
    """

    path: Path
    """Checkpoint directory (either format) or safetensors file."""


@dataclasses.dataclass(frozen=True)
class Check:
    """Compare every name, shape, dtype and file size with the configuration; reads headers only.

    Prints every problem on a line of its own and exits with 1 if there is any.

    Example: python -m checkpoints check path/to/Kimi-K3 --hash
    """

    path: Path
    """Checkpoint directory (either format) or safetensors file."""
    config: Path | None = None
    """config.json to compare with (default: the checkpoint's own)."""
    hash: bool = False
    """Also hash every weight file: compare with the manifest if there is one, else write it."""
    manifest: Path | None = None
    """Manifest of --hash (default: sha256.json in the checkpoint)."""


@dataclasses.dataclass(frozen=True)
class Convert:
    """Convert the released format to orbax, layer by layer; run it again to resume after an interruption.

    Example: python -m checkpoints convert path/to/Kimi-K3 path/to/orbax
    """

    path: Path
    """Checkpoint in the released format."""
    target: Path
    """Directory to create."""
    dtype: Dtype = "bfloat16"
    """Model dtype to store."""


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a checkpoint (either format) in the released format.

    Example: python -m checkpoints export path/to/orbax path/to/released --max-shard-size 5GB
    """

    path: Path
    """Checkpoint in either format."""
    target: Path
    """Directory to create."""
    shards: int | None = None
    """Number of files (default: one per decoder layer and one for the rest, as released)."""
    max_shard_size: str | None = None
    """Largest file, such as 5GB or 512MiB."""
    like: Path | None = None
    """Repeat the files and headers of this checkpoint, and its vision tensors."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    command = program.parse(Inspect | Check | Convert | Export, "checkpoints", arguments, description=__doc__)
    from checkpoints.errors import CheckpointError
    from k3jax.config import ConfigError

    run: Any = {Inspect: _inspect, Check: _check, Convert: _convert, Export: _export}[type(command)]
    try:
        run(command)
    except program.UsageError as error:
        return _fail(str(error), program.USAGE)
    except (CheckpointError, ConfigError) as error:
        return _fail(str(error), program.FAILURE)
    except KeyboardInterrupt:
        return _fail("interrupted; run the same command again to go on", program.INTERRUPTED)
    return 0


def _fail(text: str, code: int) -> int:
    """Prints an error, list and all, as one line."""
    print("error: " + re.sub(r":?\n\s*-\s*", "; ", text), file=sys.stderr)
    return code


def _inspect(command: Inspect) -> None:
    from checkpoints.summary import describe

    for line in describe(command.path):
        print(line)


def _check(command: Check) -> None:
    from checkpoints.errors import CheckpointError

    if command.manifest and not command.hash:
        raise program.UsageError("--manifest needs --hash")
    try:
        print(_check_headers(command))
        if command.hash:
            print(_check_hashes(command))
    except CheckpointError as error:
        for problem in error.problems:
            print(problem)
        if not error.problems:
            raise
        raise CheckpointError(f"{error.title}: {len(error.problems)} problem(s)") from error


def _check_headers(command: Check) -> str:
    from checkpoints import checking, native, reading
    from k3jax.config import K3Config

    config = K3Config.from_file(command.config) if command.config else None
    if reading.is_native(command.path):
        stored, dtype = native.read_manifest(command.path)
        native.check_stored(command.path, config or stored, dtype)
        return f"{command.path}: every parameter has the expected shape and dtype (metadata only)"
    source = checking.check(command.path, config)
    skipped = sum(name.startswith(checking.OTHER_PARTS) for name in source.tensors)
    return (
        f"{command.path}: {len(source.tensors) - skipped:,} tensors in {len(source.shards)} shard(s) "
        f"are as expected (headers only), {skipped} vision tensors skipped"
    )


def _check_hashes(command: Check) -> str:
    from checkpoints import hashing
    from checkpoints.progress import ProgressLine

    directory = command.path if command.path.is_dir() else command.path.parent
    manifest = command.manifest or directory / hashing.HASHES
    with ProgressLine("hashing") as progress:
        if not manifest.exists():
            hashing.write_hashes(directory, manifest, progress)
            return f"{manifest}: written"
        return f"{manifest}: {hashing.verify_hashes(directory, manifest, progress)} file(s) agree"


def _convert(command: Convert) -> None:
    from checkpoints.converting import convert
    from checkpoints.progress import ProgressLine

    with ProgressLine("converting") as progress:
        convert(command.path, command.target, dtype=command.dtype, progress=progress)


def _export(command: Export) -> None:
    import jax.numpy as jnp

    from checkpoints.converting import copy_companions
    from checkpoints.exporting import write_released
    from checkpoints.progress import ProgressLine
    from checkpoints.reading import open_stream
    from checkpoints.shards import make_plan
    from checkpoints.streaming import reported, tree_bytes
    from k3jax import params

    if sum(option is not None for option in (command.shards, command.max_shard_size, command.like)) > 1:
        raise program.UsageError("give at most one of --shards, --max-shard-size and --like")
    if command.shards is not None and command.shards < 1:
        raise program.UsageError(f"--shards is {command.shards}, expected at least 1")
    limit = None if command.max_shard_size is None else parse_size(command.max_shard_size)
    config, parameters = open_stream(command.path)
    plan = make_plan(config, shards=command.shards, max_shard_bytes=limit, like=command.like)
    total = tree_bytes(params.model_specs(config), jnp.bfloat16)
    with ProgressLine("exporting") as progress:
        write_released(command.target, config, reported(parameters, total, progress), plan)
    if command.path.is_dir():
        copy_companions(command.path, command.target)


def parse_size(text: str) -> int:
    """Bytes in a size such as `5GB`, `512MiB` or `1000000`."""
    match = re.fullmatch(r"(\d+) ?([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS or int(match[1]) == 0:
        raise program.UsageError(f"size is {text!r}, expected a number and {', '.join(filter(None, UNITS))}")
    return int(match[1]) * UNITS[match[2].upper()]


if __name__ == "__main__":
    sys.exit(main())
