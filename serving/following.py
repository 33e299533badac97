"""What constraints and stop checkers say to each token, and the mask of the next one.

They are the service's code and may fail: a failure ends the request that brought them along, never the engine.
"""

from collections.abc import Sequence as Listing
from typing import NamedTuple

import numpy as np

from serving.request import DraftedConstraint
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
        if sequence.fault is not None:
            return Verdict(0, True, error=sequence.fault)
        if request.stop_checker is not None:
            match = request.stop_checker.feed(tokens)
            if match is not None:
                kept, matched = match
        stopped = kept > 0 and tokens[kept - 1] in sequence.stops
        if request.constraint is None:
            return Verdict(kept, matched is not None, matched)
        # Of drafted tokens several come at once, and the grammar may end before the last one.
        told = matched is not None or stopped
        for at, token in enumerate(tokens[: max(kept - told, 0)]):
            if request.constraint.advance([token]) < 1:
                return Verdict(at, True, error=f"the constraint does not allow token {token} that was sampled")
            if request.constraint.ended:
                return Verdict(at + 1, True)
        if told:
            return Verdict(kept, matched is not None, matched)
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


def forced(sequence: Sequence, limit: int) -> np.ndarray:
    """At most `limit` ids that the constraint leaves no choice about. A failure is kept for `Follower.follow`."""
    constraint = sequence.request.constraint
    if isinstance(constraint, DraftedConstraint):
        try:
            return np.asarray(constraint.forced_tokens(limit)[:limit], np.int32)
        except Exception as error:
            sequence.fault = f"the constraint failed: {error!r}"
    return np.zeros(0, np.int32)


def look_ahead(sequence: Sequence, drafts: Listing[int], words: int) -> tuple[np.ndarray, int]:
    """What may come before each draft and after the last, int32 [len(drafts) + 1, words], and how many drafts count.

    A failure is kept for `Follower.follow`; the masks then allow everything.
    """
    masks = np.full((len(drafts) + 1, words), -1, np.int32)
    constraint = sequence.request.constraint
    if sequence.mask is not None:
        masks[0] = sequence.mask
    if sequence.fault is not None or not isinstance(constraint, DraftedConstraint):
        return masks, 0
    try:
        found = np.ascontiguousarray(constraint.draft_masks(drafts)).view(np.int32)
        if found.shape != masks.shape:
            raise ValueError(f"the masks have shape {found.shape}, expected {masks.shape}")
    except Exception as error:
        sequence.fault = f"the constraint failed: {error!r}"
        return masks, 0
    # Behind a draft that is refused nothing counts, but a mask without any bit would leave nothing to draw from.
    some = found.any(axis=1)
    masks[some] = found[some]
    return masks, len(drafts)
