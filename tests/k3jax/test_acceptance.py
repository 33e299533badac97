"""Both rules leave the target's distribution unchanged: shown by exact enumeration on a small vocabulary."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.speculation import acceptance

VOCAB, DRAFTS = 3, 2


def tables(seed):
    """Random laws p(. | prefix) for prefixes of length 0..2 and q(. | prefix) for 0..1, sparse in places."""
    rng = np.random.default_rng(seed)

    def law():
        weights = rng.random(VOCAB) ** 2 * (rng.random(VOCAB) > 0.2)
        weights[rng.integers(VOCAB)] += 0.1
        return weights / weights.sum()

    prefixes = [prefix for n in range(DRAFTS + 1) for prefix in itertools.product(range(VOCAB), repeat=n)]
    return {prefix: law() for prefix in prefixes}, {prefix: law() for prefix in prefixes if len(prefix) < DRAFTS}


def arrays(p, q, drafts):
    rows = [p[drafts[:n]] for n in range(DRAFTS + 1)], [q[drafts[:n]] for n in range(DRAFTS)]
    return (*(jnp.asarray(np.stack(row)[None], jnp.float32) for row in rows), jnp.asarray([drafts], jnp.int32))


def count_law(rule, p, q, drafts):
    """Probability of each accepted count, with the uniforms integrated out."""
    function = acceptance.standard_chances if rule == "standard" else acceptance.block_chances
    chance = np.asarray(function(*arrays(p, q, drafts))[0], np.float64)
    law = np.zeros(DRAFTS + 1)
    if rule == "standard":
        law[1:] = np.cumprod(chance)
        law[:-1] = np.append(1, law[1:-1]) - law[1:]
        law[-1] = np.prod(chance)
    else:
        for n in range(DRAFTS + 1):
            law[n] = np.prod(1 - chance[n:]) * (chance[n - 1] if n else 1)
    return law


def following(rule, p, q, drafts, n):
    """The law of the next token when exactly n drafts stand."""
    full = arrays(p, q, drafts)
    weight = jnp.ones(1) if rule == "standard" else acceptance.prefix_mass(*full)[:, n]
    return np.asarray(acceptance.following(*full[:2], jnp.asarray([n], jnp.int32), weight)[0], np.float64)


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("seed", range(12))
def test_the_output_law_is_the_targets(rule, seed):
    """The law of DRAFTS + 1 output tokens: emitted ones, then continued by the target itself."""
    p, q = tables(seed)
    output = dict.fromkeys(itertools.product(range(VOCAB), repeat=DRAFTS + 1), 0.0)
    for drafts in itertools.product(range(VOCAB), repeat=DRAFTS):
        drawn = np.prod([q[drafts[:n]][token] for n, token in enumerate(drafts)])
        if drawn == 0:
            continue
        for n, chance in enumerate(count_law(rule, p, q, drafts)):
            if chance < 1e-12:
                continue
            follow = following(rule, p, q, drafts, n)
            for tail in itertools.product(range(VOCAB), repeat=DRAFTS + 1 - n):
                tokens = (*drafts[:n], *tail)
                rest = np.prod([p[tokens[:m]][tokens[m]] for m in range(n + 1, DRAFTS + 1)])
                output[tokens] += drawn * chance * follow[tail[0]] * rest
    for tokens, mass in output.items():
        assert mass == pytest.approx(np.prod([p[tokens[:n]][t] for n, t in enumerate(tokens)]), abs=2e-6)


def expected_tokens(rule, p, q):
    total = 0.0
    for drafts in itertools.product(range(VOCAB), repeat=DRAFTS):
        drawn = np.prod([q[drafts[:n]][token] for n, token in enumerate(drafts)])
        if drawn:
            total += drawn * (1 + count_law(rule, p, q, drafts) @ np.arange(DRAFTS + 1))
    return total


def test_block_accepts_at_least_as_much():
    pairs = [
        (expected_tokens("block", *tables(seed)), expected_tokens("standard", *tables(seed))) for seed in range(12)
    ]
    assert all(block >= standard - 1e-6 for block, standard in pairs)
    assert max(block - standard for block, standard in pairs) > 0.01


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_an_oracle_is_always_accepted(rule):
    p, _ = tables(3)
    q = {prefix: law for prefix, law in p.items() if len(prefix) < DRAFTS}
    full = arrays(p, q, (int(np.argmax(p[()])),) * 2)
    accepted = acceptance.accept(rule, *full, jnp.full((1, DRAFTS), 0.999, jnp.float32))
    assert accepted.count[0] == DRAFTS
    np.testing.assert_allclose(accepted.following[0], full[0][0, -1], rtol=1e-6)


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize(("drafts", "count", "token"), [((1, 0), 2, 2), ((1, 2), 1, 0), ((0, 0), 0, 1)])
def test_greedy_rows_are_one_hot(rule, drafts, count, token):
    """The target says 1, 0, 2; the leading run of equal drafts stands and the target's token follows."""
    p = jnp.eye(VOCAB, dtype=jnp.float32)[jnp.asarray([[1, 0, 2]])]
    q = jnp.eye(VOCAB, dtype=jnp.float32)[jnp.asarray([drafts])]
    for u in (0.0, 0.999):
        accepted = acceptance.accept(
            rule, p, q, jnp.asarray([drafts], jnp.int32), jnp.full((1, DRAFTS), u, jnp.float32)
        )
        assert accepted.count[0] == count
        assert int(np.argmax(accepted.following[0])) == token
