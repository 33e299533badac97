"""Names of prefixes: a chain of digests over hash units.

A digest covers everything before it: the model, the tenant's salt, all token ids and the images among them.
Two sequences with equal digests therefore share a prefix, and nothing else about them needs to be compared.

    root   = H(model id, salt)
    unit i = H(unit i-1, token ids of the unit, images that overlap it)
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

Digest = Any
"""What names a unit: bytes of a `HashChain`, any hashable value of another `Path`."""


class ImageSpan(NamedTuple):
    """An image whose placeholder tokens look like any other image's."""

    start: int
    length: int
    digest: bytes


@runtime_checkable
class Path(Protocol):
    """A sequence as the prefix tree sees it."""

    units: list[Digest]
    """One digest for each complete hash unit."""

    def __len__(self) -> int:
        """Tokens in the path."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends token ids."""
        ...

    def tail(self, units: int, tokens: int) -> Digest:
        """The name of the first `tokens` tokens after `units` units (fewer than a unit)."""
        ...


def root_digest(model_id: str, salt: str = "") -> bytes:
    """Where the chains of one tenant of one model start."""
    return hashlib.sha256(f"{len(model_id)}:{model_id}|{len(salt)}:{salt}".encode()).digest()


class HashChain:
    """The growing chain of one sequence; only complete units have a digest."""

    def __init__(self, root: bytes, unit: int, tokens: Sequence[int] = (), images: Iterable[ImageSpan] = ()) -> None:
        self.units: list[Digest] = []
        self._root, self._unit = root, unit
        self._images = tuple(sorted(images))
        self._tokens = array("i")
        self.extend(tokens)

    def __len__(self) -> int:
        """Tokens in the chain."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends token ids and names the units that they complete."""
        # NumPy converts a long list several times faster than `array` does, and slower a short one.
        if len(tokens) > self._unit:
            self._tokens.frombytes(np.asarray(tokens, np.int32).tobytes())
        else:
            self._tokens.extend(tokens)
        for index in range(len(self.units), len(self._tokens) // self._unit):
            start = index * self._unit
            self.units.append(self._digest(self._parent(index), start, start + self._unit))

    def ids(self, start: int, end: int) -> tuple[int, ...]:
        """Token ids `start` to `end`."""
        return tuple(self._tokens[start:end])

    def tail(self, units: int, tokens: int) -> bytes:
        """See `Path.tail`; differs from the name of every complete unit."""
        start = units * self._unit
        return self._digest(self._parent(units), start, start + tokens)

    def _parent(self, index: int) -> bytes:
        return self.units[index - 1] if index else self._root

    def _digest(self, parent: bytes, start: int, end: int) -> bytes:
        digest = hashlib.sha256(parent + (end - start).to_bytes(4))
        digest.update(self._tokens[start:end].tobytes())
        for image in self._images:
            if image.start < end and start < image.start + image.length:
                digest.update(f"image {image.start - start} {image.length} ".encode() + image.digest)
        return digest.digest()
