"""A 5-gram model with interpolated Kneser-Ney smoothing: the baseline that a language model has to beat.

Counts live in sorted arrays of 64-bit keys (a gram's ids are its digits), so a hundred million tokens are
counted by five sorts. Lower orders count distinct left neighbours; each order has one discount
n1 / (n1 + 2 n2) (Ney, Essen and Kneser 1994).
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]


class Order(NamedTuple):
    """Counts of one gram length; contexts are the grams without their last token."""

    grams: Keys
    counts: NDArray[np.int64]
    contexts: Keys
    context_counts: NDArray[np.int64]
    followers: NDArray[np.int64]
    """Distinct continuations of each context."""
    discount: float


class NgramModel:
    """`order` - 1 tokens of context over a vocabulary of `vocab_size` ids."""

    def __init__(self, tokens: NDArray[np.uint16], vocab_size: int, order: int = 5) -> None:
        self._bits = max(1, math.ceil(math.log2(vocab_size)))
        if order * self._bits > 64:
            raise ValueError(
                f"{order} ids of {self._bits} bits do not fit in 64; expected a smaller order or vocabulary"
            )
        self._vocab_size = vocab_size
        grams, counts = np.unique(self._keys(tokens, order), return_counts=True)
        self._orders: list[Order] = []
        for length in range(order, 0, -1):
            self._orders.append(self._order(grams, counts))
            shorter = grams & self._mask(length - 1)  # without the first token: one left neighbour per gram
            grams, counts = np.unique(shorter, return_counts=True)

    def _mask(self, length: int) -> np.uint64:
        return np.uint64((1 << (self._bits * length)) - 1)

    def _keys(self, tokens: NDArray[np.uint16], length: int) -> Keys:
        keys = np.zeros(max(0, len(tokens) - length + 1), np.uint64)
        for i in range(length):
            keys = keys << np.uint64(self._bits) | tokens[i : i + len(keys)].astype(np.uint64)
        return keys

    def _order(self, grams: Keys, counts: NDArray[np.int64]) -> Order:
        contexts, start, followers = np.unique(grams >> np.uint64(self._bits), return_index=True, return_counts=True)
        once, twice = int(np.sum(counts == 1)), int(np.sum(counts == 2))
        discount = once / (once + 2 * twice) if once else 0.5
        return Order(grams, counts, contexts, np.add.reduceat(counts, start), followers, discount)

    def nats(self, tokens: NDArray[np.uint16]) -> float:
        """Sum of -log p over the tokens that have a full context before them."""
        length = len(self._orders)
        probability = np.full(max(0, len(tokens) - length + 1), 1 / self._vocab_size)
        for size, order in zip(range(1, length + 1), reversed(self._orders), strict=True):
            keys = self._keys(tokens, size)[length - size :]
            probability = self._interpolate(order, keys, probability)
        return float(-np.sum(np.log(probability)))

    def _interpolate(self, order: Order, keys: Keys, backoff: NDArray[np.float64]) -> NDArray[np.float64]:
        count = _lookup(order.grams, order.counts, keys)
        context = keys >> np.uint64(self._bits)
        total = _lookup(order.contexts, order.context_counts, context)
        followers = _lookup(order.contexts, order.followers, context)
        kept = np.maximum(count - order.discount, 0) + order.discount * followers * backoff
        return np.where(total > 0, kept / np.maximum(total, 1), backoff)


def _lookup(keys: Keys, values: NDArray[np.int64], wanted: Keys) -> NDArray[np.int64]:
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
