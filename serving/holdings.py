"""What running sequences hold on the device, and the states on their way into the prefix cache.

Device programs run in the order of dispatch, so what is released may be handed on at once: whatever the steps in flight
still do to it happens before its next use. For the same reason the source of a copy may go as soon as the copy is
dispatched.
"""

from serving.plan import Capture
from serving.prefix_cache import Hit, PrefixCache
from serving.prefix_tree import Node
from serving.sequence import Sequence


class Holdings:
    """Owns every user's reference of the two pools."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._page = cache.options.page_size
        self._owners: dict[Sequence, None] = {}
        self.capturing: list[Capture] = []

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self._page)

    def begin(self, sequence: Sequence, hit: Hit | None, now: int | float) -> bool:
        """A private slot and the pages of `hit`, the last one copied if it is not full. Takes over `hit`.

        False, and nothing held, when memory for all known tokens is short.
        """
        cached = hit.tokens if hit else 0
        partial = cached % self._page > 0
        missing = self.pages_for(sequence.known) - cached // self._page
        slot = self._cache.take_slot(now) if missing + self._promised() <= self._cache.pages.available else None
        fresh = self._cache.take_pages(int(partial), now) if slot is not None else None
        if slot is None or fresh is None:
            self._cache.slots.release([] if slot is None else [slot])
            if hit is not None:
                self._cache.slots.release([hit.slot])
                self._cache.pages.release(hit.pages)
            return False
        table = list(hit.pages) if hit else []
        sequence.copy = (table[-1], fresh[0]) if fresh else (0, 0)
        sequence.pages = [*table[:-1], *fresh] if fresh else table
        sequence.hit, sequence.slot, sequence.length = hit, slot, cached
        self._owners[sequence] = None
        return True

    def _promised(self) -> int:
        """Pages that running sequences have yet to take for tokens they already have."""
        return sum(max(0, self.pages_for(s.known) - len(s.pages)) for s in self._owners)

    def extend(self, sequence: Sequence, length: int, now: int | float) -> bool:
        """Pages for `length` tokens; False when there are not enough."""
        needed = self.pages_for(length) - len(sequence.pages)
        if needed > 0:
            pages = self._cache.take_pages(needed, now)
            if pages is None:
                return False
            sequence.pages.extend(pages)
        return True

    def let_go_of_hit(self, sequence: Sequence) -> None:
        """The first chunk is dispatched, or will never be."""
        if sequence.hit is not None:
            self._cache.slots.release([sequence.hit.slot])
            self._cache.pages.release([sequence.copy[0]] if sequence.copy[0] else [])
        sequence.hit, sequence.copy = None, (0, 0)

    def release(self, sequence: Sequence) -> None:
        """Gives back everything that the sequence holds."""
        del self._owners[sequence]
        self._cache.slots.release([sequence.slot] if sequence.slot else [])
        self._cache.pages.release(sequence.pages)
        self.let_go_of_hit(sequence)
        sequence.pages, sequence.slot = [], 0

    def capture(self, sequence: Sequence, end: int, now: int | float) -> list[Capture]:
        """Slots for the sequence's boundaries up to `end`; a boundary for which there is none is passed over."""
        captures = []
        while sequence.boundaries and sequence.boundaries[0] <= end:
            tokens = sequence.boundaries.pop(0)
            slot = self._cache.take_slot(now)
            if slot is None:
                self._cache.counters.skipped_captures += 1
                continue
            table = sequence.pages[: self.pages_for(tokens)]
            self._cache.pages.retain(table)
            name = sequence.path.units[tokens // self._cache.options.unit - 1]
            captures.append(Capture(sequence, tokens, name, slot, table))
        self.capturing.extend(captures)
        return captures

    def settle(self, capture: Capture, finite: bool, now: int | float) -> None:
        """The step that wrote the state has been collected: it enters the cache, or is forgotten."""
        self.capturing.remove(capture)
        path, slot = capture.sequence.path, capture.slot
        if not finite:
            self._cache.counters.non_finite_states += 1
        node = self._cache.store(path, capture.tokens, capture.table, slot, now) if finite else None
        if node is None:
            self._cache.slots.release([slot])
        else:
            capture.sequence.nodes.append(node)
        if finite:
            capture.sequence.kept.append(capture.tokens)
        self._cache.pages.release(capture.table)

    def keep_end(self, sequence: Sequence, tokens: int, now: int | float) -> Node | None:
        """Hands the slot of a sequence that has ended after `tokens` cached tokens over to the cache.

        Returns the new entry; None if the state was there already.
        """
        node = self._cache.store(sequence.path, tokens, sequence.pages, sequence.slot, now)
        if node is not None:
            sequence.slot = 0
        sequence.kept.append(tokens)
        return node

    def held(self) -> tuple[list[int], list[int]]:
        """Every page and slot reference of users."""
        pages = [page for capture in self.capturing for page in capture.table]
        slots = [capture.slot for capture in self.capturing]
        for sequence in self._owners:
            pages += sequence.pages
            slots.append(sequence.slot)
            if sequence.hit is not None:
                slots.append(sequence.hit.slot)
                pages += [sequence.copy[0]] if sequence.copy[0] else []
        return pages, slots

    def check_books(self) -> None:
        """Raises `BooksError` unless every reference of the pools has its owner."""
        self._cache.check_books(*self.held())
