"""Which state goes when memory is short.

    score(n) = recency(n) + alpha * efficiency(n)          (Marconi, arXiv 2411.19379, section 4.2)

`recency` is the last use on a scale that ends now and is twice as long as the median entry is old; `efficiency` is the
FLOPs that the state saves over the nearest state above it, for each byte that it holds, over the largest such value.
alpha = 0 is LRU. Marconi's scale begins at the oldest entry. Then a long prefix that nobody needs any more stays, being
efficient, stretches the scale by its own age, and with it what efficiency is worth in seconds: the longer such an
engine runs, the more it keeps of the kind.

The scores of all entries change together as time passes; their order changes only with use, so a heap
is enough: an entry is scored again when it comes up, and the heap is built anew when the scales have moved.
"""

import dataclasses
import heapq
import itertools

from serving.costs import ModelCost
from serving.prefix_tree import Node, PrefixTree

DRIFT = 1.25
"""Growth of a scale that makes the old scores unusable."""


@dataclasses.dataclass(slots=True)
class Scales:
    """What scores are relative to."""

    oldest: int | float = 0.0
    """Where recency is 0; older entries are below."""
    span: int | float = 1e-9
    efficiency: int | float = 1e-30


class Evictor:
    """Orders the states of one tree. Tell it of each state that is stored."""

    def __init__(self, tree: PrefixTree, cost: ModelCost, alpha: int | float = 0.0) -> None:
        self._tree, self._cost = tree, cost
        self.alpha = alpha
        self._heap: list[tuple[float, int, Node]] = []
        self._count = itertools.count()
        self._scales = Scales()
        self._now: int | float = 0.0

    def __len__(self) -> int:
        """Entries in the heap; some may be out of date."""
        return len(self._heap)

    def efficiency(self, node: Node) -> float:
        """FLOPs saved per byte held."""
        saved = self._cost.prefill_flops(node.base, node.end)
        tokens = self._tree.freed_by(node) * self._tree.page_size
        return saved / self._cost.prefix_bytes(tokens)

    def score(self, node: Node) -> float:
        """The higher, the longer it stays."""
        recency = (node.last_used - self._scales.oldest) / self._scales.span
        if node.pinned_until > self._now:
            return recency + 100.0
        if node.superseded:
            # Below everything else, the oldest first.
            return recency - 100.0
        if not self.alpha:
            return recency
        efficiency = self.efficiency(node)
        # Never above 1, whatever has arrived since the scale was set.
        return recency + self.alpha * min(efficiency / self._scales.efficiency, 1.0)

    def add(self, node: Node) -> None:
        """A state has been stored at `node`."""
        heapq.heappush(self._heap, (self.score(node), next(self._count), node))

    def pop(self, now: int | float, *, leaf: bool = False) -> Node | None:
        """The state to drop next, taken off the order; None when there is none left.

        `leaf`: only one whose pages go with it.
        """
        self._now = now
        if now - self._scales.oldest > DRIFT * self._scales.span:
            self.rebuild(now)
        passed = []
        victim = None
        while victim is None and self._heap:
            old, _, node = heapq.heappop(self._heap)
            if not node.slot:
                continue
            current = self.score(node)
            if current > old + 1e-12 and self._heap and current > self._heap[0][0]:
                self.add(node)
            elif leaf and not node.is_leaf:
                passed.append(node)
            else:
                victim = node
        for node in passed:
            self.add(node)
        return victim

    def set_alpha(self, alpha: int | float, now: int | float) -> None:
        """Weighs efficiency anew."""
        if alpha != self.alpha:
            self.alpha = alpha
            self.rebuild(now)

    def rebuild(self, now: int | float) -> None:
        """Scores everything anew, with scales of today."""
        nodes = [node for node in self._tree if node.slot]
        ages = sorted(now - node.last_used for node in nodes) or [0.0]
        # A burst of new entries must not make the scale so short that it is outgrown at once.
        span = max(2 * ages[len(ages) // 2], ages[-1] / 16, 1e-9)
        best = max((self.efficiency(node) for node in nodes), default=0.0) if self.alpha else 0.0
        self._scales = Scales(now - span, span, max(best, 1e-30))
        self._heap = [(self.score(node), next(self._count), node) for node in nodes]
        heapq.heapify(self._heap)
