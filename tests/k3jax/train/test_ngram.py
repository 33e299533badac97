from collections import Counter

import numpy as np
import pytest

from k3jax.train.ngram import NgramModel


def kneser_ney(training: list[int], vocab_size: int, order: int, context: tuple[int, ...], token: int) -> float:
    """The definition, with dictionaries, for one token."""
    grams = Counter(tuple(training[i : i + order]) for i in range(len(training) - order + 1))
    tables = [grams]
    for _ in range(order - 1):
        tables.insert(0, Counter(gram[1:] for gram in tables[0]))
    probability = 1 / vocab_size
    for size, table in enumerate(tables, 1):
        history = context[len(context) - size + 1 :] if size > 1 else ()
        once, twice = (sum(count == n for count in table.values()) for n in (1, 2))
        discount = once / (once + 2 * twice) if once else 0.5
        followers = {gram[-1]: count for gram, count in table.items() if gram[:-1] == history}
        if total := sum(followers.values()):
            kept = max(followers.get(token, 0) - discount, 0)
            probability = (kept + discount * len(followers) * probability) / total
    return probability


@pytest.mark.parametrize("order", [2, 3, 5])
def test_probabilities_follow_the_definition_and_sum_to_one(order: int) -> None:
    generator = np.random.default_rng(order)
    training = (generator.integers(0, 4, 300) * generator.integers(1, 3, 300)).astype(np.uint16)
    model = NgramModel(training, 8, order)
    for _ in range(4):
        context = generator.integers(0, 8, order - 1).astype(np.uint16)
        law = [np.exp(-model.nats(np.append(context, np.uint16(token)))) for token in range(8)]
        expected = [kneser_ney(training.tolist(), 8, order, tuple(context.tolist()), token) for token in range(8)]
        np.testing.assert_allclose(law, expected, rtol=1e-9)
        np.testing.assert_allclose(sum(law), 1, rtol=1e-9)


def test_nats_add_over_the_tokens_with_a_full_context() -> None:
    ids = np.random.default_rng(0).integers(0, 50, 400).astype(np.uint16)
    model = NgramModel(ids[:300], 64, 3)
    single = [model.nats(ids[i : i + 3]) for i in range(300, 398)]
    np.testing.assert_allclose(model.nats(ids[300:]), sum(single), rtol=1e-9)


def test_ids_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="5 ids of 17 bits do not fit in 64"):
        NgramModel(np.zeros(10, np.uint16), 100_000)
