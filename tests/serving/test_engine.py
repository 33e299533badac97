"""The engine on a real model: the same request says the same, whatever else goes on.

Numbers such as D.1 2 refer to the log of other engines' bugs that this one must not repeat.
"""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.cache import KdaCache, MlaCache
from serving.plan import Shape
from serving.request import Request
from serving.retention import Retention
from tests.serving.model_fixtures import CHUNK, PAGES, SLOTS, WIDE, build_core, prompt, request, serve


def test_greedy_tokens_are_those_of_the_whole_sequence(model, runner):
    """Teacher forcing without any cache: each token is the argmax after all tokens before it."""
    tokens = prompt(0, 21)
    (said,), (logprobs,), _ = serve(build_core(runner), request(tokens, 8))
    logits = model.logits([*tokens, *said[:-1]])[len(tokens) - 1 :]
    assert said == logits.argmax(-1).tolist()
    shifted = logits - logits.max(-1, keepdims=True)
    expected = [row[token] - np.log(np.exp(row).sum()) for row, token in zip(shifted, said)]
    np.testing.assert_allclose(logprobs, expected, atol=2e-4)


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 33])
def test_lengths_around_the_chunk(runner, alone, length):
    """D.2 31: prompts shorter than a chunk; D.1 4: prompts of several."""
    tokens = prompt(1, length)
    assert serve(build_core(runner, shapes=(WIDE,)), request(tokens)).said == [alone(tokens)]


def test_batch_of_different_requests(runner, alone):
    """D.2 34: more requests than rows, all at once; each says what it says alone."""
    prompts = [prompt(seed, 3 + 5 * seed) for seed in range(7)]
    assert serve(build_core(runner), *map(request, prompts)).said == list(map(alone, prompts))


def test_order_of_the_rows_does_not_matter(runner, alone):
    """D.2 35."""
    prompts = [prompt(seed, 9 + seed) for seed in range(4)]
    for seed in range(3):
        shuffled = random.Random(seed).sample(prompts, 4)
        assert serve(build_core(runner), *map(request, shuffled)).said == list(map(alone, shuffled))


def test_decode_beside_prefill(runner, alone):
    """D.2 30: one request decodes while others are prefilled."""
    core = build_core(runner)
    first = request(prompt(2, 5), 12)
    core.submit(first)
    said = [token for _ in range(4) for output in core.step() for token in output.tokens]
    others = [request(prompt(seed, 30)) for seed in (3, 4)]
    for item in others:
        core.submit(item)
    outputs = core.run()
    said += [token for output in outputs[first.id] for token in output.tokens]
    assert said == alone(first.tokens, 12)
    for item in others:
        assert [token for output in outputs[item.id] for token in output.tokens] == alone(item.tokens)


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 16, 17, 23, 24, 25])
def test_repeat_hits_and_says_the_same(runner, alone, length):
    """D.1 1, 9, 10, 19, 21, 24: unit 4, page 8; repeats at and around unit and page borders."""
    core, tokens = build_core(runner, retention=Retention(decode_end=False)), prompt(5, length)
    cold, warm = serve(core, request(tokens)), serve(core, request(tokens))
    assert warm.final[0].cached_tokens == (length - 1) // 4 * 4
    assert cold.said == warm.said == [alone(tokens)]
    np.testing.assert_allclose(warm.logprobs, cold.logprobs, atol=1e-4)


def test_a_b_a(runner, alone):
    """D.1 8, 27: two conversations in turns, each turn continuing its own."""
    core = build_core(runner)
    histories = [prompt(6, 10), prompt(7, 13)]
    for turn in range(3):
        for number, history in enumerate(histories):
            served = serve(core, request(history, 5))
            assert served.said == [alone(history, 5)], (turn, number)
            assert served.final[0].cached_tokens >= (len(history) - 7 if turn else 0)
            histories[number] = [*history, *served.said[0], *prompt(turn, 3)]


def test_junction_is_reused_by_the_third(runner, alone):
    """D.1 14."""
    core, shared = build_core(runner), prompt(8, 22)
    cached = []
    for seed in range(3):
        tokens = shared + prompt(20 + seed, 9)
        served = serve(core, request(tokens))
        assert served.said == [alone(tokens)]
        cached.append(served.final[0].cached_tokens)
    assert cached == [0, 0, 20]


def test_states_inside_a_chunk(runner, alone):
    """D.1 11, 12, 17: boundaries inside a launch, at its start and at its end, of every phase against the chunk."""
    core = build_core(runner, retention=Retention.parse("interval=4"), shapes=(CHUNK,))
    tokens = prompt(9, 37)
    serve(core, request(tokens, 1))
    for length in range(5, 37, 3):
        continued = tokens[:length] + prompt(30 + length, 4)
        served = serve(core, request(continued, 3, fields={"retention": Retention.parse("")}))
        assert served.said == [alone(continued, 3)]
        assert served.final[0].cached_tokens == length // 4 * 4


def test_preempted(runner, alone):
    core = build_core(runner, pages=12, output_reserve=0.0)
    prompts = [prompt(seed, 17) for seed in (10, 11, 12)]
    served = serve(core, *(request(tokens, 20) for tokens in prompts))
    assert core.counters.preemptions > 0
    assert served.said == [alone(tokens, 20) for tokens in prompts]


def test_random_sampling_depends_on_the_request_alone(runner, alone):
    """The same seed draws the same tokens in a batch, after a hit and after preemption."""
    settings = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 7}
    tokens = prompt(13, 17)
    expected = alone(tokens, 20, **settings)
    assert expected != alone(tokens, 20, **settings | {"seed": 8})
    core = build_core(runner, pages=12, output_reserve=0.0)
    items = [request(prompt(14, 17), 20), request(tokens, 20, **settings), request(tokens, 20, **settings)]
    served = serve(core, *items)
    assert served.said[1:] == [expected, expected]
    assert core.counters.preemptions > 0


def test_penalties_know_cached_tokens(runner, alone):
    settings = {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    core, tokens = build_core(runner, pages=12, output_reserve=0.0), prompt(15, 17)
    expected = alone(tokens, 20, **settings)
    assert expected != alone(tokens, 20)
    serve(core, request(tokens, 1))
    served = serve(core, request(tokens, 20, **settings), request(prompt(16, 17), 20), request(prompt(17, 17), 20))
    assert served.said[0] == expected


def test_stop_ids(runner, alone):
    core, tokens = build_core(runner), prompt(18, 9)
    expected = alone(tokens, 12)
    stop = expected[4]
    items = [request(tokens, 12, fields={"stop_ids": (stop,)}), request(prompt(19, 12), 12)]
    served = serve(core, *items)
    assert served.said == [expected[: expected.index(stop) + 1], alone(items[1].tokens, 12)]
    assert served.final[0].finish_reason == "stop"


def poison(runner, pages, slots):
    """NaN in the given pages and slots of every layer."""

    def spoil(entry):
        if isinstance(entry, MlaCache):
            return MlaCache(entry.latent.at[jnp.asarray(pages, jnp.int32)].set(jnp.nan))
        where = jnp.asarray(slots, jnp.int32)
        return KdaCache(entry.state.at[where].set(jnp.nan), entry.window.at[where].set(jnp.nan))

    cache = dataclasses.replace(runner.state.cache, layers=tuple(map(spoil, runner.state.cache.layers)))
    runner.state = dataclasses.replace(runner.state, cache=cache)


def test_fresh_memory_is_never_read(runner, alone):
    """D.1 11, D.2 36: everything but the dummies holds NaN at the start."""
    tokens = [prompt(seed, 20) for seed in (21, 22, 23)]
    expected = [alone(t) for t in tokens]
    poison(runner, range(1, PAGES), range(1, SLOTS))
    core = build_core(runner)
    assert serve(core, *map(request, tokens)).said == expected
    assert serve(core, *map(request, tokens)).said == expected
    assert core.counters.non_finite_states == 0


def test_a_damaged_state_fails_its_reader_alone(runner, alone):
    """D.1 2, D.2 46: the reader ends with an error and no token, its neighbour goes on, the entry is gone."""
    core, tokens, other = build_core(runner), prompt(24, 20), prompt(25, 11)
    serve(core, request(tokens, 1))
    (slot,) = {node.slot for node in core.cache.tree if node.end == 16}
    poison(runner, [], [slot])
    served = serve(core, request(tokens), request(other))
    assert [final.finish_reason for final in served.final] == ["error", "length"]
    assert served.said == [[], alone(other)]
    assert core.counters.removed["non_finite"] == 1
    again = serve(core, request(tokens))
    assert (again.said, again.final[0].finish_reason) == ([alone(tokens)], "length")


def test_padding_writes_nothing(runner):
    """D.2 36: what rows in use do not own is bit-identical after a run, the dummies included."""
    core = build_core(runner)
    serve(core, request(prompt(26, 20)))
    before = jax.tree.map(np.asarray, runner.state.cache)
    pages, slots = core.cache.tree.held()
    taken = set(pages), set(slots)
    serve(core, request(prompt(27, 9)))
    new_pages, new_slots = core.cache.tree.held()
    touched_pages = set(new_pages) - taken[0] | set(core.cache.pages._free)
    touched_slots = set(new_slots) - taken[1] | set(core.cache.slots._free)
    for old, new in zip(before.layers, jax.tree.map(np.asarray, runner.state.cache).layers):
        if isinstance(old, MlaCache):
            keep = sorted(set(range(PAGES)) - touched_pages)
            np.testing.assert_array_equal(old.latent[keep], new.latent[keep])
        else:
            keep = sorted(set(range(SLOTS)) - touched_slots)
            np.testing.assert_array_equal(old.state[keep], new.state[keep])
            np.testing.assert_array_equal(old.window[keep], new.window[keep])


def test_tenants_never_meet(runner, alone):
    """D.1 20: a canary. The other tenant's prompt is the same up to its secret."""
    core, shared = build_core(runner), prompt(28, 17)
    secrets = {salt: shared + prompt(seed, 8) for salt, seed in (("a", 40), ("b", 41))}
    for _ in range(2):
        for salt, tokens in secrets.items():
            served = serve(core, request(tokens, fields={"salt": salt}))
            assert served.said == [alone(tokens)]
    probe = serve(core, request(secrets["a"], fields={"salt": "b"}))
    assert probe.final[0].cached_tokens <= 16


def test_nothing_is_compiled_after_warm_up(runner, alone):
    tokens = [prompt(seed, length) for seed, length in ((50, 3), (51, 19), (52, 33))]
    alone(tokens[0])
    core = build_core(runner, shapes=(CHUNK, WIDE), token_budget=60)
    before = runner.compilations
    for _ in range(2):
        serve(core, *map(request, tokens), request(tokens[0], 5, temperature=1.0, repetition_penalty=1.2))
    assert runner.compilations == before


def test_planned_bytes_are_those_allocated(runner):
    """D.1 18, 29."""
    core = build_core(runner)
    stats, cache = core.stats(), runner.state.cache
    latents = sum(entry.latent.nbytes for entry in cache.layers if isinstance(entry, MlaCache))
    # The costs count bytes of a bfloat16 window and 1-byte latents by default; here everything is float32.
    assert stats.pages.bytes_each * 4 * PAGES == latents
    states = sum(entry.state.nbytes for entry in cache.layers if isinstance(entry, KdaCache))
    windows = sum(entry.window.nbytes for entry in cache.layers if isinstance(entry, KdaCache))
    assert stats.slots.bytes_each * SLOTS == states + windows / 2


KINDS = (
    {},
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 6},
    {"temperature": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "seed": 7},
)
"""Sampling settings of mixed requests."""


def run_schedule(runner, alone, seed):
    """Mixed requests in random order and little memory."""
    rng = random.Random(seed)
    core = build_core(
        runner,
        pages=rng.choice([14, 20, PAGES]),
        slots=rng.choice([6, 9, SLOTS]),
        shapes=rng.choice([(CHUNK,), (WIDE,), (CHUNK, WIDE)]),
        retention=Retention.parse(rng.choice(["", "prompt", "interval=8", "prompt,marconi,decode-end"])),
        output_reserve=rng.choice([0.0, 1.0]),
    )
    stems = [prompt(60 + n, 24) for n in range(2)]
    items, said = {}, {}
    for _ in range(rng.randint(3, 8)):
        tokens = stems[rng.randrange(2)][: rng.choice([0, 8, 20, 24])] + prompt(
            70 + rng.randrange(4), rng.choice([1, 9])
        )
        fields = {"priority": rng.randrange(2), "logprobs": rng.choice([None, 0, 3])}
        item = request(tokens, rng.choice([2, 9]), fields=fields, **rng.choice(KINDS))
        core.submit(item)
        items[item.id], said[item.id] = item, []
        for _ in range(rng.randrange(6)):
            for output in core.step():
                said[output.id] += output.tokens
    for id, outputs in core.run(5000).items():
        said[id] += [token for output in outputs for token in output.tokens]
    core.check_books()
    for id, item in items.items():
        expected = alone(item.tokens, item.max_tokens, **item.sampling)
        assert said[id] == expected, f"schedule {seed}, request {id}"


def test_schedules_equal_solo_runs(runner, alone):
    for seed in range(15):
        run_schedule(runner, alone, seed)


@pytest.mark.slow
def test_500_schedules_equal_solo_runs(runner, alone):
    for seed in range(15, 525):
        run_schedule(runner, alone, seed)


def test_a_runner_refuses_one_token_shapes(model):
    from serving.prefix_cache import CacheOptions
    from serving.runner import JaxRunner, RunnerOptions

    options = RunnerOptions(rows=1, shapes=(Shape(1, 1),), captures=1, widths=(2,))
    with pytest.raises(ValueError, match="expected at least 2"):
        JaxRunner(model, CacheOptions(pages=3, slots=3, page_size=4, unit=4), options)


def test_request_repr_is_small_enough_to_log():
    assert len(repr(Request(id="a", tokens=[1], max_tokens=1))) < 300
