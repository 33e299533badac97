"""The prefix cache: a radix tree over hash units. A node holds latent pages and, at its end, perhaps a state slot.

A prefix can be reused where the tree has a state of every KDA layer (one slot stands for all of them) and the
pages of all tokens before it. Pages without a state below them are useless, so every leaf has a state, and dropping
the last state of a branch drops its pages.

Units and pages are independent. Where a node starts inside a page, its first page and the last one of its parent
cover the same positions; the child's is the one that also holds the child's rows, and it wins.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from serving.hashing import Digest, Path
from serving.pools import BooksError, Pool


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """A run of units, or a tail: a leaf of fewer tokens than a unit."""

    parent: "Node | None"
    start: int
    """Tokens before the node."""
    end: int
    units: list[Digest]
    pages: list[int]
    """Pages that tokens `start` to `end` touch."""
    slot: int = 0
    """The state after `end` tokens; 0 when there is none."""
    is_tail: bool = False
    children: dict[Digest, "Node"] = dataclasses.field(default_factory=dict)
    tails: dict[Digest, "Node"] = dataclasses.field(default_factory=dict)
    last_used: int | float = 0.0
    hits: int = 0
    is_end: bool = False
    """Whether the state was left at the end of an answer, not inside a prompt."""
    pinned_until: int | float = 0.0
    """Evicted after all others before this time."""
    superseded: bool = False
    """Whether the only request that used it has left a later state."""

    @property
    def is_leaf(self) -> bool:
        """Whether nothing continues the node."""
        return not self.children and not self.tails

    @property
    def branches(self) -> int:
        """How many ways the tree knows to go on."""
        return len(self.children) + len(self.tails)

    @property
    def name(self) -> Digest:
        """The digest of the prefix that ends here."""
        return self.units[-1] if self.units else None

    def ancestors(self) -> Iterator["Node"]:
        """The nodes above, nearest first, without the root."""
        node = self.parent
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    @property
    def base(self) -> int:
        """Tokens of the nearest prefix above that has a state."""
        return next((node.end for node in self.ancestors() if node.slot), 0)


class Match(NamedTuple):
    """How much of a sequence the tree knows."""

    node: Node | None
    """The deepest prefix with a state within the limit."""
    tokens: int
    """Its length: what need not be computed."""
    reach: int
    """Tokens whose pages the tree holds, with or without a state; a longer reach than `tokens` marks a junction."""


class PrefixTree:
    """Owns one reference of each page and slot in its nodes."""

    def __init__(self, pages: Pool, slots: Pool, *, unit: int, page_size: int) -> None:
        if unit < 1 or page_size < 1:
            raise ValueError(f"hash unit and page size are {unit} and {page_size} tokens, expected at least 1")
        self.pages, self.slots = pages, slots
        self.unit, self.page_size = unit, page_size
        self.root = Node(None, 0, 0, [], [])
        self.nodes = 0

    def match(self, path: Path, limit: int) -> Match:
        """The longest reusable prefix of at most `limit` tokens. Changes nothing."""
        trail, units = self._walk(path)
        reach = units * self.unit
        for node in reversed(trail):
            tail = self._longest_tail(node, path, limit) if node.tails else None
            if tail is not None:
                return Match(tail, tail.end, max(reach, tail.end))
            if node.slot and node.end <= limit:
                return Match(node, node.end, reach)
        return Match(None, 0, reach)

    def _walk(self, path: Path) -> tuple[list[Node], int]:
        """The root and the nodes that `path` contains as a whole, and how many of its units the tree knows."""
        node, trail, units, at = self.root, [self.root], path.units, 0
        while at < len(units) and (child := node.children.get(units[at])) is not None:
            size = len(child.units)
            # A chain: the last digest says that all before it are equal.
            if at + size > len(units) or child.units[-1] != units[at + size - 1]:
                return trail, at + _common(child.units, units, at)
            node, at = child, at + size
            trail.append(node)
        return trail, at

    def _longest_tail(self, node: Node, path: Path, limit: int) -> Node | None:
        """The longest tail at the end of `node` that `path` starts with."""
        depth = node.end // self.unit
        lengths = {tail.end - node.end for tail in node.tails.values() if tail.end <= limit}
        for length in sorted(lengths, reverse=True):
            tail = node.tails.get(path.tail(depth, length))
            if tail is not None:
                return tail
        return None

    def pages_to(self, node: Node) -> list[int]:
        """The page table of the prefix that ends at `node`."""
        table: list[int] = []
        for step in reversed([node, *node.ancestors()]):
            table[step.start // self.page_size :] = step.pages
        return table

    def insert(self, path: Path, tokens: int, table: list[int], slot: int, now: int | float) -> Node | None:
        """Admits the prefix of `tokens` tokens: the pages of `table` where the tree has none, and the state in `slot`.

        Takes over the caller's reference of `slot`. Returns None, and takes nothing, if the state is there already.
        `tokens` must be at least 1.
        """
        if tokens < 1:
            raise ValueError("an empty prefix needs no entry")
        depth, rest = divmod(tokens, self.unit)
        node = self._node_at(path, depth, table)
        if rest:
            name = path.tail(depth, rest)
            if name not in node.tails:
                node.tails[name] = self._new(node, node.end + rest, [name], table, is_tail=True)
            node = node.tails[name]
        if node.slot:
            return None
        self.slots.hand_over(slot)
        node.slot, node.last_used, node.is_end, node.superseded, node.pinned_until = slot, now, False, False, 0.0
        return node

    def _node_at(self, path: Path, depth: int, table: list[int]) -> Node:
        """The node that ends after `depth` units, split or made as needed."""
        node, units = self.root, path.units
        at = 0
        while at < depth:
            child = node.children.get(units[at])
            if child is None:
                node.children[units[at]] = self._new(node, depth * self.unit, units[at:depth], table)
                return node.children[units[at]]
            size = min(len(child.units), depth - at)
            common = size if child.units[size - 1] == units[at + size - 1] else _common(child.units, units, at)
            node = child if common == len(child.units) else self._split(child, common)
            at += common
        return node

    def _new(self, parent: Node, end: int, units: list[Digest], table: list[int], is_tail: bool = False) -> Node:
        first, last = parent.end // self.page_size, -(-end // self.page_size)
        pages = table[first:last]
        self.pages.cache(pages)
        self.nodes += 1
        return Node(parent, parent.end, end, list(units), pages, is_tail=is_tail)

    def _split(self, node: Node, units: int) -> Node:
        """Cuts `node` after `units` units; returns the new upper part. The lower part stays the same object."""
        parent, cut = node.parent, node.start + units * self.unit
        assert parent is not None
        upper = Node(parent, node.start, cut, node.units[:units], self._between(node, node.start, cut))
        upper.last_used = node.last_used
        lower_pages = self._between(node, cut, node.end)
        self.pages.cache(upper.pages[-1:] if cut % self.page_size else ())
        parent.children[upper.units[0]] = upper
        node.parent, node.start, node.units, node.pages = upper, cut, node.units[units:], lower_pages
        upper.children[node.units[0]] = node
        self.nodes += 1
        return upper

    def _between(self, node: Node, start: int, end: int) -> list[int]:
        first = node.start // self.page_size
        return node.pages[start // self.page_size - first : -(-end // self.page_size) - first]

    def drop_state(self, node: Node) -> int:
        """Takes out the state of `node` and the pages that no other state needs; returns how many became free."""
        self.slots.uncache([node.slot])
        node.slot = 0
        freed = 0
        while node.parent is not None and node.is_leaf and not node.slot:
            parent = node.parent
            del (parent.tails if node.is_tail else parent.children)[node.units[0]]
            freed += self.pages.uncache(node.pages)
            self.nodes -= 1
            node = parent
        return freed + self._join(node)

    def _join(self, node: Node) -> int:
        """Merges a node without state or tails into its only child."""
        if node.parent is None or node.slot or node.tails or len(node.children) != 1:
            return 0
        (child,) = node.children.values()
        shared = node.end % self.page_size != 0
        freed = self.pages.uncache(node.pages[-1:] if shared else ())
        child.pages = node.pages[: len(node.pages) - shared] + child.pages
        child.units = node.units + child.units
        child.start, child.parent = node.start, node.parent
        node.parent.children[node.units[0]] = child
        node.parent = None
        self.nodes -= 1
        return freed

    def freed_by(self, node: Node) -> int:
        """Pages that the tree would let go with the state of `node` (others may still hold them)."""
        if not node.is_leaf:
            return 0
        held = len(node.pages)
        for above in node.ancestors():
            if above.slot or above.branches > 1:
                break
            held += len(above.pages)
        return held

    def __iter__(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())
            stack.extend(node.tails.values())

    def held(self) -> tuple[list[int], list[int]]:
        """Every page and slot reference of the tree."""
        nodes = list(self)
        return [page for node in nodes for page in node.pages], [node.slot for node in nodes if node.slot]

    def check(self) -> None:
        """Raises `BooksError` unless every node obeys the rules in the module's text."""
        count = 0
        for node in self:
            count += 1
            problem = self._problem(node)
            if problem:
                raise BooksError(f"prefix tree, node of tokens {node.start} to {node.end}: {problem}")
        if count != self.nodes:
            raise BooksError(f"prefix tree: {count} nodes, counted {self.nodes}")

    def _problem(self, node: Node) -> str:
        parent = node.parent
        siblings = {} if parent is None else (parent.tails if node.is_tail else parent.children)
        expected = node.end - node.start
        size = 0 < expected < self.unit if node.is_tail else expected == len(node.units) * self.unit > 0
        pages = -(-node.end // self.page_size) - node.start // self.page_size
        useless = not node.slot and not node.tails and len(node.children) < 2
        checks = {
            "is not where its parent looks": parent is None or siblings.get(node.units[0]) is not node,
            "does not start where its parent ends": parent is None or node.start != parent.end,
            "has another number of tokens than units": not size,
            f"has {len(node.pages)} pages, expected {pages}": len(node.pages) != pages,
            "holds pages that no state needs": useless and node.is_leaf,
            "should be one with its child": useless and not node.is_leaf,
            "is a tail that goes on": node.is_tail and not node.is_leaf,
        }
        return next((text for text, wrong in checks.items() if wrong), "")


def _common(run: list[Digest], units: list[Digest], at: int) -> int:
    """Length of the common prefix of `run` and `units[at:]`. A chain: equal at i means equal before i."""
    low, high = 0, min(len(run), len(units) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == units[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
