"""Prompts: text or token ids, checked before anything is computed."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from k3jax.tokenizer import Tokenizer

Prompt = str | Sequence[Any] | np.ndarray
"""Text, or integer token ids."""


class PromptError(ValueError):
    """A prompt that cannot be run."""


class LengthError(ValueError):
    """A longest sequence that a model cannot have."""


def is_batch(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether `prompt` is several prompts rather than a text or a list of ids."""
    if isinstance(prompt, str):
        return False
    if isinstance(prompt, np.ndarray):
        return prompt.ndim > 1
    return len(prompt) > 0 and (isinstance(prompt[0], str | Sequence) or np.ndim(prompt[0]) > 0)


def read(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int, name: str = "prompt") -> list[int]:
    """The ids of a prompt. In text, names of control tokens are ordinary text; no `[BOS]` is added.

    Raises `PromptError` for text without a tokenizer, an empty prompt, and an id that is no integer below
    `vocab_size`.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError(f"{name} is text but the checkpoint has no tokenizer; give token ids instead")
        prompt = tokenizer.encode(prompt)
    ids = [_token_id(value, position, vocab_size, name) for position, value in enumerate(prompt)]
    if not ids:
        raise PromptError(f"{name} is empty, expected at least one token")
    return ids


def _token_id(value: object, position: int, vocab_size: int, name: str) -> int:
    try:
        token = -1 if isinstance(value, bool | np.bool_) else operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        token = -1
    if not 0 <= token < vocab_size:
        shown = value.item() if isinstance(value, np.generic) else value
        raise PromptError(
            f"{name} has token id {shown!r} at position {position}, expected an integer from 0 to {vocab_size - 1}"
        )
    return token


def require_room(ids: Sequence[int], longest: int, name: str = "prompt", *, tokens: int = 0) -> None:
    """Raises `PromptError` unless `ids` and `tokens` more fit into `longest` positions."""
    if len(ids) + tokens > longest:
        more = f" and {tokens} more" if tokens else ""
        raise PromptError(
            f"{name} has {len(ids)} tokens{more}, the cache holds at most {longest}; shorten it or raise max_length"
        )
