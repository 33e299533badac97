"""A prefix outside the device: pages and state are one object, whole or absent, in memory or in a file."""

import dataclasses
import hashlib
import json
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from k3jax.cache import K3Cache, KdaCache, MlaCache


class DamagedPrefix(ValueError):
    """A stored prefix that is incomplete or not what was written."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Prefix:
    """Latent pages of all MLA layers, states and windows of all KDA layers, in the order of the layers."""

    latents: list[np.ndarray]
    """[pages, page, L] each."""
    states: list[np.ndarray]
    windows: list[np.ndarray]

    @classmethod
    def join(cls, pieces: list[K3Cache], pages: int) -> "Prefix":
        """From pieces of a fixed number of pages; what is beyond `pages` is padding."""
        layers = list(zip(*(piece.layers for piece in pieces)))
        latents = [
            np.concatenate([entry.latent for entry in entries])[:pages]
            for entries in layers
            if isinstance(entries[0], MlaCache)
        ]
        kda = [entries[0] for entries in layers if isinstance(entries[0], KdaCache)]
        return cls(latents, [np.array(e.state) for e in kda], [np.array(e.window) for e in kda])

    def piece(self, like: K3Cache, start: int, count: int) -> K3Cache:
        """Pages `start` to `start` + `count` and the state, as entries in the order of `like`."""
        latents, kda = iter(self.latents), iter(zip(self.states, self.windows, strict=True))

        def entry(kind: Any) -> KdaCache | MlaCache:
            if isinstance(kind, KdaCache):
                return KdaCache(*next(kda))
            pages = next(latents)
            part = np.zeros((count, *pages.shape[1:]), pages.dtype)
            chosen = pages[start : start + count]
            part[: len(chosen)] = chosen
            return MlaCache(part)

        return K3Cache(tuple(map(entry, like.layers)))

    @property
    def arrays(self) -> list[np.ndarray]:
        """Everything, in the order of a file."""
        return [*self.latents, *self.states, *self.windows]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    def checksum(self) -> str:
        """SHA-256 of all bytes."""
        digest = hashlib.sha256()
        for array in self.arrays:
            digest.update(np.ascontiguousarray(array).view(np.uint8))
        return digest.hexdigest()

    def save(self, path: FilePath) -> None:
        """Writes one file: a line of JSON, then the arrays. A file that exists is complete."""
        header = {
            "kinds": [len(self.latents), len(self.states)],
            "arrays": [[str(array.dtype), list(array.shape)] for array in self.arrays],
            "sha256": self.checksum(),
        }
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            file.write(json.dumps(header).encode() + b"\n")
            for array in self.arrays:
                file.write(np.ascontiguousarray(array).tobytes())
        part.rename(path)

    @classmethod
    def load(cls, path: FilePath) -> "Prefix":
        """Reads what `save` wrote. Raises `DamagedPrefix` for anything else."""
        try:
            with path.open("rb") as file:
                header = json.loads(file.readline())
                arrays = [_read(file, dtype, shape) for dtype, shape in header["arrays"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedPrefix(f"{path}: cannot be read as a prefix ({error})") from error
        latents, states = header["kinds"]
        prefix = cls(arrays[:latents], arrays[latents : latents + states], arrays[latents + states :])
        if prefix.checksum() != header["sha256"]:
            raise DamagedPrefix(f"{path}: the checksum differs from the one in its header; the file is damaged")
        return prefix


def _read(file: Any, dtype: str, shape: list[int]) -> np.ndarray:
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    data = file.read(size)
    if len(data) != size:
        raise ValueError(f"{size} bytes were expected, {len(data)} are left")
    return np.frombuffer(data, kind).reshape(shape)
