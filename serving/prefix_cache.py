"""Pools, tree and eviction as one thing: who needs memory asks here, and old prefixes make room."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

from serving.costs import ModelCost
from serving.events import Events, Reason
from serving.eviction import Evictor
from serving.hashing import Digest, HashChain, Path
from serving.pools import Pool
from serving.prefix_tree import Match, Node, PrefixTree
from serving.stats import Counters, PoolUse


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Sizes of the two pools (dummies included) and of what they are counted in."""

    pages: int
    slots: int
    page_size: int = 64
    unit: int = 64
    """Tokens per hash unit, `--prefix-match-unit`; need not fit the page size."""


class Hit(NamedTuple):
    """A reusable prefix, with one reference of each page and of its slot for the caller."""

    node: Node
    tokens: int
    pages: list[int]
    slot: int


class PrefixCache:
    """The device memory of an engine. `spill` sees each entry just before it goes for lack of memory."""

    def __init__(
        self,
        options: CacheOptions,
        cost: ModelCost,
        *,
        alpha: int | float = 0.0,
        counters: Counters | None = None,
        spill: Callable[[Node, list[int]], None] | None = None,
    ) -> None:
        self.options = options
        self.cost = cost
        self.pages = Pool("pages", options.pages)
        self.slots = Pool("slots", options.slots)
        self.tree = PrefixTree(self.pages, self.slots, unit=options.unit, page_size=options.page_size)
        self.evictor = Evictor(self.tree, cost, alpha)
        self.events = Events()
        self.counters = Counters() if counters is None else counters
        self.spill = spill
        self.entries = 0
        self._pinned: dict[Node, int | float] = {}
        self._sessions: dict[str, list[Node]] = {}
        self._reused = {False: 0, True: 0}

    def match(self, path: Path, limit: int) -> Match:
        """See `PrefixTree.match`."""
        return self.tree.match(path, limit)

    def hold(self, match: Match, now: int | float) -> Hit | None:
        """Takes references for a reader of the matched prefix; None when nothing matched."""
        node = match.node
        if node is None:
            return None
        table = self.tree.pages_to(node)
        self.pages.retain(table)
        self.slots.retain([node.slot])
        node.last_used, node.superseded = now, False
        node.hits += 1
        self._reused[node.is_end] += 1
        return Hit(node, match.tokens, table, node.slot)

    def take_pages(self, count: int, now: int | float) -> list[int] | None:
        """`count` pages with one reference each, or None when no eviction frees so many."""
        return self.pages.take(count) if self._make_room(self.pages, count, now) else None

    def take_slot(self, now: int | float) -> int | None:
        """A slot with one reference, or None when no eviction frees one."""
        return self.slots.take()[0] if self._make_room(self.slots, 1, now) else None

    def _make_room(self, pool: Pool, count: int, now: int | float) -> bool:
        if pool.available < count:
            return False
        while pool.free < count:
            node = self.evictor.pop(now, leaf=pool is self.pages)
            if node is None:
                return False
            if self.spill is not None:
                self.spill(node, self.tree.pages_to(node))
            self._drop(node, "memory")
        return True

    def store(self, path: Path, tokens: int, table: list[int], slot: int, now: int | float) -> Node | None:
        """Admits a prefix; takes over the reference of `slot` unless it returns None because the state was there."""
        node = self.tree.insert(path, tokens, table, slot, now)
        if node is None:
            return None
        self.entries += 1
        self.counters.stored += 1
        self.evictor.add(node)
        base = next((above for above in node.ancestors() if above.slot), None)
        start = base.end if base else 0
        units, ids = self._detail(path, start, node.end) if self.events.detailed else ((), ())
        self.events.stored(node.name, base.name if base else None, start, node.end, units=units, tokens=ids)
        return node

    def _detail(self, path: Path, start: int, end: int) -> tuple[tuple[Digest, ...], tuple[int, ...]]:
        """Whole units from the one in which `start` lies to `end`, and their token ids."""
        unit = self.options.unit
        first, last = start // unit, end // unit
        ids = path.ids(first * unit, last * unit) if isinstance(path, HashChain) else ()
        return tuple(path.units[first:last]), ids

    def supersede(self, earlier: list[Node], end: Node) -> None:
        """A conversation went from `earlier` states to `end`: only one of them is likely to be its next start.

        The others go first when memory is short, unless other conversations branch off there. Which one stays is what
        was reused more often so far: ends, or states inside prompts (clients may not send an answer back as it was).
        """
        end.is_end = True
        ends_pay = self._reused[True] >= self._reused[False]
        *older, last = earlier or [end]
        for node in (*older, last if ends_pay else end):
            if node.slot and node is not (end if ends_pay else last) and node.branches <= 1:
                node.superseded = True
                self.evictor.add(node)

    def pin(self, nodes: list[Node], now: int | float, until: int | float, session: str | None) -> None:
        """Lets `nodes` be evicted after all others, up to `until`. A session's earlier pins end.

        Pinned states may take half of all slots; what would exceed that is not pinned.
        """
        if session is not None:
            self.release_session(session)
        self._pinned = {node: end for node, end in self._pinned.items() if node.slot and end > now}
        # Clients name new sessions for ever: those of which nothing is pinned any more are forgotten.
        kept = {name: [node for node in held if node in self._pinned] for name, held in self._sessions.items()}
        self._sessions = {name: held for name, held in kept.items() if held}
        for node in nodes:
            if node in self._pinned or len(self._pinned) < self.slots.capacity // 2:
                self._pinned[node] = node.pinned_until = max(until, node.pinned_until)
                self.evictor.add(node)
                if session is not None:
                    self._sessions.setdefault(session, []).append(node)

    def release_session(self, session: str) -> int:
        """Ends the pins of a session; returns how many there were."""
        nodes = self._sessions.pop(session, [])
        for node in nodes:
            self._pinned.pop(node, None)
            node.pinned_until = 0.0
            if node.slot:
                self.evictor.add(node)
        return len(nodes)

    def purge(self, node: Node, reason: Reason) -> None:
        """Drops a prefix that must not be used again, if it is still there."""
        if node.slot:
            self._drop(node, reason)

    def flush(self) -> int:
        """Drops every prefix; returns how many there were. Requests that read one keep what they hold."""
        nodes = [node for node in self.tree if node.slot]
        for node in nodes:
            self._drop(node, "flush")
        return len(nodes)

    def _drop(self, node: Node, reason: Reason) -> None:
        name, end = node.name, node.end
        self.tree.drop_state(node)
        self.entries -= 1
        self.counters.removed[reason] += 1
        self.events.removed(name, end, reason)

    def pool_use(self) -> tuple[PoolUse, PoolUse]:
        """Occupancy of pages and slots."""
        pages, slots = self.tree.held()
        page_bytes = self.cost.latent_bytes_per_token * self.options.page_size
        return (
            self._use(self.pages, len(set(pages)), page_bytes),
            self._use(self.slots, len(slots), self.cost.state_bytes),
        )

    def _use(self, pool: Pool, cached: int, each: int | float) -> PoolUse:
        return PoolUse(capacity=pool.capacity, used=pool.used, cached=cached, bytes_each=each)

    def check_books(self, pages: Iterable[int] = (), slots: Iterable[int] = ()) -> None:
        """Raises `BooksError` unless the tree and the holders of `pages` and `slots` explain every reference."""
        self.tree.check()
        tree_pages, tree_slots = self.tree.held()
        self.pages.check_books(pages, tree_pages)
        self.slots.check_books(slots, tree_slots)
