"""Where a draft's texts come from: beginnings for the target to continue, and windows of prepared data."""

import dataclasses
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int32

from k3jax import tokenizer
from k3jax.train import instructions, tokens

Kind = Literal["python", "prose"]
PROSE = (".rst", ".md")
PROSE_SHARE = 0.25
"""Of the windows; there is far less prose than Python in the corpus."""
CHAT_SHARE = 0.15


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A folder that `prepare` has written."""

    path: Path

    def windows(
        self, rng: np.random.Generator, count: int, size: int, *, split: str, kind: Kind
    ) -> Int32[np.ndarray, "N S"]:
        """Random windows that lie inside one file of `kind`; longer files are drawn more often.

        Raises `ValueError` when no file of the split is long enough.
        """
        ids = np.load(self.path / f"{split}.npy", mmap_mode="r")
        files = [entry for entry in tokens.documents(self.path, split) if entry.tokens >= size]
        files = [entry for entry in files if entry.name.endswith(PROSE) == (kind == "prose")]
        if not files:
            raise ValueError(f"{self.path} has no {split} file of {kind} with {size} tokens; prepare more data")
        share = np.array([entry.tokens for entry in files], np.float64)
        chosen = [files[i] for i in rng.choice(len(files), count, p=share / share.sum())]
        starts = [entry.start + int(rng.integers(0, entry.tokens - size + 1)) for entry in chosen]
        return np.array([ids[start : start + size] for start in starts], np.int32).reshape(count, size)

    def requests(self, rng: np.random.Generator, count: int) -> tuple[list[list[int]], tuple[int, ...]]:
        """Chat prompts for functions documented in held-out files, at most `count`, and the ids that end an answer."""
        encoder = tokenizer.load(self.path)
        ids = np.load(self.path / tokens.VALIDATION, mmap_mode="r")
        files = [entry for entry in tokens.documents(self.path, "validation") if not entry.name.endswith(PROSE)]
        prompts: list[list[int]] = []
        for entry in (files[i] for i in rng.permutation(len(files))):
            text = encoder.decode(ids[entry.start : entry.start + entry.tokens].tolist())
            found = instructions.documented_functions(text)
            prompts += [instructions.conversation(function, encoder, 0).prompt for function in found]
            if len(prompts) >= count:
                break
        return prompts[:count], tuple(encoder.eos_ids)

    def mixed(self, rng: np.random.Generator, count: int, size: int) -> Int32[np.ndarray, "N S"]:
        """Training windows of Python and, where there are any, of prose."""
        prose = round(PROSE_SHARE * count)
        python = self.windows(rng, count - prose, size, split="training", kind="python")
        try:
            rest = self.windows(rng, prose, size, split="training", kind="prose")
        except ValueError:
            rest = self.windows(rng, prose, size, split="training", kind="python")
        return rng.permutation(np.concatenate([python, rest]))

    def texts(self, rng: np.random.Generator, count: int, size: int) -> Int32[np.ndarray, "N S"]:
        """Training windows of text and the beginnings of chat windows."""
        chat = np.load(self.path / tokens.CHAT[0], mmap_mode="r")
        part = round(CHAT_SHARE * count) if len(chat) and chat.shape[1] >= size else 0
        text = self.mixed(rng, count - part, size)
        chosen = chat[np.sort(rng.choice(len(chat), part)), :size].astype(np.int32) if part else text[:0]
        return rng.permutation(np.concatenate([text, chosen]))
