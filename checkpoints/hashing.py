"""SHA-256 of a checkpoint's files: neither safetensors nor orbax notices a flipped byte."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.streaming import Progress

HASHES = "sha256.json"
"""`{"files": {relative path: hex digest}}`, beside the files."""

BLOCK = 16 << 20


def weight_files(directory: Path) -> list[str]:
    """Files that hold weights, relative to the checkpoint: safetensors shards, or everything that orbax wrote."""
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    stored = (path for path in (directory / "parameters").rglob("*") if path.is_file())
    return shards or sorted(path.relative_to(directory).as_posix() for path in stored)


def write_hashes(directory: Path, manifest: Path, progress: Progress | None = None) -> None:
    """Hashes every weight file of a checkpoint into `manifest`."""
    digests = digest_files(directory, weight_files(directory), progress)
    try:
        manifest.write_text(json.dumps({"files": digests}, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"{manifest}: cannot be written ({error.strerror}); name another file with --manifest"
        ) from error


def verify_hashes(directory: Path, manifest: Path, progress: Progress | None = None) -> int:
    """Compares every weight file with `manifest` and returns their number.

    Raises `CheckpointError` that lists every file that differs, is missing, or is not in the manifest.
    """
    expected = _read(manifest)
    files = weight_files(directory)
    digests = digest_files(directory, [file for file in files if file in expected], progress)
    problems = [f"{file}: missing" for file in expected if file not in files]
    problems += [f"{file}: not in {manifest.name}" for file in files if file not in expected]
    problems += [
        f"{file}: SHA-256 is {digest}, expected {expected[file]}"
        for file, digest in digests.items()
        if digest != expected[file]
    ]
    if problems:
        raise CheckpointError(f"{directory} differs from {manifest.name}", problems)
    return len(digests)


def digest_files(directory: Path, files: Sequence[str], progress: Progress | None = None) -> dict[str, str]:
    """Hex digest per file; reads everything once, 16 MiB at a time."""
    digests: dict[str, str] = {}
    done = 0
    try:
        total = sum((directory / file).stat().st_size for file in files)
        for file in files:
            digest = hashlib.sha256()
            with (directory / file).open("rb") as handle:
                while block := handle.read(BLOCK):
                    digest.update(block)
                    done += len(block)
                    if progress is not None:
                        progress(done, total)
            digests[file] = digest.hexdigest()
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read ({error.strerror})") from error
    return digests


def _read(manifest: Path) -> dict[str, str]:
    try:
        return dict(json.loads(manifest.read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{manifest}: is not a hash manifest ({error})") from error
