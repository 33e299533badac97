"""The engine with a DSpark draft: greedy tokens are those of the engine without one (D.3 47 to 50, 52, 57b)."""

import dataclasses

import numpy as np
import pytest

from k3jax.speculation.drafters import Draft, NgramDrafter
from serving.runner import tokens_per_step
from tests.serving.model_fixtures import (
    CHUNK,
    build_core,
    build_runner,
    prompt,
    request,
    serve,
)


@pytest.mark.parametrize("length", [1, 15, 17, 33])
def test_alone(drafting, alone, length):
    tokens = prompt(1, length)
    assert serve(build_core(drafting), request(tokens, 9)).said == [alone(tokens, 9)]


def test_rows_of_a_batch_accept_different_numbers(drafting, alone):
    """D.3 47, 49: rows finish and enter at different steps, one step ahead of the host."""
    prompts = [prompt(seed, 3 + 5 * seed) for seed in range(7)]
    lengths = [4 + 3 * (seed % 4) for seed in range(7)]
    served = serve(build_core(drafting), *map(request, prompts, lengths))
    assert served.said == list(map(alone, prompts, lengths))


def test_repeat_and_next_turn_hit(drafting, alone):
    """D.1 8, 10: the draft's rows are on the cached pages too; A, B, A again, and longer."""
    core = build_core(drafting)
    first, other = prompt(5, 21), prompt(6, 18)
    for tokens in (first, other, first):
        served = serve(core, request(tokens, 7))
        assert served.said == [alone(tokens, 7)]
    assert served.final[0].cached_tokens == 20
    longer = [*first, *served.said[0], *prompt(7, 5)]
    again = serve(core, request(longer, 7))
    assert again.said == [alone(longer, 7)]
    assert again.final[0].cached_tokens == 21 + 7 - 1


def test_stops_inside_a_block(drafting, alone):
    tokens = prompt(8, 12)
    expected = alone(tokens, 12)
    for at in range(1, 6):
        stop = expected[at]
        served = serve(build_core(drafting), request(tokens, 12, fields={"stop_ids": (stop,)}))
        assert served.said == [expected[: expected.index(stop) + 1]]


def test_preempted(drafting, alone):
    core = build_core(drafting, pages=12, output_reserve=0.0)
    prompts = [prompt(seed, 17) for seed in (10, 11, 12)]
    served = serve(core, *(request(tokens, 20) for tokens in prompts))
    assert core.counters.preemptions > 0
    assert served.said == [alone(tokens, 20) for tokens in prompts]


def test_nothing_is_compiled_after_warm_up(drafting, alone):
    tokens = prompt(13, 20)
    alone(tokens)
    before = drafting.compilations
    serve(build_core(drafting), request(tokens), request(tokens, 5, temperature=1.0, frequency_penalty=0.5))
    assert drafting.compilations == before


def test_logprobs_come_with_their_tokens(drafting, runner):
    tokens = prompt(14, 12)
    plain, drafted = (serve(build_core(r), request(tokens, 8)) for r in (runner, drafting))
    assert plain.said == drafted.said
    np.testing.assert_allclose(drafted.logprobs, plain.logprobs, atol=2e-4)


class OtherDrafter:
    """Proposes and learns, but cannot be told of a cached prefix."""

    def propose(self, *args):
        raise AssertionError

    def extend(self, *args):
        raise AssertionError


def test_drafters(model):
    other = dataclasses.replace(model, draft=Draft(OtherDrafter(), ()))
    with pytest.raises(NotImplementedError, match="OtherDrafter is not served"):
        tokens_per_step(other)
    ngram = dataclasses.replace(model, draft=Draft(NgramDrafter(3), ()))
    assert (tokens_per_step(model), tokens_per_step(ngram)) == (1, 4)


@pytest.mark.slow
def test_prompt_lookup(model, alone):
    """Its context is the text of each row: rows of different lengths, hits, preemption and constraints beside it."""
    runner = build_runner(dataclasses.replace(model, draft=Draft(NgramDrafter(3), ())), shapes=(CHUNK,))
    core = build_core(runner)
    prompts = [prompt(0, 3), prompt(3, 18), prompt(5, 28), [7, 8, 9] * 6]
    lengths = [4, 13, 7, 10]
    for _ in range(2):
        served = serve(core, *map(request, prompts, lengths))
        assert served.said == list(map(alone, prompts, lengths))
    assert served.final[2].cached_tokens == 24
    longer = [*prompts[2], *served.said[2], *prompt(9, 6)]
    assert serve(core, request(longer, 9)).said == [alone(longer, 9)]
    tight = build_core(runner, pages=12, output_reserve=0.0)
    long = [prompt(seed, 17) for seed in (10, 11, 12)]
    assert serve(tight, *(request(tokens, 20) for tokens in long)).said == [alone(tokens, 20) for tokens in long]
    assert tight.counters.preemptions > 0
    # A row that starts from a cached prefix is told its text.
    core.submit(item := request(longer, 9))
    core.step()
    (running,) = core.scheduler.running
    assert running.cached_tokens >= 28
    assert np.asarray(runner.state.text)[running.row, : len(longer)].tolist() == longer
    core.cancel(item.id)
    core.run()
    core.check_books()
