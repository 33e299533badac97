"""Where evicted prefixes go: host memory, then a directory. They are restored when that is quicker than prefill.

    restore     bytes / (bandwidth to the device), plus bytes / (bandwidth of the disk) from a file
    recompute   FLOPs of the tokens that the device does not have / (FLOPs a second)

A prefix comes back as a whole or not at all; a file whose checksum is wrong counts as absent. Files are read and
written by a thread of their own; a request whose prefix is being read waits in the queue.
"""

import collections
import concurrent.futures
import dataclasses
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any, Literal, Protocol, runtime_checkable

from serving.costs import ModelCost
from serving.hashing import Digest, Path
from serving.prefix_cache import PrefixCache
from serving.prefix_file import DamagedPrefix, Prefix
from serving.prefix_tree import Node

Verdict = Literal["start", "wait"]
"""Whether a request may start now."""


@runtime_checkable
class Mover(Protocol):
    """What carries prefixes to and from the device."""

    def read(self, pages: list[int], slot: int) -> Any:
        """Starts a copy to the host; its `finish()` gives the `Prefix`."""
        ...

    def write(self, prefix: Prefix, pages: list[int], slot: int) -> None:
        """Stores a prefix on the device."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """Sizes and speeds of the tiers."""

    host_bytes: int
    directory: FilePath | None = None
    disk_bytes: int = 0
    flops: int | float = 1e15
    """FLOPs a second of the device, for the decision to restore."""
    host_bandwidth: int | float = 50e9
    disk_bandwidth: int | float = 5e9


@dataclasses.dataclass(eq=False, slots=True)
class Entry:
    """A prefix that has left the device."""

    name: Digest
    parent: Digest
    """Name of the complete units before a tail; the entry's own name otherwise."""
    tokens: int
    tail: int
    """Tokens after the last complete unit."""
    nbytes: int
    prefix: Prefix | None
    """None while it is only in a file."""
    file: FilePath | None = None
    loading: "concurrent.futures.Future[Prefix] | None" = None


@dataclasses.dataclass(slots=True)
class TierCounters:
    """What the tiers have done."""

    spilled: int = 0
    restored: int = 0
    restored_tokens: int = 0
    damaged: int = 0
    dropped: int = 0


class Tiers:
    """Entries by name, least recently used first. Host memory overflows to the directory, and that to nowhere."""

    def __init__(self, cache: PrefixCache, mover: Mover, options: TierOptions) -> None:
        self._cache, self._mover, self._options = cache, mover, options
        self._cost: ModelCost = cache.cost
        self._entries: collections.OrderedDict[Digest, Entry] = collections.OrderedDict()
        self._tails: dict[Digest, collections.Counter[int]] = {}
        self._arriving: list[tuple[Entry, Any]] = []
        self._disk = concurrent.futures.ThreadPoolExecutor(1, "tiers") if options.directory else None
        self.host_bytes = self.disk_bytes = 0
        self.counters = TierCounters()
        cache.spill = self.spill
        if options.directory:
            options.directory.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        """Prefixes in host memory or on disk."""
        return len(self._entries)

    # Out.

    def spill(self, node: Node, pages: list[int]) -> None:
        """Starts to copy a prefix that is about to be evicted."""
        if node.name in self._entries or any(entry.name == node.name for entry, _ in self._arriving):
            return
        tail = node.end - node.start if node.is_tail else 0
        assert node.parent is not None
        parent = node.parent.name if node.is_tail else node.name
        entry = Entry(node.name, parent, node.end, tail, 0, None)
        self._arriving.append((entry, self._mover.read(pages, node.slot)))

    def poll(self) -> None:
        """Takes in what has arrived since it was spilled. Call it once a step."""
        arrived, self._arriving = self._arriving, []
        for entry, reading in arrived:
            prefix = reading.finish()
            entry.prefix, entry.nbytes = prefix, prefix.nbytes
            self._enter(entry)
        self._shrink()

    def _enter(self, entry: Entry) -> None:
        self._entries[entry.name] = entry
        self.host_bytes += entry.nbytes
        self._tails.setdefault(entry.parent, collections.Counter())[entry.tail] += 1
        self.counters.spilled += 1
        self._cache.events.stored(entry.name, None, 0, entry.tokens, "host")

    def _shrink(self) -> None:
        """Moves what exceeds host memory to disk, and drops what exceeds the disk."""
        for entry in list(self._entries.values()):
            if self.host_bytes <= self._options.host_bytes:
                break
            if entry.prefix is not None:
                self._leave_memory(entry)
        for entry in list(self._entries.values()):
            if self.disk_bytes <= self._options.disk_bytes:
                break
            if entry.file is not None and entry.prefix is None and entry.loading is None:
                self._drop(entry)

    def _leave_memory(self, entry: Entry) -> None:
        prefix, entry.prefix = entry.prefix, None
        self.host_bytes -= entry.nbytes
        assert prefix is not None
        if self._disk is None or entry.nbytes > self._options.disk_bytes:
            self._drop(entry)
        elif entry.file is None:
            assert self._options.directory is not None
            entry.file = self._options.directory / f"{_text(entry.name)}.prefix"
            self.disk_bytes += entry.nbytes
            # One thread: a file is read after it has been written.
            self._disk.submit(prefix.save, entry.file)

    def _drop(self, entry: Entry) -> None:
        self._entries.pop(entry.name, None)
        self._tails[entry.parent][entry.tail] -= 1
        if entry.prefix is not None:
            self.host_bytes -= entry.nbytes
        if entry.file is not None and self._disk is not None:
            self.disk_bytes -= entry.nbytes
            self._disk.submit(entry.file.unlink, True)
        tier = "disk" if entry.file is not None else "host"
        self.counters.dropped += 1
        self._cache.events.removed(entry.name, entry.tokens, "memory", tier)

    # Back.

    def prepare(self, path: Path, limit: int, now: int | float) -> Verdict:
        """Brings the longest useful prefix of `path` back to the device, or starts to read it."""
        cached = self._cache.match(path, limit).tokens
        entry = next(self._candidates(path, limit, cached), None)
        if entry is None or not self._pays(entry, cached):
            return "start"
        self._entries.move_to_end(entry.name)
        if entry.prefix is None and not self._loaded(entry):
            return "wait" if entry.loading is not None else "start"
        self._restore(entry, path, now)
        return "start"

    def _candidates(self, path: Path, limit: int, floor: int) -> Iterator[Entry]:
        """Entries that `path` starts with, longest first, all longer than `floor`."""
        unit = self._cache.options.unit
        for depth in range(min(limit // unit, len(path.units)), floor // unit - 1, -1):
            name = path.units[depth - 1] if depth else None
            for tail in sorted(self._tails.get(name, ()), reverse=True):
                tokens = depth * unit + tail
                found = self._entries.get(path.tail(depth, tail) if tail else name) if floor < tokens <= limit else None
                if found is not None:
                    yield found

    def _pays(self, entry: Entry, cached: int) -> bool:
        seconds = entry.nbytes / self._options.host_bandwidth
        if entry.prefix is None:
            seconds += entry.nbytes / self._options.disk_bandwidth
        return seconds < self._cost.prefill_flops(cached, entry.tokens) / self._options.flops

    def _loaded(self, entry: Entry) -> bool:
        """Whether the entry is in memory now; starts to read it if it is not."""
        assert self._disk is not None
        assert entry.file is not None
        if entry.loading is None:
            entry.loading = self._disk.submit(Prefix.load, entry.file)
            return False
        if not entry.loading.done():
            return False
        loading, entry.loading = entry.loading, None
        try:
            entry.prefix = loading.result()
        except DamagedPrefix:
            self.counters.damaged += 1
            self._drop(entry)
            return False
        self.host_bytes += entry.nbytes
        return True

    def _restore(self, entry: Entry, path: Path, now: int | float) -> None:
        """Pages and state together, or nothing when there is no memory for both."""
        pages = self._cache.take_pages(-(-entry.tokens // self._cache.options.page_size), now)
        slot = self._cache.take_slot(now) if pages is not None else None
        if pages is not None and slot is not None:
            assert entry.prefix is not None
            self._mover.write(entry.prefix, pages, slot)
            if self._cache.store(path, entry.tokens, pages, slot, now):
                slot = None
            self.counters.restored += 1
            self.counters.restored_tokens += entry.tokens
        self._cache.slots.release([] if slot is None else [slot])
        self._cache.pages.release(pages or [])

    def close(self) -> None:
        """Waits for the files."""
        if self._disk is not None:
            self._disk.shutdown()


def _text(name: Digest) -> str:
    return name.hex() if isinstance(name, bytes) else str(name)
