"""The tokenizer as llguidance sees it: the bytes of every token, and which tokens are control tokens."""

import functools
import re
import time
import weakref
from collections.abc import Iterable

import llguidance
import numpy as np

from k3jax.tokenizer import Tokenizer
from k3jax.tokenizer import control as control_tokens
from serving.constraints.errors import ConstraintError

GRAMMARS_KEPT = 256
"""Compiled grammars that are kept for the next request with the same text."""

LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=2_000_000, step_lexer_fuel=400_000, max_grammar_size=200_000, verbose_errors=False
)
"""A grammar that needs more is refused when it is compiled, or ends its request with an error."""

MASK_SECONDS = 0.25
"""CPU time that the first mask may take: the engine waits for the others."""


class _Words:
    """The attributes by which llguidance reads a vocabulary."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_ids[0]
        self.tokens = [tokenizer.token_bytes(id_) for id_ in range(tokenizer.vocab_size)]
        self.special_token_ids = list(tokenizer.control)

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of ordinary text: from them llguidance knows how forced text is spelled."""
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", errors="replace"))


class Vocabulary:
    """Compiles grammars for one tokenizer. May be used from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.size = tokenizer.vocab_size
        self.control = dict(tokenizer.control_ids)
        self.end_ids = tokenizer.eos_ids
        words = _Words(tokenizer)
        self._tokenizer = llguidance.LLTokenizer(words, n_vocab=self.size, eos_token=list(self.end_ids))  # pyright: ignore
        self._compiled = functools.lru_cache(GRAMMARS_KEPT)(self._compile)
        names = sorted(self.control, key=len, reverse=True)
        self._names = re.compile("(" + "|".join(map(re.escape, names)) + ")")

    @property
    def words(self) -> int:
        """32-bit words of a mask."""
        return -(-self.size // 32)

    @functools.cached_property
    def thinking_mask(self) -> np.ndarray:
        """uint32 [words]: what may come inside the think channel: text, and the marker that closes it."""
        ordinary = sorted(set(range(self.size)) - set(self.control.values()))
        return self.bits([*ordinary, self.control[control_tokens.CLOSE]])

    def bits(self, tokens: Iterable[int]) -> np.ndarray:
        """uint32 [words] with these tokens' bits set."""
        allowed = np.zeros(self.words * 32, np.uint8)
        allowed[list(tokens)] = 1
        return np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32)

    def split(self, text: str) -> list[str]:
        """Pieces of `text`: names of control tokens and what is between them."""
        return [piece for piece in self._names.split(text) if piece]

    def special(self, name: str) -> str:
        """A control token in Lark."""
        return f"<[{self.control[name]}]>"

    def matcher(self, kind: str, grammar: str) -> llguidance.LLMatcher:
        """A matcher at the start of `grammar`. Raises `ConstraintError`."""
        return self._compiled(kind, grammar).deep_copy()

    def _compile(self, kind: str, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise ConstraintError(kind, matcher.get_error())
        start = time.thread_time()
        matcher.compute_bitmask()
        seconds = time.thread_time() - start
        if seconds > MASK_SECONDS:
            raise ConstraintError(
                kind, f"the first token takes {seconds:.1f} s to decide, expected at most {MASK_SECONDS}; simplify it"
            )
        return matcher


_VOCABULARIES: "weakref.WeakKeyDictionary[Tokenizer, Vocabulary]" = weakref.WeakKeyDictionary()


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """The tokenizer's vocabulary; built once."""
    found = _VOCABULARIES.get(tokenizer)
    if found is None:
        # Two threads may both build it; the first one in stays.
        found = _VOCABULARIES.setdefault(tokenizer, Vocabulary(tokenizer))
    return found
