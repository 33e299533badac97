"""What constraints and stop checkers say to each token, and the mask of the next one.

They are the service's code and may fail: a failure ends the request that brought them along, never the engine.
"""

from collections.abc import Sequence as Listing
from typing import NamedTuple

import numpy as np

from serving.sequence import Sequence


class Verdict(NamedTuple):
    """What becomes of the tokens that a request has said."""

    tokens: int
    """How many of them stand."""
    ends: bool = False
    matched: str | None = None
    error: str | None = None


class Follower:
    """Asks the constraint and the stop checker of each request."""

    def __init__(self, words: int | None = None) -> None:
        """`words`: size of a mask; None does not check it."""
        self._words = words

    def begin(self, sequence: Sequence) -> str | None:
        """Takes the first mask; returns what is wrong with it."""
        try:
            return self._take_mask(sequence)
        except Exception as error:
            return f"the constraint failed: {error!r}"

    def follow(self, sequence: Sequence, tokens: Listing[int]) -> Verdict:
        """Hands on what has been said."""
        try:
            return self._follow(sequence, tokens)
        except Exception as error:
            return Verdict(len(tokens), True, error=f"the constraint or stop checker failed: {error!r}")

    def _follow(self, sequence: Sequence, tokens: Listing[int]) -> Verdict:
        request, kept, matched = sequence.request, len(tokens), None
        if request.stop_checker is not None:
            match = request.stop_checker.feed(tokens)
            if match is not None:
                kept, matched = match
        stopped = kept > 0 and tokens[kept - 1] in sequence.stops
        if request.constraint is None or matched is not None or stopped:
            return Verdict(kept, matched is not None, matched)
        taken = request.constraint.advance(tokens[:kept])
        if taken < kept:
            return Verdict(taken, True, error=f"the constraint does not allow token {tokens[taken]} that was sampled")
        if request.constraint.ended:
            return Verdict(kept, True)
        # No token follows the last one, and so no mask.
        done = len(sequence.outputs) + kept >= request.max_tokens
        error = None if done else self._take_mask(sequence)
        return Verdict(kept, error is not None, error=error)

    def _take_mask(self, sequence: Sequence) -> str | None:
        assert sequence.request.constraint is not None
        mask = sequence.request.constraint.mask()
        sequence.mask = None
        if mask is None:
            return None
        words = np.ascontiguousarray(mask).view(np.int32)
        if self._words is not None and words.shape != (self._words,):
            return f"the constraint's mask has shape {words.shape}, expected ({self._words},)"
        if not words.any():
            return f"the constraint allows no token after {sequence.known} tokens"
        sequence.mask = words
        return None
