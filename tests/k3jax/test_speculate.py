"""The speculative step against plain decoding of the same model."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import cache as caches
from k3jax import sampling, step
from k3jax.cache import KdaCache, Rows
from k3jax.config import K3Config
from k3jax.model import K3
from k3jax.speculation import step as speculate
from k3jax.speculation.drafters import NgramDrafter, Proposal, Step
from k3jax.speculation.state import SpeculativeState
from k3jax.speculation.widths import Widths
from tests import small_draft

PAGES, PAGE = 12, 16
NO_STOP = -1


@pytest.fixture(scope="module")
def config(tiny_config) -> K3Config:
    """KDA with a dense MLP, MLA with MoE, each of them a block of the residual stream."""
    return dataclasses.replace(
        tiny_config,
        num_layers=2,
        mla_layers=(1,),
        attn_res_block_size=1,
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
    """Confidence logits that are spread, so that every width is chosen."""
    return small_draft.build(small_draft.settings(config, taps=(0, 1), mask=62, confidence=True), spread=3)


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
    pools = draft[0].create(batch, PAGES * PAGE) if isinstance(draft[0], NgramDrafter) else draft[0].create(**size)
    rows = dataclasses.replace(rows_of(batch), query_length=jnp.asarray([len(p) for p in prompts], jnp.int32))
    out = speculate.prefill(*target, *draft, cache, pools, rows, jnp.asarray(ids))
    rows = dataclasses.replace(rows.advance(), query_length=jnp.ones(batch, jnp.int32))
    zero = jnp.zeros(batch, jnp.int32)
    state = step.DecodeState(out.cache, rows, zero, zero + remaining, sampling.History.of(prompts, config.vocab_size))
    state, first = step.start(state, out.logits, sampler, jnp.full((batch, 1), NO_STOP, jnp.int32))
    return state, out.context, first


def speculative(state, pools):
    return SpeculativeState(state.cache, pools, state.rows, state.token, state.remaining, state.history)


def run(config, target, draft, prompts, sampler, remaining, stop=NO_STOP, **options):
    """Tokens of each row by speculation, and the final state."""
    state, pools, first = begin(config, target, draft, prompts, sampler, remaining)
    state = speculative(state, pools)
    said = [[int(token)] for token in first.token]
    stops = jnp.full((len(prompts), 1), stop, jnp.int32)
    for _ in range(remaining):
        if not np.any(state.rows.query_length):
            break
        state, block = speculate.speculate(*target, *draft, state, sampler, stops, **options)
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


def same_sequence(mine, theirs):
    """Whether two states hold the same cache of the same tokens; what lies behind them does not count."""
    length = np.asarray(theirs.rows.length)
    np.testing.assert_array_equal(mine.rows.length, length)
    for ours, other in zip(mine.cache.layers, theirs.cache.layers, strict=True):
        if isinstance(ours, KdaCache):
            np.testing.assert_allclose(ours.state[1:], other.state[1:], rtol=2e-3, atol=2e-4)
            np.testing.assert_allclose(ours.window[1:], other.window[1:], rtol=1e-3, atol=1e-4)
        else:
            for row, tokens in enumerate(length):
                one, two = (rows_in(entry.latent, row)[:tokens] for entry in (ours, other))
                np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4)


def rows_in(pool, row):
    """A row's part of a paged pool, in order of position."""
    return np.asarray(pool[1 + row * PAGES : 1 + (row + 1) * PAGES]).reshape(-1, pool.shape[-1])


def test_greedy_equals_plain_decoding_for_120_tokens(config, target, draft):
    """In float32 at full precision; a random draft, so that nearly every step ends with a rejection."""
    sampler = sampling.Sampling.of(4, temperature=0.0)
    expected, end = plain(config, target, draft, PROMPTS, sampler, 120)
    actual, state = run(config, target, draft, PROMPTS, sampler, 120)
    assert actual == expected
    assert all(len(row) == 120 for row in actual)
    same_sequence(state, end)


@pytest.mark.slow
def test_greedy_equals_plain_decoding_for_600_tokens(config, target, draft, monkeypatch):
    monkeypatch.setitem(globals(), "PAGES", 40)
    sampler = sampling.Sampling.of(4, temperature=0.0)
    expected, end = plain(config, target, draft, PROMPTS, sampler, 600)
    actual, state = run(config, target, draft, PROMPTS, sampler, 600)
    assert actual == expected
    same_sequence(state, end)


@dataclasses.dataclass(frozen=True)
class Prophet:
    """Knows the text, its context; says it, or another token in each place if its leaf is not 0."""

    block_size: int

    def propose(self, leaves, context, target, anchor, rows, params, filters=None):
        at = rows.length[:, None] + 1 + jnp.arange(self.block_size, dtype=jnp.int32)[None]
        token = (jnp.take_along_axis(context, at, axis=1) + leaves[0]) % target.head.shape[0]
        return Proposal(token, jax.nn.one_hot(token, target.head.shape[0], dtype=jnp.float32))

    def extend(self, leaves, context, step, rows):
        return context


@pytest.mark.parametrize(("shift", "accepted"), [(0, 3), (1, 0)])
def test_oracle_and_adversary(config, target, draft, shift, accepted):
    """Every draft of the one stands, none of the other's; either way the cache is that of plain decoding.

    By the standard rule, in one program; all other tests here keep to the block rule.
    """
    sampler = sampling.Sampling.of(4, temperature=0.0)
    tokens = 25 if accepted else 9  # steps of 4 tokens, or of 1, after the first token
    said, end = plain(config, target, draft, PROMPTS, sampler, tokens)
    text = np.zeros((4, PAGES * PAGE), np.int32)
    for row, prompt, more in zip(text, PROMPTS, said, strict=True):
        row[: len(prompt) + len(more)] = [*prompt, *more]
    state, _, _ = begin(config, target, draft, PROMPTS, sampler, tokens)
    state = speculative(state, jnp.asarray(text))
    stops = jnp.full((4, 1), NO_STOP, jnp.int32)
    prophet = (Prophet(3), (jnp.int32(shift),))
    emitted = [[] for _ in PROMPTS]
    while np.any(state.rows.query_length):
        state, block = speculate.speculate(*target, *prophet, state, sampler, stops, rule="standard")
        np.testing.assert_array_equal(block.accepted, [accepted] * 4)
        np.testing.assert_array_equal(block.count, [accepted + 1] * 4)
        for row, new in zip(emitted, np.asarray(block.token), strict=True):
            row += new[: accepted + 1].tolist()
    assert emitted == [row[1:] for row in said]
    same_sequence(state, end)


NGRAM = (NgramDrafter(block_size=3), ())


def test_prompt_lookup_says_the_same(config, target, draft):
    """Another drafter in the same loop; on a text that repeats it is right sometimes."""
    sampler = sampling.Sampling.of(4, temperature=0.0)
    expected, _ = plain(config, target, draft, PROMPTS, sampler, 40)
    actual, _ = run(config, target, NGRAM, PROMPTS, sampler, 40)
    assert actual == expected


def test_prompt_lookup_continues_the_latest_match():
    drafter = NgramDrafter(block_size=3)
    text = jnp.full((1, 12), -1, jnp.int32).at[0, :8].set(jnp.asarray([1, 2, 7, 8, 1, 2, 9, 1]))
    lookup = jax.vmap(drafter._continue)
    np.testing.assert_array_equal(lookup(text, jnp.asarray([8]), jnp.asarray([2]))[0], [9, 1, 2])
    np.testing.assert_array_equal(lookup(text, jnp.asarray([8]), jnp.asarray([5]))[0], [5, 5, 5])
    np.testing.assert_array_equal(lookup(text, jnp.asarray([5]), jnp.asarray([2]))[0], [7, 8, 1])


def test_the_device_loop_equals_the_host_loop(config, target, draft):
    sampler = sampling.Sampling.of(4, temperature=[0.0, 0.9, 1.2, 0.0], seed=5)
    expected, _ = run(config, target, draft, PROMPTS, sampler, 20)
    state, context, first = begin(config, target, draft, PROMPTS, sampler, 20)
    stops = jnp.full((4, 1), NO_STOP, jnp.int32)
    _, written = speculate.speculate_all(*target, *draft, speculative(state, context), sampler, stops, limit=24)
    for row, tokens in enumerate(expected):
        assert [int(first.token[row]), *np.asarray(written.token[row, : written.count[row]]).tolist()] == tokens


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


def test_commit_equals_that_many_decode_steps(config, target, draft):
    """KDA states, windows, latents and draft rows after a verified block of which 0 to 4 tokens stand."""
    sampler = sampling.Sampling.of(4, temperature=0.0)
    drafter, leaves = draft
    ids = jnp.asarray(np.random.default_rng(2).integers(0, 60, (4, 4)), jnp.int32)
    start, pools, _ = begin(config, target, draft, PROMPTS, sampler, 30)
    rows = start.rows

    @jax.jit
    def verify(arrays, cache, pools, rows, count):
        wide = dataclasses.replace(rows, query_length=rows.query_length * 4)
        output = target[0].merge(arrays)(ids, wide, cache.speculative(), trace=True)
        stands = dataclasses.replace(rows, query_length=jnp.full(4, count, jnp.int32))
        return output.cache.commit(wide, stands.query_length), drafter.extend(
            leaves, pools, Step(ids, output.trace), stands
        )

    one_by_one = jax.tree.map(jnp.copy, (start.cache, pools))
    for accepted in range(5):
        cache, context = verify(target[1], start.cache, pools, start.rows, accepted)
        same_sequence(SimpleNamespace(cache=cache, rows=rows), SimpleNamespace(cache=one_by_one[0], rows=rows))
        for mine, theirs in zip(context, one_by_one[1], strict=True):
            for row, tokens in enumerate(np.asarray(rows.length)):
                np.testing.assert_allclose(
                    rows_in(mine, row)[:tokens], rows_in(theirs, row)[:tokens], rtol=1e-3, atol=1e-4
                )
        if accepted < 4:
            token = ids[:, accepted : accepted + 1]
            out = speculate.prefill(*target, *draft, *one_by_one, rows, token)
            one_by_one, rows = (out.cache, out.context), rows.advance()


def test_widths_follow_the_confidence_and_change_nothing_else(config, target, draft):
    """Greedy rows say the same; every width is taken at times; one program holds them all."""
    sampler = sampling.Sampling.of(4, temperature=0.0)
    expected, end = plain(config, target, draft, PROMPTS, sampler, 40)
    widths, before = Widths((1, 2, 4), survival=0.4), speculate.speculate._cache_size()
    state, context, first = begin(config, target, draft, PROMPTS, sampler, 40)
    state, stops = speculative(state, context), jnp.full((4, 1), NO_STOP, jnp.int32)
    said, verified = [[int(token)] for token in first.token], []
    while np.any(state.rows.query_length):
        running = np.asarray(state.rows.query_length)
        state, block = speculate.speculate(*target, *draft, state, sampler, stops, widths=widths)
        assert np.all(np.asarray(block.accepted) <= np.asarray(block.verified))
        verified += np.asarray(block.verified)[running > 0].tolist()
        for row, tokens, count in zip(said, np.asarray(block.token), np.asarray(block.count), strict=True):
            row += tokens[:count].tolist()
    assert said == expected
    assert set(verified) == {0, 1, 3}
    same_sequence(state, end)
    assert speculate.speculate._cache_size() == before + 1


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["block", "standard"])
def test_sampled_pairs_follow_the_target(config, target, draft, rule):
    """Chi-square over residues of the first two tokens after the anchor, at temperature with top-k and top-p.

    Both rules' laws are exact in `test_acceptance.py`; here it is the whole step's.
    The filters are wide, so that the random draft overlaps with the target and many drafts stand.
    """
    batch, rounds, bins = 4, 120, 4
    options = {"temperature": 2.5, "top_k": 50, "top_p": 0.97}
    prompt, anchor = PROMPTS[0], 9
    counts, accepted = np.zeros((bins, bins)), 0
    begun, context, _ = begin(config, target, draft, [prompt] * batch, sampling.Sampling.of(batch), 30)
    begun = speculative(dataclasses.replace(begun, token=jnp.full(batch, anchor, jnp.int32)), context)
    stops = jnp.full((batch, 1), NO_STOP, jnp.int32)
    for turn in range(rounds):
        seeds = [10_000 + batch * turn + row for row in range(batch)]
        sampler = sampling.Sampling.of(batch, seed=seeds, **options)
        state, said = jax.tree.map(jnp.copy, begun), [[] for _ in range(batch)]
        while min(map(len, said)) < 2:
            state, block = speculate.speculate(*target, *draft, state, sampler, stops, rule=rule)
            accepted += int(jnp.sum(block.accepted))
            for row, tokens in enumerate(np.asarray(block.token)):
                said[row] += tokens[: int(block.count[row])].tolist()
        for first, second in (row[:2] for row in said):
            counts[first % bins, second % bins] += 1

    def laws(sequences):
        """p(. | prompt, anchor, ...) of several sequences of one length."""
        ids = (
            jnp.zeros((len(sequences), 24), jnp.int32).at[:, : len(sequences[0])].set(jnp.asarray(sequences, jnp.int32))
        )
        lengths = jnp.full(len(sequences), len(sequences[0]), jnp.int32)
        rows = dataclasses.replace(rows_of(len(sequences)), query_length=lengths)
        logits = np.asarray(step.forward(*target, rows, ids).logits[:, len(sequences[0]) - 1], np.float64)
        scaled = logits / options["temperature"]
        lowest = np.sort(scaled, axis=1)[:, -options["top_k"], None]
        weights = np.where(scaled >= lowest, np.exp(scaled - scaled.max(1, keepdims=True)), 0)
        weights /= weights.sum(1, keepdims=True)
        order = np.argsort(-weights, axis=1)
        mass = np.take_along_axis(weights, order, 1)
        keep = np.take_along_axis(np.cumsum(mass, 1) - mass < options["top_p"], np.argsort(order, axis=1), 1)
        weights = np.where(keep, weights, 0)
        return weights / weights.sum(1, keepdims=True)

    vocab = config.vocab_size
    first = laws([[*prompt, anchor]])[0]
    pairs = first[:, None] * laws([[*prompt, anchor, token] for token in range(vocab)])
    expected = pairs.reshape(vocab // bins, bins, vocab // bins, bins).sum((0, 2)) * batch * rounds
    assert accepted > 0.4 * batch * rounds  # otherwise every token would come from the target alone
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = bins * bins - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_one_program(config, target, draft):
    """Sampling settings, stops and progress are arrays: nothing recompiles."""
    before = speculate.speculate._cache_size()
    for temperature, stop in ((0.0, NO_STOP), (1.0, 7), (0.3, 9)):
        run(config, target, draft, PROMPTS, sampling.Sampling.of(4, temperature=temperature), 9, stop=stop)
    assert speculate.speculate._cache_size() <= before + 1


def test_the_host_has_no_part_in_a_step(config, target, draft):
    """No callback, no feed, no loop that asks the host; the state is given back in place."""
    sampler = sampling.Sampling.of(4, temperature=1.0)
    state, context, _ = begin(config, target, draft, PROMPTS, sampler, 9)
    state, stops = speculative(state, context), jnp.full((4, 1), NO_STOP, jnp.int32)
    lowered = speculate.speculate.lower(*target, *draft, state, sampler, stops, filters=sampling.NO_FILTERS)
    text = lowered.as_text()
    for word in ("callback", "infeed", "outfeed", "stablehlo.send", "stablehlo.recv", "stablehlo.if", "stablehlo.case"):
        assert word not in text
    arrays = len(jax.tree.leaves(state))
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == arrays
    kept = jax.tree.leaves((state.cache, state.context))
    speculate.speculate(*target, *draft, state, sampler, stops)
    assert all(leaf.is_deleted() for leaf in kept)
