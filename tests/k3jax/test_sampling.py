"""Sampling against an independent NumPy implementation, and draws against their distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.sampling import (
    DIGITS,
    GREEDY_BELOW,
    Filters,
    History,
    Sampling,
    SamplingError,
    draw,
    keep_likely,
    keep_top_by_search,
    keep_top_by_sort,
    penalize,
    sample,
)

VOCAB = 37
ROWS = 6

penalize_jit, keep_jit, sample_jit = jax.jit(penalize), jax.jit(keep_likely), jax.jit(sample)


def random_logits(seed: int, rows: int = ROWS, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (rows, vocab)).astype(np.float32)


def history_of(prompts: list[list[int]], outputs: list[list[int]], vocab: int = VOCAB) -> History:
    history = History.of(prompts, vocab)
    for step in range(max(map(len, outputs))):
        token = jnp.asarray([ids[min(step, len(ids) - 1)] for ids in outputs], jnp.int32)
        history = history.append(token, jnp.asarray([step < len(ids) for ids in outputs]))
    return history


def penalized_by_hand(logits, prompt, output, repetition, presence, frequency):
    """Definitions of the OpenAI API and of Keskar et al. (2019), one token at a time."""
    expected = logits.astype(np.float64).copy()
    for token in range(len(logits)):
        if token in prompt or token in output:
            expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
        expected[token] -= output.count(token) * frequency
        expected[token] -= (1 if token in output else 0) * presence
    return expected


def kept_by_hand(logits, top_k, top_p, min_p):
    """Which tokens survive: explicit loops over tokens sorted from the best."""
    logits = logits.astype(np.float64)
    probability = np.exp(logits - logits.max())
    probability /= probability.sum()
    alive = [t for t in range(len(logits)) if probability[t] >= min_p * probability.max()]
    alive.sort(key=lambda t: -logits[t])
    if 0 < top_k < len(alive):
        alive = [t for t in alive if logits[t] >= logits[alive[top_k - 1]]]
    mass, total, nucleus = 0.0, sum(probability[t] for t in alive), []
    for token in alive:
        if mass >= top_p * total and top_p < 1:
            break
        nucleus.append(token)
        mass += probability[token]
    return set(nucleus)


def test_penalties_match_their_definitions():
    logits = random_logits(0)
    prompts = [[1, 2, 3], [4], [5, 5], [0], [6, 7], [8]]
    outputs = [[3, 9, 9], [4, 4, 4], [10], [11, 12], [6], [13, 13]]
    settings = {
        "repetition_penalty": [1.0, 1.3, 0.7, 2.0, 1.1, 1.0],
        "presence_penalty": [0.5, 0.0, -0.5, 1.0, 2.0, 0.0],
        "frequency_penalty": [0.1, 0.7, 0.0, -1.0, 2.0, 0.3],
    }
    got = penalize_jit(jnp.asarray(logits), Sampling.of(ROWS, **settings), history_of(prompts, outputs))
    for row in range(ROWS):
        wanted = penalized_by_hand(logits[row], prompts[row], outputs[row], *(v[row] for v in settings.values()))
        np.testing.assert_allclose(np.asarray(got)[row], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_filters_match_explicit_loops(seed):
    rng = np.random.default_rng(seed)
    logits = random_logits(seed)
    settings = {
        "top_k": [0, -1, 1, *rng.integers(1, VOCAB + 5, ROWS - 3).tolist()],
        "top_p": [1.0, *rng.uniform(0.05, 1, ROWS - 1).tolist()],
        "min_p": [0.0, 0.0, *rng.uniform(0, 0.3, ROWS - 2).tolist()],
    }
    kept = np.isfinite(np.asarray(keep_jit(jnp.asarray(logits), Sampling.of(ROWS, **settings))))
    for row in range(ROWS):
        wanted = kept_by_hand(logits[row], *(values[row] for values in settings.values()))
        assert set(np.flatnonzero(kept[row]).tolist()) == wanted, row


@pytest.mark.parametrize("seed", range(2))
def test_the_search_keeps_what_the_sort_keeps(seed):
    """And with few digits sometimes a little more, never less."""
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(np.round(rng.standard_normal((6, 500)) * 8) / 4, jnp.float32)
    logits = logits.at[5, 100:].set(-jnp.inf)
    sampler = Sampling.of(6, top_k=[0, 7, 0, 40, 1, 300], top_p=[0.9, 1.0, 0.3, 0.8, 0.5, 0.95])
    args = logits, sampler.top_k, sampler.top_p
    sort = np.isfinite(keep_top_by_sort(*args))
    exact, rough = (np.isfinite(keep_top_by_search(*args, filters=Filters(), digits=d)) for d in (DIGITS, 3))
    np.testing.assert_array_equal(exact, sort)
    assert (rough >= sort).all()
    assert (rough.sum(1) <= 1.5 * sort.sum(1) + 10).all()


def test_ties_with_the_kth_token_stay():
    logits = jnp.asarray([[2.0, 1.0, 1.0, 0.0]])
    kept = np.isfinite(np.asarray(keep_likely(logits, Sampling.of(1, top_k=2))))
    assert kept.tolist() == [[True, True, True, False]]


def test_temperature_zero_takes_the_lowest_id_of_the_best():
    logits = jnp.asarray([[0.0, 5.0, 5.0], [1.0, 1.0, 1.0]])
    got = sample(logits, Sampling.of(2, temperature=0), History.of([[0], [0]], 3), jnp.ones(2, bool))
    assert got.token.tolist() == [1, 0]


def test_logprob_is_the_models_own():
    logits = random_logits(3)
    params = Sampling.of(ROWS, temperature=0.3, top_k=4, presence_penalty=1.5)
    got = sample_jit(jnp.asarray(logits), params, history_of([[1]] * ROWS, [[2]] * ROWS), jnp.ones(ROWS, bool))
    wide = logits.astype(np.float64)
    logprob = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    wanted = logprob[np.arange(ROWS), np.asarray(got.token)]
    np.testing.assert_allclose(np.asarray(got.logprob), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}]
)
def test_draws_follow_the_filtered_distribution(settings):
    """Chi-square over many positions of one row; the critical value is for p = 1e-4."""
    draws, vocab = 4096, 12
    logits = random_logits(11, 1, vocab)[0]
    params = Sampling.of(draws, **settings, seed=7)
    positions = jnp.arange(draws, dtype=jnp.int32)
    tokens = np.asarray(jax.jit(draw)(jnp.tile(jnp.asarray(logits), (draws, 1)), params, positions))
    scaled = logits.astype(np.float64) / settings.get("temperature", 1.0)
    alive = kept_by_hand(scaled, settings.get("top_k", 0), settings.get("top_p", 1.0), settings.get("min_p", 0.0))
    weights = np.asarray([np.exp(scaled[t]) if t in alive else 0.0 for t in range(vocab)])
    expected = draws * weights / weights.sum()
    observed = np.bincount(tokens, minlength=vocab)
    assert not observed[expected == 0].any()
    common = expected >= 5
    rest = np.asarray([observed[~common].sum(), expected[~common].sum()])
    statistic = ((observed - expected)[common] ** 2 / expected[common]).sum()
    statistic += (rest[0] - rest[1]) ** 2 / rest[1] if rest[1] > 0 else 0.0
    critical = {1: 15.1, 2: 18.4, 3: 21.1, 4: 23.5, 5: 25.7, 6: 27.9, 7: 29.9, 8: 31.8, 9: 33.7, 10: 35.6, 11: 37.4}
    assert statistic < critical[int(common.sum())]


def test_a_row_draws_the_same_whatever_its_neighbours():
    logits = random_logits(5, 8)
    seeds = list(range(40, 48))
    prompts = [[row] * (row + 1) for row in range(8)]

    def run(rows: list[int]) -> list[int]:
        params = Sampling.of(len(rows), temperature=1.3, top_p=0.9, seed=[seeds[r] for r in rows])
        history = History.of([prompts[r] for r in rows], VOCAB)
        return sample_jit(jnp.asarray(logits[rows]), params, history, jnp.ones(len(rows), bool)).token.tolist()

    together = run(list(range(8)))
    assert [run([row])[0] for row in range(8)] == together
    assert run([7, 2, 5, 2]) == [together[row] for row in (7, 2, 5, 2)]


def test_seed_and_position_both_change_the_draw():
    flat = jnp.zeros((64, 1000))
    seeds = draw(flat, Sampling.of(64, seed=list(range(64))), jnp.zeros(64, jnp.int32))
    positions = draw(flat, Sampling.of(64, seed=1), jnp.arange(64, dtype=jnp.int32))
    assert len(set(seeds.tolist())) > 55
    assert len(set(positions.tolist())) > 55


def test_rows_that_do_not_run_keep_their_history():
    before = history_of([[1], [2]], [[3], [4]])
    logits = jnp.asarray(random_logits(1, 2))
    got = sample(logits, Sampling.of(2, temperature=0), before, jnp.asarray([True, False]))
    assert got.token[1] == 0
    assert got.history.position.tolist() == [3, 2]
    np.testing.assert_array_equal(got.history.count[1], before.count[1])
    assert got.history.count[0, got.token[0]] == before.count[0, got.token[0]] + 1


def test_one_program_serves_all_values():
    logits, running = jnp.asarray(random_logits(2)), jnp.ones(ROWS, bool)
    history = History.of([[1]] * ROWS, VOCAB)
    step = jax.jit(lambda *args: sample(*args))
    for settings in ({"temperature": 0.0}, {"top_k": 3, "top_p": 0.5}, {"min_p": 0.1, "repetition_penalty": 1.2}):
        step(logits, Sampling.of(ROWS, **settings), history, running)
    assert step._cache_size() == 1


def test_a_batch_mixes_greedy_and_random_rows():
    logits = random_logits(8)
    temperature = [0.0, 1.0] * (ROWS // 2)
    params = Sampling.of(ROWS, temperature=temperature, seed=3)
    got = sample_jit(jnp.asarray(logits), params, History.of([[1]] * ROWS, VOCAB), jnp.ones(ROWS, bool))
    assert got.token[::2].tolist() == logits[::2].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, expected a finite number of at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 1.5}, "top_k is 1.5, expected an integer"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_p": 0.0}, r"top_p is 0.0, expected a value in \(0, 1\]"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"min_p": 2}, r"min_p is 2, expected a value in \[0, 1\]"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, expected a finite number above 0"),
        ({"presence_penalty": 3}, "presence_penalty is 3"),
        ({"frequency_penalty": "high"}, "frequency_penalty is 'high'"),
        ({"seed": -1}, "seed is -1, expected an integer"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"seed": True}, "seed is True"),
        ({"temperature": [1.0]}, "temperature has 1 values, expected one number or 2"),
        ({"temprature": 1.0}, r"unknown settings \['temprature'\]"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(SamplingError, match=message):
        Sampling.of(2, **settings)


def test_tiny_temperatures_are_greedy():
    logits = jnp.asarray(random_logits(9))
    params = Sampling.of(ROWS, temperature=GREEDY_BELOW / 2)
    got = sample_jit(logits, params, History.of([[1]] * ROWS, VOCAB), jnp.ones(ROWS, bool))
    assert got.token.tolist() == np.asarray(logits).argmax(-1).tolist()


def test_numpy_values_are_taken():
    params = Sampling.of(2, temperature=np.float32(0.5), seed=np.asarray([3, 4]))
    assert params.temperature.tolist() == [0.5, 0.5]
    assert params.seed.tolist() == [3, 4]
