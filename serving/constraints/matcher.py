"""A grammar and where in it one sequence stands."""

from collections.abc import Sequence

import llguidance
import numpy as np

from k3jax.tokenizer import control as control_tokens
from serving.constraints.errors import ConstraintError
from serving.constraints.vocabulary import Vocabulary


class GrammarConstraint:
    """Implements the engine's `DraftedConstraint`. Not for several threads at a time.

    While the model thinks, everything but control tokens is allowed, and of these only the one that closes the channel;
    the grammar sees what follows it.
    """

    def __init__(self, vocabulary: Vocabulary, matcher: llguidance.LLMatcher, kind: str, channel: str | None) -> None:
        """`channel` is what the prompt leaves open."""
        self.kind = kind
        self._vocabulary, self._matcher = vocabulary, matcher
        self._close = vocabulary.control.get(control_tokens.CLOSE, -1)
        self._thinking, self._raw = channel == "think", channel is None
        self._ends = frozenset(vocabulary.end_ids)
        self._buffer = np.zeros(vocabulary.words, np.uint32)
        self._thoughts = 0
        """Tokens of the think channel, its closing marker included."""
        self._matched = 0
        """Tokens that the grammar has seen, ends included."""
        self._ended = 0
        """Ends of the message among them."""

    @property
    def thinking(self) -> bool:
        """Whether the grammar still waits for the end of the reasoning."""
        return self._thinking

    @property
    def complete(self) -> bool:
        """Whether what has been said satisfies the grammar."""
        return not self._thinking and self._matcher.is_accepting()

    @property
    def ended(self) -> bool:
        """Whether nothing may follow: the end has been said, or nothing else is left to say after a raw prompt.

        A message is ended by its own token, so that the next turn finds it in the cache.
        """
        return self._ended > 0 or (self._raw and self._matcher.is_stopped())

    def mask(self) -> np.ndarray:
        """uint32 [ceil(V / 32)]: token t is bit t % 32 of word t // 32. Valid until the next call.

        Raises `ConstraintError` when the grammar has become too complex to follow.
        """
        if self._thinking:
            return self._vocabulary.thinking_mask
        if self._ended:
            self._buffer[:] = self._vocabulary.bits(self._ends)
            return self._buffer
        self._matcher.unsafe_compute_mask_ptr(self._buffer.ctypes.data, self._buffer.nbytes)
        self._require_sound()
        return self._buffer

    def draft_masks(self, tokens: Sequence[int]) -> np.ndarray:
        """uint32 [len(tokens) + 1, words]: the mask before each drafted token and after the last.

        Behind the first token that the grammar refuses all masks are zero. The place in the grammar stays as it was.
        """
        masks = np.zeros((len(tokens) + 1, self._vocabulary.words), np.uint32)
        taken = 0
        masks[0] = self.mask()
        for row, token in zip(masks[1:], tokens):
            if not self._take(token):
                break
            taken += 1
            row[:] = self.mask()
        self.rollback(taken)
        return masks

    def forced_tokens(self, limit: int) -> list[int]:
        """What comes next where the grammar leaves no choice of text, at most `limit` tokens.

        Other spellings of that text may be allowed too; as a draft it is as good as any.
        """
        if self._thinking or self._ended:
            return []
        tokens = self._matcher.compute_ff_tokens()[:limit]
        return tokens[: self._matcher.validate_tokens(tokens)]

    def advance(self, tokens: Sequence[int]) -> int:
        """The sequence has said `tokens`; returns how many there were.

        Raises `ConstraintError` naming the first one that the grammar does not allow; those before it are taken.
        """
        for at, token in enumerate(tokens):
            if not self._take(token):
                self._require_sound()
                raise ConstraintError(self.kind, f"token {token} at position {at} does not fit the grammar here")
        return len(tokens)

    def rollback(self, tokens: int) -> None:
        """Takes the last `tokens` tokens back. Raises ValueError when there were fewer."""
        said = self._thoughts + self._matched
        if not 0 <= tokens <= said:
            raise ValueError(f"{tokens} tokens were to be taken back, expected 0 to {said}, the tokens said so far")
        matched = min(tokens, self._matched)
        ended = min(matched, self._ended)
        self._matcher.rollback(matched - ended)
        self._ended -= ended
        self._matched -= matched
        if tokens > matched:
            self._thoughts -= tokens - matched
            self._thinking = True

    def _take(self, token: int) -> bool:
        if self._thinking:
            return self._think(token)
        if self._ended or (token in self._ends and self._matcher.is_accepting()):
            # llguidance would stop at an end; a rollback is simpler when it never sees one.
            self._ended += 1
        elif self._matcher.validate_tokens([token]) != 1 or not self._matcher.consume_token(token):
            return False
        self._matched += 1
        return True

    def _think(self, token: int) -> bool:
        if not 0 <= token < self._vocabulary.size:
            return False
        word, bit = divmod(token, 32)
        if not int(self._vocabulary.thinking_mask[word]) >> bit & 1:
            return False
        self._thoughts += 1
        self._thinking = token != self._close
        return True

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(self.kind, self._matcher.get_error())
