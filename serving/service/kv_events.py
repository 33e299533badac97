"""The prefix cache as routers see it: blocks of one hash unit each, announced while a state below them can be reused.

A state is worth nothing without the pages before it, and pages nothing without a state. So a block is announced when
the first reusable prefix that contains it appears, and withdrawn with the last one. A tail shorter than a block is
not announced.
"""

import asyncio
import collections
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Iterator

from smg_grpc_proto.generated import common_pb2 as shared

from serving.events import Removed, Stored
from serving.hashing import Digest

CHUNK = 2048
"""Blocks per message of a snapshot."""
KEPT, QUEUED = 1024, 1024
"""Batches that a subscriber can catch up on, and that may wait for one."""
HEARTBEAT_SECONDS = 2.0
"""A subscriber hears so often how busy the engine is; routers take silence for death."""


@dataclasses.dataclass(eq=False, slots=True)
class Block:
    """A hash unit in the cache."""

    parent: int | None
    tokens: tuple[int, ...]
    uses: int = 0
    """Blocks that follow it, and reusable prefixes that end in it."""


class BlockTree:
    """Blocks by hash, with parents before their children."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.blocks: dict[int, Block] = {}
        self._ends: dict[Digest, int | None] = {}

    def store(self, event: Stored) -> list[shared.KvCacheEvent]:
        """A prefix can be reused: announces the blocks that are new."""
        if event.tier != "device" or event.name in self._ends:
            return []
        parent = self._ends.get(event.parent) if event.parent is not None else None
        first, new = parent, []
        for index, digest in enumerate(event.units):
            name = block_hash(digest)
            if name not in self.blocks:
                tokens = event.tokens[index * self.unit : (index + 1) * self.unit]
                self.blocks[name] = Block(parent, tokens)
                self._use(parent)
                new.append(name)
            elif not new:
                first = name
            parent = name
        self._ends[event.name] = parent
        self._use(parent)
        return [self.stored(new, first)] if new else []

    def _use(self, name: int | None) -> None:
        if name is not None:
            self.blocks[name].uses += 1

    def remove(self, event: Removed) -> list[shared.KvCacheEvent]:
        """A prefix can not be reused any more: withdraws the blocks that no other one needs."""
        name = self._ends.pop(event.name, None) if event.tier == "device" else None
        gone = []
        while name is not None:
            block = self.blocks[name]
            block.uses -= 1
            if block.uses:
                break
            del self.blocks[name]
            gone.append(name)
            name = block.parent
        if not gone:
            return []
        removed = shared.KvBlocksRemoved(block_hashes=gone, tier=shared.KV_CACHE_TIER_DEVICE, cache_level=0)
        return [shared.KvCacheEvent(removed=removed)]

    def stored(self, names: list[int], parent: int | None) -> shared.KvCacheEvent:
        """Consecutive blocks."""
        blocks = [
            shared.KvBlock(block_hash=name, token_ids=self.blocks[name].tokens, block_size=self.unit, cache_level=0)
            for name in names
        ]
        return shared.KvCacheEvent(
            stored=shared.KvBlocksStored(blocks=blocks, parent_block_hash=parent, tier=shared.KV_CACHE_TIER_DEVICE)
        )

    def snapshot(self) -> Iterator[list[shared.KvCacheEvent]]:
        """Everything there is, in pieces, after an event that clears what was known before."""
        names = list(self.blocks)
        for start in range(0, max(len(names), 1), CHUNK):
            cleared = [] if start else [shared.KvCacheEvent(cleared=shared.KvCacheCleared())]
            chosen = names[start : start + CHUNK]
            yield cleared + [self.stored([name], self.blocks[name].parent) for name in chosen]


def block_hash(digest: bytes) -> int:
    """The signed 64 bits by which routers know a block."""
    return int.from_bytes(digest[:8], signed=True)


class Publisher:
    """Turns the engine's events into numbered batches for any number of subscribers. Lives in the event loop."""

    def __init__(self, unit: int, load: Callable[[], shared.EngineLoad]) -> None:
        self.tree = BlockTree(unit)
        self._load = load
        self._sequence, self._event_id = 0, 0
        self._latest: collections.deque[shared.KvEventBatch] = collections.deque(maxlen=KEPT)
        self._subscribers: set[asyncio.Queue[shared.KvEventBatch | None]] = set()

    def take(self, event: Stored | Removed) -> None:
        """The engine's cache has changed."""
        changes = self.tree.store(event) if isinstance(event, Stored) else self.tree.remove(event)
        if not changes:
            return
        self._sequence += 1
        batch = self._batch(self._sequence, changes)
        self._latest.append(batch)
        for queue in self._subscribers:
            self._send(queue, batch)

    @staticmethod
    def _send(queue: "asyncio.Queue[shared.KvEventBatch | None]", batch: shared.KvEventBatch) -> None:
        try:
            queue.put_nowait(batch)
        except asyncio.QueueFull:
            # Too slow: it gets a snapshot instead of all that it has missed.
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(None)

    def _batch(self, sequence: int, events: list[shared.KvCacheEvent]) -> shared.KvEventBatch:
        for event in events:
            self._event_id += 1
            event.event_id = self._event_id
        return shared.KvEventBatch(
            sequence_number=sequence, timestamp=time.time(), events=events, dp_rank=0, load=self._load()
        )

    async def batches(self, start: int) -> AsyncGenerator[shared.KvEventBatch]:
        """The batches from number `start`; what there is now, and what follows, for 0 or one that is too old."""
        queue: asyncio.Queue[shared.KvEventBatch | None] = asyncio.Queue(QUEUED)
        earlier = self._since(start)
        self._subscribers.add(queue)
        sequence = max(start - 1, 0)
        try:
            following = self._snapshot() if earlier is None else earlier
            while True:
                for batch in following:
                    sequence = batch.sequence_number
                    yield batch
                following = await self._news(queue, sequence)
        finally:
            self._subscribers.discard(queue)

    async def _news(
        self, queue: "asyncio.Queue[shared.KvEventBatch | None]", sequence: int
    ) -> list[shared.KvEventBatch]:
        """The next batch, or a record of the load alone when there is none for a while."""
        try:
            batch = await asyncio.wait_for(queue.get(), HEARTBEAT_SECONDS)
        except TimeoutError:
            record = self._load()
            record.load_only = True
            return [shared.KvEventBatch(sequence_number=sequence, timestamp=time.time(), dp_rank=0, load=record)]
        return self._snapshot() if batch is None else [batch]

    def _since(self, start: int) -> list[shared.KvEventBatch] | None:
        oldest = self._latest[0].sequence_number if self._latest else self._sequence + 1
        if not oldest <= start <= self._sequence + 1:
            return None
        return [batch for batch in self._latest if batch.sequence_number >= start]

    def _snapshot(self) -> list[shared.KvEventBatch]:
        pieces = list(self.tree.snapshot())
        # The pieces have the numbers up to the current one.
        self._sequence = max(self._sequence, len(pieces))
        first = self._sequence - len(pieces) + 1
        batches = []
        for index, events in enumerate(pieces):
            batch = self._batch(first + index, events)
            batch.snapshot.CopyFrom(
                shared.KvSnapshotChunk(index=index, count=len(pieces), blocks=len(self.tree.blocks))
            )
            batches.append(batch)
        return batches


async def follow(publisher: Publisher, listen: Callable[[Callable], Callable[[], None]]) -> Callable[[], None]:
    """Feeds the publisher from the engine's thread; returns what ends that."""
    loop = asyncio.get_running_loop()

    def pass_on(event: Stored | Removed) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has gone with the service
            loop.call_soon_threadsafe(publisher.take, event)

    return listen(pass_on)
