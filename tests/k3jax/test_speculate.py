"""The speculative step against plain decoding of the same model."""

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import cache as caches
from k3jax import params, sampling, speculate, step
from k3jax.cache import KdaCache, Rows
from k3jax.config import K3Config
from k3jax.dspark import DSpark
from k3jax.dspark_config import DraftGqa, DSparkConfig, Rope
from k3jax.dspark_params import draft_specs
from k3jax.model import K3

PAGES, PAGE = 8, 16
NO_STOP = -1


@pytest.fixture(scope="module")
def config(tiny_config) -> K3Config:
    return dataclasses.replace(
        tiny_config,
        num_layers=4,
        mla_layers=(1, 3),
        attn_res_block_size=2,
        vocab_size=64,
        bos_token_id=60,
        eos_token_id=61,
        pad_token_id=63,
    )


@pytest.fixture(scope="module")
def target(config, random_tree):
    return step.split(K3(config, random_tree(config)))


@pytest.fixture(scope="module")
def draft(config):
    """A random draft: nearly every token is rejected, which is the hard case for the state."""
    settings = DSparkConfig(
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        intermediate_size=64,
        num_layers=1,
        attention=DraftGqa(num_heads=2, num_kv_heads=1, head_dim=16),
        rope=Rope(theta=1e4, interleaved=False),
        norm_eps=1e-5,
        target_layer_ids=(0, 2),
        mask_token_id=62,
        block_size=3,
        markov_rank=8,
        markov_kind="vanilla",
        confidence=False,
        confidence_with_markov=False,
    )
    rng = np.random.default_rng(11)

    def fill(spec: params.ParamSpec):
        values = rng.standard_normal(spec.shape) / np.sqrt(spec.shape[-1])
        return jnp.asarray(1 + 0.1 * values if spec.init == "ones" else values, jnp.float32)

    return speculate.split_draft(DSpark(settings, params.map_tree(fill, draft_specs(settings))))


def rows_of(batch):
    table = 1 + np.arange(batch * PAGES).reshape(batch, PAGES)
    arrays = np.arange(1, batch + 1), table, np.zeros(batch), np.zeros(batch)
    return Rows(*(jnp.asarray(array, jnp.int32) for array in arrays))


def begin(config, target, draft, prompts, sampler, remaining):
    """Prefills and samples the first anchor as plain decoding does."""
    batch = len(prompts)
    ids = np.zeros((batch, 24), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    size = {"pages": batch * PAGES + 1, "page_size": PAGE, "dtype": jnp.float32}
    cache = caches.create(config, slots=batch + 1, **size)
    pools = speculate.create_pools(draft[0].config, **size)
    rows = dataclasses.replace(rows_of(batch), query_length=jnp.asarray([len(p) for p in prompts], jnp.int32))
    out = speculate.prefill(*target, *draft, cache, pools, rows, jnp.asarray(ids))
    rows = dataclasses.replace(rows.advance(), query_length=jnp.ones(batch, jnp.int32))
    zero = jnp.zeros(batch, jnp.int32)
    state = step.DecodeState(out.cache, rows, zero, zero + remaining, sampling.History.of(prompts, config.vocab_size))
    state, first = step.start(state, out.logits, sampler, jnp.full((batch, 1), NO_STOP, jnp.int32))
    return state, out.pools, first


def speculative(state, pools):
    return speculate.SpeculativeState(state.cache, pools, state.rows, state.token, state.remaining, state.history)


def run(config, target, draft, prompts, sampler, remaining, stop=NO_STOP, rule="block"):
    """Tokens of each row by speculation, and the final state."""
    state, pools, first = begin(config, target, draft, prompts, sampler, remaining)
    state = speculative(state, pools)
    said = [[int(token)] for token in first.token]
    stops = jnp.full((len(prompts), 1), stop, jnp.int32)
    for _ in range(remaining):
        if not np.any(state.rows.query_length):
            break
        state, block = speculate.speculate(*target, *draft, state, sampler, stops, rule=rule)
        for row, (tokens, count) in enumerate(zip(np.asarray(block.token), np.asarray(block.count), strict=True)):
            said[row] += tokens[:count].tolist()
    return said, state


def plain(config, target, draft, prompts, sampler, remaining):
    """Tokens of each row by one decode step per token, and the final state."""
    state, _, first = begin(config, target, draft, prompts, sampler, remaining)
    said = [[int(token)] for token in first.token]
    stops = jnp.full((len(prompts), 1), NO_STOP, jnp.int32)
    for _ in range(remaining - 1):
        state, out = step.decode(*target, state, sampler, stops)
        for row, token in enumerate(np.asarray(out.token)):
            said[row].append(int(token))
    return said, state


PROMPTS = [[5, 9, 33, 2, 7], [1], [8] * 20, [40, 41, 42]]


@pytest.mark.parametrize("rule", ["block", "standard"])
def test_greedy_equals_plain_decoding(config, target, draft, rule):
    sampler = sampling.Sampling.of(4, temperature=0.0)
    expected, end = plain(config, target, draft, PROMPTS, sampler, 60)
    actual, state = run(config, target, draft, PROMPTS, sampler, 60, rule=rule)
    assert actual == expected
    assert all(len(row) == 60 for row in actual)
    for mine, theirs in zip(state.cache.layers, end.cache.layers, strict=True):
        if isinstance(mine, KdaCache):
            np.testing.assert_allclose(mine.state[1:], theirs.state[1:], rtol=2e-3, atol=2e-4)


def test_stop_inside_a_block_ends_the_row(config, target, draft):
    sampler = sampling.Sampling.of(4, temperature=0.0)
    expected, _ = plain(config, target, draft, PROMPTS, sampler, 40)
    stop = expected[0][17]
    actual, state = run(config, target, draft, PROMPTS, sampler, 40, stop=stop)
    for row, tokens in zip(actual, expected, strict=True):
        cut = tokens.index(stop, 1) + 1 if stop in tokens[1:] else len(tokens)
        assert row == tokens[:cut]
    assert not np.any(state.rows.query_length)


@pytest.mark.parametrize("limit", range(2, 8))
def test_a_limit_inside_a_block(config, target, draft, limit):
    sampler = sampling.Sampling.of(4, temperature=0.0)
    actual, state = run(config, target, draft, PROMPTS, sampler, limit)
    assert [len(row) for row in actual] == [limit] * 4
    assert not np.any(state.remaining)


def test_rows_do_not_depend_on_each_other(config, target, draft):
    """Greedy and sampled rows mixed; permuted rows with their own seeds say the same."""
    settings = {"temperature": [0.0, 1.0, 0.7, 1.3], "top_k": [0, 20, 0, 5], "top_p": [1.0, 0.9, 1.0, 1.0]}
    seeds = [3, 1, 4, 1]
    first, _ = run(config, target, draft, PROMPTS, sampling.Sampling.of(4, seed=seeds, **settings), 24)
    order = [2, 0, 3, 1]
    permuted = {name: [values[i] for i in order] for name, values in settings.items()}
    sampler = sampling.Sampling.of(4, seed=[seeds[i] for i in order], **permuted)
    second, _ = run(config, target, draft, [PROMPTS[i] for i in order], sampler, 24)
    assert second == [first[i] for i in order]


def test_a_done_row_is_inert(config, target, draft):
    sampler = sampling.Sampling.of(4, temperature=0.0)
    state, pools, _ = begin(config, target, draft, PROMPTS, sampler, 30)
    rows = dataclasses.replace(state.rows, query_length=jnp.asarray([1, 0, 1, 1], jnp.int32))
    state = speculative(dataclasses.replace(state, rows=rows), pools)
    before = jax.tree.map(jnp.copy, state)
    stops = jnp.full((4, 1), NO_STOP, jnp.int32)
    after, block = speculate.speculate(*target, *draft, state, sampler, stops)
    assert (int(block.count[1]), int(after.rows.length[1])) == (0, int(before.rows.length[1]))
    for old, new in zip(before.cache.layers, after.cache.layers, strict=True):
        if isinstance(old, KdaCache):
            np.testing.assert_array_equal(new.state[2], old.state[2])
            np.testing.assert_array_equal(new.window[2], old.window[2])
            assert np.any(np.asarray(new.state[1]) != old.state[1])
    np.testing.assert_array_equal(after.history.count[1], before.history.count[1])


@pytest.mark.parametrize("accepted", range(5))
def test_commit_equals_that_many_decode_steps(config, target, draft, accepted):
    """The KDA state and window after a verified block of which `accepted` tokens stand."""
    sampler = sampling.Sampling.of(4, temperature=0.0)
    ids = jnp.asarray(np.random.default_rng(2).integers(0, 60, (4, 4)), jnp.int32)
    state, _, _ = begin(config, target, draft, PROMPTS, sampler, 30)
    cache, rows = jax.tree.map(jnp.copy, state.cache), state.rows
    for token in range(accepted):
        out = step.extend(*target, cache, rows, ids[:, token : token + 1])
        cache, rows = out.cache, rows.advance()

    @jax.jit
    def verify(leaves, cache, rows):
        wide = dataclasses.replace(rows, query_length=rows.query_length * 4)
        output = target[0].merge(leaves)(ids, wide, cache.speculative())
        return output.cache.commit(wide, jnp.full(4, accepted, jnp.int32))

    committed = verify(target[1], state.cache, state.rows)
    for mine, theirs in zip(committed.layers, cache.layers, strict=True):
        if isinstance(theirs, KdaCache):
            np.testing.assert_allclose(mine.state[1:], theirs.state[1:], rtol=1e-4, atol=2e-5)
            np.testing.assert_allclose(mine.window[1:], theirs.window[1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ["block", "standard"])
def test_sampled_pairs_follow_the_target(config, target, draft, rule):
    """Chi-square over the first two tokens after the anchor, at temperature with top-k and top-p."""
    batch, rounds = 128, 4
    anchor_prompt = PROMPTS[0]
    options = {"temperature": 1.4, "top_k": 3, "top_p": 0.98}
    counts = collections.Counter()
    laws = {}
    for turn in range(rounds):
        seeds = [10_000 * turn + row for row in range(batch)]
        sampler = sampling.Sampling.of(batch, seed=seeds, **options)
        state, pools, _ = begin(config, target, draft, [anchor_prompt] * batch, sampler, 30)
        state = dataclasses.replace(state, token=jnp.full(batch, 9, jnp.int32))  # one anchor for all rows
        state, stops = speculative(state, pools), jnp.full((batch, 1), NO_STOP, jnp.int32)
        said = [[] for _ in range(batch)]
        for _ in range(2):
            state, block = speculate.speculate(*target, *draft, state, sampler, stops, rule=rule)
            for row, tokens in enumerate(np.asarray(block.token)):
                said[row] += tokens[: int(block.count[row])].tolist()
        counts.update((row[0], row[1]) for row in said)

    def law(sequence):
        rows = dataclasses.replace(rows_of(1), query_length=jnp.asarray([len(sequence)], jnp.int32))
        ids = jnp.zeros((1, 24), jnp.int32).at[0, : len(sequence)].set(jnp.asarray(sequence, jnp.int32))
        logits = np.asarray(step.forward(*target, rows, ids).logits[0, len(sequence) - 1], np.float64)
        scaled = logits / options["temperature"]
        kept = np.sort(scaled)[-options["top_k"] :]
        weights = np.where(scaled >= kept[0], np.exp(scaled - kept[-1]), 0)
        weights /= weights.sum()
        order = np.argsort(-weights)
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= options["top_p"]]] = 0
        return weights / weights.sum()

    first = law([*anchor_prompt, 9])
    for token in np.flatnonzero(first):
        laws[token] = law([*anchor_prompt, 9, token])
    expected = {
        (a, b): batch * rounds * first[a] * laws[a][b]
        for a, b in itertools.product(np.flatnonzero(first), range(config.vocab_size))
        if laws[a][b] > 0
    }
    assert set(counts) <= set(expected)
    statistic = sum((counts[pair] - mass) ** 2 / mass for pair, mass in expected.items())
    freedom = len(expected) - 1
    assert freedom >= 3
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_one_program(config, target, draft):
    """Sampling settings, stops and progress are arrays: nothing recompiles."""
    before = speculate.speculate._cache_size()
    for temperature, stop in ((0.0, NO_STOP), (1.0, 7), (0.3, 9)):
        run(config, target, draft, PROMPTS, sampling.Sampling.of(4, temperature=temperature), 9, stop=stop)
    assert speculate.speculate._cache_size() <= before + 1
