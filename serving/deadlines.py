"""When requests become useless."""

import heapq

from serving.sequence import Phase, Sequence


class Deadlines:
    """Sequences in the order of their deadlines."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []

    def add(self, sequence: Sequence) -> None:
        """Watches a sequence if it has a deadline."""
        deadline = sequence.request.deadline
        if deadline is not None:
            heapq.heappush(self._heap, (deadline, sequence.order, sequence))

    def expired(self, now: int | float) -> list[Sequence]:
        """Takes out the unfinished sequences whose deadline has come."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            sequence = heapq.heappop(self._heap)[2]
            late += [] if sequence.phase is Phase.FINISHED else [sequence]
        return late
