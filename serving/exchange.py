"""Cached prefixes that leave one engine for another, as bytes: pages, states, windows and draft rows as one object.

What one engine cannot use it refuses: another model, another dtype, another page size. The prefix ends before the last
token of whoever resumes it, so that at least one token is computed where it is continued.
"""

import dataclasses
import json
from typing import Any

import numpy as np

from serving.core import Core
from serving.hashing import HashChain, ImageSpan, root_digest
from serving.prefix_file import Prefix
from serving.tiering import Mover

FORMAT = "k3jax prefix 1"


class ExchangeError(ValueError):
    """A prefix that this engine cannot take over; the message says why."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ExportedPrefix:
    """A prefix with everything that its next reader needs."""

    model_id: str
    salt: str
    page_size: int
    tokens: list[int]
    """All of them are in the cache; whoever goes on needs at least one more."""
    images: tuple[ImageSpan, ...]
    prefix: Prefix

    def to_bytes(self) -> bytes:
        """A line of JSON, then the arrays."""
        header = {
            "format": FORMAT,
            "model_id": self.model_id,
            "salt": self.salt,
            "page_size": self.page_size,
            "images": [[image.start, image.length, image.digest.hex()] for image in self.images],
            "tokens": len(self.tokens),
        }
        ids = np.asarray(self.tokens, "<i4").tobytes()
        return json.dumps(header).encode() + b"\n" + ids + self.prefix.to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> "ExportedPrefix":
        """Reads what `to_bytes` wrote. Raises `ExchangeError` for anything else."""
        line, _, rest = data.partition(b"\n")
        try:
            header = json.loads(line)
            if header["format"] != FORMAT:
                raise ExchangeError(f"the prefix has format {header['format']!r}, expected {FORMAT!r}")
            size = 4 * int(header["tokens"])
            tokens = np.frombuffer(rest[:size], "<i4").tolist()
            images = tuple(ImageSpan(start, length, bytes.fromhex(name)) for start, length, name in header["images"])
            prefix = Prefix.from_bytes(rest[size:])
            names = {name: header[name] for name in ("model_id", "salt", "page_size")}
        except (ValueError, KeyError, TypeError) as error:
            raise ExchangeError(f"the bytes are not an exported prefix: {error}") from error
        return cls(tokens=tokens, images=images, prefix=prefix, **names)


def export_prefix(
    core: Core, tokens: list[int], *, salt: str = "", images: tuple[ImageSpan, ...] = ()
) -> ExportedPrefix | None:
    """The longest cached prefix of `tokens`, read from the device; None when there is none. The cache keeps it.

    Runs in the engine's thread, and waits for the copy.
    """
    unit, model_id = core.cache.options.unit, core.options.model_id
    match = core.cache.match(HashChain(root_digest(model_id, salt), unit, tokens, images), len(tokens))
    if match.node is None:
        return None
    prefix = _mover(core).read(core.cache.tree.pages_to(match.node), match.node.slot).finish()
    return ExportedPrefix(
        model_id=model_id,
        salt=salt,
        page_size=core.cache.options.page_size,
        tokens=list(tokens[: match.tokens]),
        images=tuple(image for image in images if image.start < match.tokens),
        prefix=prefix,
    )


def import_prefix(core: Core, exported: ExportedPrefix) -> bool:
    """Puts a prefix into the cache; False if it is there already. Runs in the engine's thread.

    Raises `ExchangeError` where the prefix does not fit this engine, or memory is short.
    """
    cache, now = core.cache, core.clock()
    pages = -(-len(exported.tokens) // cache.options.page_size)
    _require_fit(core, exported, pages)
    root = root_digest(exported.model_id, exported.salt)
    path = HashChain(root, cache.options.unit, exported.tokens, exported.images)
    table = cache.take_pages(pages, now)
    slot = cache.take_slot(now) if table is not None else None
    if table is None or slot is None:
        cache.pages.release(table or [])
        raise ExchangeError(f"there is no memory for {pages} pages and a state: {cache.pages.available} pages are left")
    _mover(core).write(exported.prefix, table, slot)
    node = cache.store(path, len(exported.tokens), table, slot, now)
    if node is None:
        cache.slots.release([slot])
    cache.pages.release(table)
    return node is not None


def _require_fit(core: Core, exported: ExportedPrefix, pages: int) -> None:
    """Raises `ExchangeError` unless the prefix is one of this engine's own kind."""
    mine, theirs = core.options.model_id, exported.model_id
    if mine != theirs:
        raise ExchangeError(f"the prefix is of model {theirs!r}, this engine runs {mine!r}")
    if not exported.tokens:
        raise ExchangeError("the prefix has no tokens")
    size = core.cache.options.page_size
    if exported.page_size != size:
        raise ExchangeError(f"the prefix has pages of {exported.page_size} tokens, this engine has {size}")
    # One page tells what all look like.
    sample = _mover(core).read([0], 0).finish()
    expected = [(str(array.dtype), (pages, *array.shape[1:])) for array in sample.latents]
    expected += _kinds([*sample.states, *sample.windows])
    found = _kinds(exported.prefix.arrays)
    if found != expected:
        wrong = next((a, b) for a, b in zip([*found, None], [*expected, None]) if a != b)
        raise ExchangeError(f"the prefix has an array {wrong[0]}, this engine expects {wrong[1]}")


def _kinds(arrays: list[np.ndarray]) -> list[tuple[str, tuple[int, ...]]]:
    return [(str(array.dtype), array.shape) for array in arrays]


def _mover(core: Core) -> Mover:
    runner: Any = core.runner
    if not isinstance(runner, Mover):
        raise ExchangeError(f"{type(runner).__name__} cannot move prefixes to and from its device")
    return runner
