"""A prefix outside the device: pages and state are one object, whole or absent, in memory or in a file."""

import dataclasses
import hashlib
import io
import json
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from serving.transfer import Piece


class DamagedPrefix(ValueError):
    """A stored prefix that is incomplete or not what was written."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Prefix:
    """Pages of all MLA and draft layers, states and windows of all KDA layers, in the order of the layers."""

    latents: list[np.ndarray]
    """[pages, page, L] each."""
    states: list[np.ndarray]
    windows: list[np.ndarray]

    @classmethod
    def join(cls, pieces: list[Piece], pages: int) -> "Prefix":
        """From pieces of a fixed number of pages; what is beyond `pages` is padding."""
        latents = [np.concatenate(parts)[:pages] for parts in zip(*(piece.latents for piece in pieces))]
        return cls(latents, list(map(np.array, pieces[0].states)), list(map(np.array, pieces[0].windows)))

    def piece(self, start: int, count: int) -> Piece:
        """Pages `start` to `start` + `count`, filled with zeros, and the state."""

        def part(pages: np.ndarray) -> np.ndarray:
            chosen = pages[start : start + count]
            return np.concatenate([chosen, np.zeros((count - len(chosen), *pages.shape[1:]), pages.dtype)])

        return Piece(tuple(map(part, self.latents)), tuple(self.states), tuple(self.windows))

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

    def write(self, file: Any) -> None:
        """A line of JSON, then the arrays."""
        header = {
            "kinds": [len(self.latents), len(self.states)],
            "arrays": [[str(array.dtype), list(array.shape)] for array in self.arrays],
            "sha256": self.checksum(),
        }
        file.write(json.dumps(header).encode() + b"\n")
        for array in self.arrays:
            file.write(np.ascontiguousarray(array).tobytes())

    @classmethod
    def read(cls, file: Any) -> "Prefix":
        """Reads what `write` wrote. Raises `DamagedPrefix` for anything else."""
        try:
            header = json.loads(file.readline())
            arrays = [_read(file, dtype, shape) for dtype, shape in header["arrays"]]
            latents, states = header["kinds"]
            checksum = header["sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedPrefix(f"cannot be read as a prefix ({error})") from error
        prefix = cls(arrays[:latents], arrays[latents : latents + states], arrays[latents + states :])
        if prefix.checksum() != checksum:
            raise DamagedPrefix("the checksum differs from the one in its header; the file is damaged")
        return prefix

    def save(self, path: FilePath) -> None:
        """Writes one file. A file that exists is complete."""
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            self.write(file)
        part.rename(path)

    @classmethod
    def load(cls, path: FilePath) -> "Prefix":
        """Reads what `save` wrote. Raises `DamagedPrefix` for anything else."""
        try:
            with path.open("rb") as file:
                return cls.read(file)
        except OSError as error:
            raise DamagedPrefix(f"{path}: cannot be read as a prefix ({error.strerror})") from error
        except DamagedPrefix as error:
            raise DamagedPrefix(f"{path}: {error}") from error

    def to_bytes(self) -> bytes:
        """What `save` would write."""
        buffer = io.BytesIO()
        self.write(buffer)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Prefix":
        """Reads what `to_bytes` gave. Raises `DamagedPrefix` for anything else."""
        return cls.read(io.BytesIO(data))


def _read(file: Any, dtype: str, shape: list[int]) -> np.ndarray:
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    data = file.read(size)
    if len(data) != size:
        raise ValueError(f"{size} bytes were expected, {len(data)} are left")
    return np.frombuffer(data, kind).reshape(shape)
