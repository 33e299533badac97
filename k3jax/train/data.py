"""The batches of a phase: windows of the corpus, alone or beside chat windows."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from k3jax.train.forward import Batch
from k3jax.train.tokens import CHAT, SIZES, TRAINING, VALIDATION, Windows

Batches = Callable[[int], Batch]
"""A pure function from the step of a phase to its batch (NumPy arrays)."""


class TextBatches:
    """Windows of the training split, every prediction with weight 1."""

    def __init__(self, directory: Path, *, rows: int, length: int, seed: int) -> None:
        tokens = np.load(directory / TRAINING, mmap_mode="r")
        self.windows = Windows(tokens, length=length, rows=rows, seed=seed)
        self._weight = np.ones((rows, length), np.float32)

    def __call__(self, step: int) -> Batch:
        """The batch of `step`."""
        return Batch(self.windows.batch(step), self._weight)


class ChatBatches:
    """Half a batch of conversations, half a batch of text, so that plain completion is not forgotten."""

    def __init__(self, directory: Path, *, rows: int, length: int, seed: int) -> None:
        self._ids, self._weight = (np.load(directory / name) for name in CHAT)
        if not len(self._ids):
            raise ValueError(f"{directory / CHAT[0]} holds no window; no conversation fits in {length} tokens")
        if self._ids.shape[1] != length + 1:
            raise ValueError(
                f"{directory / CHAT[0]} has windows of {self._ids.shape[1] - 1} predictions, the run uses {length}; "
                "prepare the data with the same --length"
            )
        self._rows, self._seed = rows // 2, seed
        self._text = TextBatches(directory, rows=rows - self._rows, length=length, seed=seed + 1)

    def __call__(self, step: int) -> Batch:
        """The batch of `step`."""
        position = np.arange(step * self._rows, (step + 1) * self._rows)
        order = [
            np.random.Generator(np.random.Philox([self._seed, 7, int(epoch)])).permutation(len(self._ids))[place]
            for epoch, place in zip(*divmod(position, len(self._ids)), strict=True)
        ]
        text = self._text(step)
        ids = np.concatenate([self._ids[order].astype(np.int32), text.ids])
        return Batch(ids, np.concatenate([self._weight[order].astype(np.float32), text.weight]))


def validation_batches(directory: Path, *, rows: int, length: int, pad: int, limit: int | None = None) -> list[Batch]:
    """The held-out tokens in order: every token but the first is predicted once. The rest of a batch is padding."""
    tokens = np.load(directory / VALIDATION)
    count = -(-(len(tokens) - 1) // length)
    windows = np.full((-(-count // rows) * rows, length + 1), pad, np.int32)
    weight = np.zeros((len(windows), length), np.float32)
    for row in range(count):
        part = tokens[row * length : (row + 1) * length + 1]
        windows[row, : len(part)] = part
        weight[row, : len(part) - 1] = 1
    parts = range(0, len(windows), rows)
    return [Batch(windows[i : i + rows], weight[i : i + rows]) for i in parts][:limit]


def wait_for(directory: Path, seconds: float) -> None:
    """Waits until `prepare` has finished writing `directory`. Raises `FileNotFoundError` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (directory / SIZES).is_file():
        if time.monotonic() >= deadline:
            raise FileNotFoundError(
                f"{directory / SIZES} does not exist; run `python -m k3jax.train prepare --out {directory}` first"
            )
        time.sleep(0.2)
