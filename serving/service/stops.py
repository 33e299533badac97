"""Stop strings among tokens: text is spelled out token by token, in constant time each."""

from collections.abc import Sequence

from k3jax.generation.stopping import StopStrings
from k3jax.tokenizer import Tokenizer
from k3jax.tokenizer.detokenizer import Detokenizer
from serving.request import StopMatch


class StopStringChecker:
    """Finds the token that completes a stop string; what was said within `min_tokens` does not count."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special=False)
        self._stops = tuple(stops)
        self._strings = StopStrings(self._stops)
        self._tail = ""
        self._longest = max(map(len, stops))
        self._spare = min_tokens

    def feed(self, tokens: Sequence[int]) -> StopMatch | None:
        """Takes the next tokens; tells after how many of them the text has ended, and with what."""
        for count, token in enumerate(tokens, 1):
            text = self._detokenizer.push(token)
            self._spare -= 1
            if self._spare >= 0:
                continue
            self._tail = (self._tail + text)[-(self._longest + len(text)) :]
            if self._strings.push(text).stopped:
                return StopMatch(count, self._found())
        return None

    def _found(self) -> str:
        """The stop string that is complete first; among those, the one that begins first."""
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._tail.find(stop)) >= 0]
        return min(found)[2]
