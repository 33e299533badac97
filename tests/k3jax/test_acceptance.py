"""Both rules leave the target's distribution unchanged: shown by exact enumeration on a small vocabulary."""

import itertools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.dspark.model import TARGET_IDS, DSpark
from k3jax.speculation import acceptance

VOCAB, DRAFTS = 3, 3
BLOCKS = list(itertools.product(range(VOCAB), repeat=DRAFTS))
ALL = jnp.full(1, DRAFTS, jnp.int32)
"""The limit of a row whose drafts all take part."""


def tables(seed):
    """Random laws p(. | prefix) for prefixes of length 0..3 and q(. | prefix) for 0..2, sparse in places."""
    rng = np.random.default_rng(seed)

    def law():
        weights = rng.random(VOCAB) ** 2 * (rng.random(VOCAB) > 0.2)
        weights[rng.integers(VOCAB)] += 0.1
        return weights / weights.sum()

    prefixes = [prefix for n in range(DRAFTS + 1) for prefix in itertools.product(range(VOCAB), repeat=n)]
    return {prefix: law() for prefix in prefixes}, {prefix: law() for prefix in prefixes if len(prefix) < DRAFTS}


def arrays(p, q, blocks):
    """p [blocks, DRAFTS + 1, VOCAB], q and the drafts, for several blocks at once."""
    laws = [[p[drafts[:n]] for n in range(DRAFTS + 1)] for drafts in blocks]
    drawn = [[q[drafts[:n]] for n in range(DRAFTS)] for drafts in blocks]
    return jnp.asarray(laws, jnp.float32), jnp.asarray(drawn, jnp.float32), jnp.asarray(blocks, jnp.int32)


def count_laws(rule, full, limit):
    """Probability of each accepted count of each block, with the uniforms integrated out."""
    function = acceptance.standard_chances if rule == "standard" else acceptance.block_chances
    chance = np.asarray(function(*full, limit), np.float64)
    law = np.zeros((len(chance), DRAFTS + 1))
    if rule == "standard":
        stands = np.cumprod(np.insert(chance, 0, 1, axis=1), axis=1)
        law[:, :-1], law[:, -1] = stands[:, :-1] - stands[:, 1:], stands[:, -1]
    else:
        for n in range(DRAFTS + 1):
            law[:, n] = np.prod(1 - chance[:, n:], axis=1) * (chance[:, n - 1] if n else 1)
    return law


def following(rule, full, limit, n):
    """The law of the next token of each block when exactly n drafts stand."""
    size = len(full[2])
    weight = jnp.ones(size) if rule == "standard" else acceptance.prefix_mass(*full)[:, n]
    return np.asarray(acceptance.following(*full[:2], jnp.full(size, n, jnp.int32), weight, limit), np.float64)


def chance_of(laws, tokens, start=0):
    """Probability of `tokens[start:]` after those before."""
    return np.prod([laws[tokens[:n]][tokens[n]] for n in range(start, len(tokens))])


def output_law(rule, p, q, limits):
    """The law of DRAFTS + 1 output tokens: emitted ones, then continued by the target itself.

    `limits` gives the limit of each block of drafts.
    """
    full, limit = arrays(p, q, BLOCKS), jnp.asarray([limits(drafts) for drafts in BLOCKS], jnp.int32)
    counts = count_laws(rule, full, limit)
    nexts = np.stack([following(rule, full, limit, n) for n in range(DRAFTS + 1)], axis=1)
    output = dict.fromkeys(itertools.product(range(VOCAB), repeat=DRAFTS + 1), 0.0)
    for index, drafts in enumerate(BLOCKS):
        drawn = chance_of(q, drafts)
        for n in np.flatnonzero(counts[index] * drawn > 1e-12):
            for tail in itertools.product(range(VOCAB), repeat=DRAFTS + 1 - n):
                tokens = (*drafts[:n], *tail)
                law = drawn * counts[index, n] * nexts[index, n, tail[0]]
                output[tokens] += law * chance_of(p, tokens, n + 1)
    return output


def everything(drafts):
    return DRAFTS


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("seed", range(8))
def test_the_output_law_is_the_targets(rule, seed):
    p, q = tables(seed)
    for tokens, mass in output_law(rule, p, q, everything).items():
        assert mass == pytest.approx(chance_of(p, tokens), abs=2e-6)


def test_a_limit_may_follow_from_the_drafts_before_it():
    """Stopping after the first draft if it is 0, after the second if that is 1: exact under both rules."""

    def limits(drafts):
        return 1 if drafts[0] == 0 else 2 if drafts[1] == 1 else DRAFTS

    for rule in ("standard", "block"):
        p, q = tables(5)
        for tokens, mass in output_law(rule, p, q, limits).items():
            assert mass == pytest.approx(chance_of(p, tokens), abs=2e-6)


def test_a_limit_that_looks_ahead_is_biased():
    """What the rules ask of a limit is needed: stopping before a draft because of that draft changes the law."""
    p, q = tables(5)
    output = output_law("block", p, q, lambda drafts: 0 if drafts[0] == 0 else DRAFTS)
    assert max(abs(mass - chance_of(p, tokens)) for tokens, mass in output.items()) > 1e-2


def reduced(seed):
    """A draft that lacks token 1: its laws over the others, and the same over all ids."""
    p, q = tables(seed)
    ids = np.asarray([0, 2])
    config = SimpleNamespace(vocab_size=VOCAB)
    draft = SimpleNamespace(optional={TARGET_IDS: jnp.asarray(ids, jnp.int32)}, config=config)
    own = {prefix: (law[ids] + 0.05) / (law[ids] + 0.05).sum() for prefix, law in q.items()}
    spread = {prefix: np.asarray(DSpark.over_target_ids(draft, jnp.asarray(law))) for prefix, law in own.items()}
    return p, spread


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("seed", range(4))
def test_a_reduced_vocabulary_leaves_the_law_as_it_is(rule, seed):
    """The token that the draft cannot say comes from the residual alone, as often as the target says it."""
    p, q = reduced(seed)
    assert all(law[1] == 0 and law.sum() == pytest.approx(1) for law in q.values())
    for tokens, mass in output_law(rule, p, q, everything).items():
        assert mass == pytest.approx(chance_of(p, tokens), abs=2e-6)


def expected_tokens(rule, p, q):
    counts = count_laws(rule, arrays(p, q, BLOCKS), jnp.full(len(BLOCKS), DRAFTS, jnp.int32))
    drawn = np.asarray([chance_of(q, drafts) for drafts in BLOCKS])
    return 1 + drawn @ counts @ np.arange(DRAFTS + 1)


def test_block_accepts_at_least_as_much():
    pairs = [[expected_tokens(rule, *tables(seed)) for rule in ("block", "standard")] for seed in range(8)]
    assert all(block >= standard - 1e-6 for block, standard in pairs)
    assert max(block - standard for block, standard in pairs) > 0.01


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_an_oracle_is_always_accepted(rule):
    p, _ = tables(3)
    q = {prefix: law for prefix, law in p.items() if len(prefix) < DRAFTS}
    full = arrays(p, q, [(int(np.argmax(p[()])),) * DRAFTS])
    accepted = acceptance.accept(rule, *full, jnp.full((1, DRAFTS), 0.999, jnp.float32), ALL)
    assert accepted.count[0] == DRAFTS
    np.testing.assert_allclose(accepted.following[0], full[0][0, -1], rtol=1e-6)


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize(("drafts", "count", "token"), [((1, 0, 2), 3, 1), ((1, 2, 2), 1, 0), ((0, 0, 2), 0, 1)])
def test_greedy_rows_are_one_hot(rule, drafts, count, token):
    """The target says 1, 0, 2, 1; the leading run of equal drafts stands and the target's token follows."""
    p = jnp.eye(VOCAB, dtype=jnp.float32)[jnp.asarray([[1, 0, 2, 1]])]
    q = jnp.eye(VOCAB, dtype=jnp.float32)[jnp.asarray([drafts])]
    for u in (0.0, 0.999):
        accepted = acceptance.accept(
            rule, p, q, jnp.asarray([drafts], jnp.int32), jnp.full((1, DRAFTS), u, jnp.float32), ALL
        )
        assert accepted.count[0] == count
        assert int(np.argmax(accepted.following[0])) == token
