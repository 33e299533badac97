"""From texts to batches: encoding, packing with `[EOS]` between documents, and windows in a fixed order."""

import lzma
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from k3jax import tokenizer
from k3jax.tokenizer import control as control_tokens
from k3jax.train import exercises, instructions
from k3jax.train.corpus import RECORD_COLUMNS, Source

TRAINING, VALIDATION = "training.npy", "validation.npy"
CHAT = ("chat_ids.npy", "chat_weights.npy")
SOURCES, SIZES = "training_files.tsv.xz", "sizes.json"
DOCUMENTS = "documents.tsv"
"""Where each file lies in the packed ids: split, file, first token, tokens."""
WORDINGS = 3
"""Conversations made of each documented function."""
EXERCISE_SHARE = 0.3
"""Exercises for each conversation about a documented function."""
_FILES_PER_TASK = 64


def in_parallel(task: Callable[[Sequence[str]], list[Any]], texts: Sequence[str], workers: int) -> list[Any]:
    """`task` over pieces of `texts` on `workers` processes; the results joined in order."""
    pieces = [texts[i : i + _FILES_PER_TASK] for i in range(0, len(texts), _FILES_PER_TASK)]
    if workers <= 1:
        return [result for piece in pieces for result in task(piece)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return [result for results in pool.map(task, pieces) for result in results]


def _encode(vocabulary: Path, texts: Sequence[str]) -> list[NDArray[np.uint16]]:
    encoder = tokenizer.load(vocabulary)
    return [np.array(encoder.encode(text), np.uint16) for text in texts]


def _converse(vocabulary: Path, seed: int, texts: Sequence[str]) -> list[instructions.Conversation]:
    encoder = tokenizer.load(vocabulary)
    functions = [function for text in texts for function in instructions.documented_functions(text)]
    return [instructions.conversation(function, encoder, seed + i) for function in functions for i in range(WORDINGS)]


def pack(documents: Iterable[NDArray[np.uint16]], end: int) -> NDArray[np.uint16]:
    """One array with the id `end` after every document."""
    mark = np.array([end], np.uint16)
    parts = [part for document in documents for part in (document, mark)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)


def write_corpus(sources: Sequence[Source], vocabulary: Path, directory: Path, workers: int) -> dict[str, int]:
    """Stores both splits as packed ids, where each file lies, and the list of files; returns the sizes."""
    directory.mkdir(parents=True, exist_ok=True)
    end = tokenizer.load(vocabulary).control_id(control_tokens.END_OF_SEQUENCE)
    encoded = in_parallel(partial(_encode, vocabulary), [source.text for source in sources], workers)
    sizes: dict[str, int] = {}
    places: list[str] = []
    for name, held_out in ((TRAINING, False), (VALIDATION, True)):
        chosen = [(s, ids) for s, ids in zip(sources, encoded, strict=True) if s.held_out == held_out]
        packed = pack((ids for _, ids in chosen), end)
        np.save(directory / name, packed)
        split = name.removesuffix(".npy")
        places += _places(split, chosen)
        sizes |= {
            f"{split}_files": len(chosen),
            f"{split}_bytes": sum(len(source.text.encode()) for source, _ in chosen),
            f"{split}_tokens": len(packed),
        }
    (directory / DOCUMENTS).write_text("".join(f"{line}\n" for line in places), encoding="utf-8")
    with lzma.open(directory / SOURCES, "wt", encoding="utf-8", preset=9) as file:
        rows = [RECORD_COLUMNS, *sorted(source.record for source in sources)]
        file.writelines("\t".join(row) + "\n" for row in rows)
    return sizes


def write_chat(
    sources: Sequence[Source], vocabulary: Path, directory: Path, workers: int, *, length: int, seed: int, most: int
) -> dict[str, int]:
    """Stores chat windows made from the training files' documented functions and from exercises.

    At most `most` conversations about documented functions.
    """
    texts = [source.text for source in sources if not source.held_out]
    conversations = in_parallel(partial(_converse, vocabulary, seed), texts, workers)
    order, encoder = random.Random(seed), tokenizer.load(vocabulary)
    order.shuffle(conversations)
    del conversations[most:]
    tasks = exercises.exercises(round(EXERCISE_SHARE * len(conversations)), seed)
    conversations += [instructions.conversation(task, encoder, seed + i) for i, task in enumerate(tasks)]
    order.shuffle(conversations)
    packed = instructions.pack_conversations(conversations, encoder, length=length)
    for name, array in zip(CHAT, packed, strict=True):
        np.save(directory / name, array)
    return {"chat_conversations": len(conversations), "chat_windows": len(packed[0])}


def _places(split: str, documents: Sequence[tuple[Source, NDArray[np.uint16]]]) -> list[str]:
    """Lines of `DOCUMENTS`; a document's end mark belongs to none."""
    starts = np.cumsum([0, *(len(ids) + 1 for _, ids in documents)]).tolist()
    return [
        f"{split}\t{source.name}\t{start}\t{len(ids)}" for start, (source, ids) in zip(starts, documents, strict=False)
    ]


class Document(NamedTuple):
    """A file in the packed ids of its split."""

    name: str
    start: int
    tokens: int


def documents(directory: Path, split: str) -> list[Document]:
    """The files of "training" or "validation", in order."""
    rows = (line.split("\t") for line in (directory / DOCUMENTS).read_text(encoding="utf-8").splitlines())
    return [Document(name, int(start), int(size)) for part, name, start, size in rows if part == split]


class Windows:
    """Overlap-free training windows of `length` predictions, in an order that depends on the seed alone.

    The batch of a step is a pure function of the step, so a resumed run sees the same data.
    """

    def __init__(self, tokens: NDArray[np.uint16], *, length: int, rows: int, seed: int) -> None:
        self.count = (len(tokens) - 1) // length
        if self.count < 1:
            raise ValueError(f"the corpus has {len(tokens)} tokens, expected more than one window of {length}")
        self._tokens, self._length, self._rows, self._seed = tokens, length, rows, seed

    @property
    def steps_per_epoch(self) -> float:
        """Steps until every window has been seen once."""
        return self.count / self._rows

    def batch(self, step: int) -> NDArray[np.int32]:
        """[rows, length + 1] ids; the last id of a window is the first of the next one."""
        position = np.arange(step * self._rows, (step + 1) * self._rows)
        chosen = [self._order(int(epoch))[place] for epoch, place in zip(*divmod(position, self.count), strict=True)]
        start = np.array(chosen)[:, None] * self._length
        return self._tokens[start + np.arange(self._length + 1)[None]].astype(np.int32)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if getattr(self, "_epoch", None) != epoch:
            self._epoch = epoch
            self._permutation = np.random.Generator(np.random.Philox([self._seed, epoch])).permutation(self.count)
        return self._permutation
