"""What a request may ask for beside its tokens: on the plain engine, and on one that drafts several tokens a step."""

import random

import numpy as np
import pytest

from serving.request import RequestError, StopMatch
from serving.retention import Retention
from tests.serving.cancellations import cancel_at_random
from tests.serving.model_fixtures import build_core, prompt, request, serve


@pytest.fixture(scope="module", params=["runner", "drafting"])
def any_runner(request):
    return request.getfixturevalue(request.param)


class Listed:
    """Allows a list of sets of tokens, one after the other, and then nothing."""

    def __init__(self, sets, vocab):
        self.sets, self.vocab, self.said = sets, vocab, []

    @property
    def ended(self):
        return len(self.said) == len(self.sets)

    def mask(self):
        bits = np.zeros(-(-self.vocab // 32) * 32, bool)
        bits[list(self.sets[len(self.said)])] = True
        return np.packbits(bits, bitorder="little").view("<u4")

    def advance(self, tokens):
        self.said += tokens
        return len(tokens)


class StopsAt:
    """Finds a run of tokens, as a stop string would be."""

    def __init__(self, run):
        self.run, self.said = list(run), []

    def feed(self, tokens):
        for at, token in enumerate(tokens, 1):
            self.said.append(token)
            if self.said[-len(self.run) :] == self.run:
                return StopMatch(at, "run")
        return None


def ask(core, tokens, max_tokens=8, *, sampling=None, **fields):
    return serve(core, request(tokens, max_tokens, fields=fields, **(sampling or {})))


def logits_of(model, tokens, said):
    return model.logits([*tokens, *said[:-1]])[len(tokens) - 1 :]


def log_softmax(rows):
    shifted = rows - rows.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_a_constraint_holds_for_every_token(model, any_runner):
    """D.3 56: the mask of each token is the one after the token before, drafts or not."""
    sets = [{3 * n, 3 * n + 1, 100 + n} for n in range(7)]
    tokens = prompt(1, 13)
    served = ask(build_core(any_runner), tokens, 20, constraint=Listed(sets, model.config.vocab_size))
    (said,), (final,) = served.said, served.final
    assert final.finish_reason == "stop"
    logits = logits_of(model, tokens, said)
    expected = [max(allowed, key=lambda t, row=row: row[t]) for allowed, row in zip(sets, logits, strict=True)]
    assert said == expected


def test_constrained_and_free_rows_share_a_batch(model, any_runner, alone):
    tokens = [prompt(seed, 9 + seed) for seed in range(4)]
    sets = [set(range(60)) for _ in range(6)]
    items = [
        request(t, 9, fields={"constraint": Listed(sets, model.config.vocab_size)} if n % 2 else {})
        for n, t in enumerate(tokens)
    ]
    served = serve(build_core(any_runner), *items)
    for n, (said, given) in enumerate(zip(served.said, tokens, strict=True)):
        assert (max(said) < 60 and len(said) == 6) if n % 2 else said == alone(given, 9)


def test_constrained_sampling_is_within_the_mask(model, any_runner):
    """With temperature and a seed, 20 seeds, several at a time."""
    sets = [set(range(n, 250, 7)) for n in range(5)]
    items = [
        request(
            prompt(2, 11), 5, fields={"constraint": Listed(sets, model.config.vocab_size)}, temperature=1.0, seed=seed
        )
        for seed in range(20)
    ]
    served = serve(build_core(any_runner), *items)
    assert all(token in allowed for said in served.said for token, allowed in zip(said, sets, strict=True))
    assert len({tuple(said) for said in served.said}) > 10


def test_a_preempted_constraint_goes_on_where_it_stood(model, any_runner):
    core = build_core(any_runner, pages=12, output_reserve=0.0)
    sets = [set(range(n, 250, 3)) for n in range(20)]
    prompts = [prompt(seed, 17) for seed in (10, 11, 12)]
    items = [request(t, 20, fields={"constraint": Listed(sets, model.config.vocab_size)}) for t in prompts]
    together = serve(core, *items)
    assert core.counters.preemptions > 0
    solo = [
        ask(build_core(any_runner), t, 20, constraint=Listed(sets, model.config.vocab_size)).said[0] for t in prompts
    ]
    assert together.said == solo


@pytest.mark.parametrize("fault", ["empty", "raises", "short", "shape"])
def test_a_faulty_constraint_ends_its_own_request(model, runner, alone, fault):
    constraint = Listed([{1}, {2}, {3}], model.config.vocab_size)
    if fault == "empty":
        constraint.sets[1] = set()
    if fault == "raises":
        constraint.advance = lambda tokens: 1 // 0
    if fault == "short":
        constraint.advance = lambda tokens: 0
    if fault == "shape":
        constraint.advance = lambda tokens: constraint.__setattr__("vocab", 900) or 1
    tokens = prompt(3, 9)
    served = serve(build_core(runner), request(tokens, 8, fields={"constraint": constraint}), request(tokens, 8))
    assert [final.finish_reason for final in served.final] == ["error", "length"]
    assert served.final[0].error
    assert served.said[1] == alone(tokens, 8)


def test_a_mask_of_the_wrong_size_is_refused(model, runner):
    with pytest.raises(RequestError, match="mask has shape"):
        build_core(runner).submit(request([1], 4, fields={"constraint": Listed([{1}], 10**4)}))


def test_logit_bias(model, any_runner):
    tokens, wanted = prompt(4, 10), 77
    (said,), *_ = ask(build_core(any_runner), tokens, 4, logit_bias={wanted: 1e4})
    assert said == [wanted] * 4
    (plain,), *_ = ask(build_core(any_runner), tokens, 4)
    (without,), *_ = ask(build_core(any_runner), tokens, 4, logit_bias={plain[0]: -1e4})
    logits = logits_of(model, tokens, without).copy()
    logits[:, plain[0]] = -np.inf
    assert without == logits.argmax(-1).tolist()


def test_a_bias_ends_with_its_request(any_runner, alone):
    """The next request on the same row is free of it."""
    core, tokens = build_core(any_runner, rows=1), prompt(5, 10)
    ask(core, tokens, 4, logit_bias={7: 1e4})
    assert ask(core, tokens, 6).said == [alone(tokens, 6)]


@pytest.mark.parametrize("least", [1, 4, 7])
def test_no_stop_token_before_min_tokens(any_runner, alone, least):
    tokens = prompt(6, 12)
    plain = alone(tokens, 10)
    served = ask(build_core(any_runner), tokens, 10, stop_ids=(plain[2],), min_tokens=least)
    (said,), (final,) = served.said, served.final
    assert len(said) >= least
    assert plain[2] not in said[: least - 1]
    if final.finish_reason == "stop":
        assert final.matched == said[-1] == plain[2]


def test_ignore_eos(runner, alone):
    tokens = prompt(7, 12)
    plain = alone(tokens, 8)
    cut = ask(build_core(runner), tokens, 8, eos_ids=(plain[3],))
    assert (cut.said[0], cut.final[0].matched) == (plain[: plain.index(plain[3]) + 1], plain[3])
    assert ask(build_core(runner), tokens, 8, eos_ids=(plain[3],), ignore_eos=True).said == [plain]


@pytest.mark.parametrize("at", [1, 2, 5])
def test_stop_strings(any_runner, alone, at):
    """The host ends a request that the device does not know to have ended; the books stay right."""
    tokens = prompt(8, 12)
    plain = alone(tokens, 12)
    core = build_core(any_runner)
    served = ask(core, tokens, 12, stop_checker=StopsAt(plain[at : at + 2]))
    assert served.said == [plain[: at + 2]]
    assert (served.final[0].finish_reason, served.final[0].matched) == ("stop", "run")
    longer = [*tokens, *plain[: at + 2], 5, 6]
    assert ask(core, longer, 6).said == [alone(longer, 6)]


def test_top_logprobs(model, any_runner):
    tokens = prompt(9, 12)
    core = build_core(any_runner)
    item = request(tokens, 7, fields={"logprobs": 5})
    core.submit(item)
    outputs = core.run()[item.id]
    said = [t for output in outputs for t in output.tokens]
    top = [best for output in outputs for best in output.top_logprobs]
    expected = log_softmax(logits_of(model, tokens, said))
    for row, best in zip(expected, top, strict=True):
        order = np.argsort(-row)[:5]
        np.testing.assert_allclose(best.logprobs, row[order], atol=2e-4)
        assert set(best.tokens) == set(order.tolist())


@pytest.mark.parametrize("length", [2, 16, 41])
def test_prompt_logprobs(model, any_runner, length):
    """Over several chunks, and the same after the prompt is cached: nothing is taken from the cache."""
    tokens, core = prompt(10, length), build_core(any_runner)
    expected = log_softmax(model.logits(tokens))[:-1]
    for _ in range(2):
        item = request(tokens, 3, fields={"prompt_logprobs": 2})
        core.submit(item)
        outputs = core.run()[item.id]
        assert outputs[-1].final.cached_tokens == 0
        told = outputs[0].prompt_logprobs
        assert [output.prompt_logprobs for output in outputs[1:]] == [None] * (len(outputs) - 1)
        assert told.logprobs[0] is None
        assert told.top[0] is None
        np.testing.assert_allclose(told.logprobs[1:], expected[np.arange(length - 1), tokens[1:]], atol=2e-4)
        for best, row in zip(told.top[1:], expected, strict=True):
            np.testing.assert_allclose(best.logprobs, np.sort(row)[::-1][:2], atol=2e-4)


def test_prompt_logprobs_of_a_preempted_request(model, runner):
    core = build_core(runner, pages=12, output_reserve=0.0)
    prompts = [prompt(seed, 33) for seed in (20, 21, 22)]
    items = [request(t, 20, fields={"prompt_logprobs": 0, "priority": n}) for n, t in enumerate(prompts)]
    for item in reversed(items):
        core.submit(item)
        core.step()
    outputs = core.run()
    assert core.counters.preemptions > 0
    for item, tokens in zip(items, prompts, strict=True):
        told = next(o.prompt_logprobs for o in outputs[item.id] if o.prompt_logprobs)
        expected = log_softmax(model.logits(tokens))[np.arange(32), tokens[1:]]
        np.testing.assert_allclose(told.logprobs[1:], expected, atol=2e-4)


def test_n_answers_prefill_once(runner):
    core = build_core(runner, retention=Retention(decode_end=False))
    items = [request(prompt(11, 33), 5, temperature=1.0, seed=seed) for seed in (2**32 - 1, 0, 1)]
    served = serve(core, *items)
    assert [final.cached_tokens for final in served.final] == [0, 32, 32]
    assert len({tuple(said) for said in served.said}) > 1
    assert [serve(build_core(runner), item).said[0] for item in items] == served.said


def test_nothing_is_compiled_for_any_field(model, any_runner):
    core, tokens = build_core(any_runner), prompt(12, 20)
    ask(core, tokens)
    before = any_runner.compilations
    ask(
        core,
        tokens,
        constraint=Listed([{1}, {2}], model.config.vocab_size),
        logit_bias={3: 1.0},
        logprobs=3,
        prompt_logprobs=1,
        min_tokens=2,
        stop_checker=StopsAt([1, 2, 3]),
        stop_ids=(9,),
        sampling={"temperature": 0.7, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3},
    )
    assert any_runner.compilations == before


def test_pinned_prefixes_go_last(make_core):
    core = make_core(cache={"pages": 40, "slots": 9, "unit": 4})
    clock = core.clock

    def turn(tokens, **fields):
        core.submit(request(tokens, 2, fields=fields))
        core.run()
        clock.now += 1

    turn(range(12), session="mine", pin_seconds=1000.0)
    for n in range(20):
        turn([30 + n] * 12)
    core.submit(request([*range(12), 1, 2], 2))
    (final,) = (o.final for outputs in core.run().values() for o in outputs if o.final)
    assert final.cached_tokens >= 8
    assert core.release_session("mine") > 0
    for n in range(20, 40):
        turn([30 + n] * 12)
    core.submit(request([*range(12), 1, 2], 2))
    (final,) = (o.final for outputs in core.run().values() for o in outputs if o.final)
    assert final.cached_tokens == 0
    core.check_books()


def test_sessions_without_pins_are_forgotten(make_core):
    core = make_core(cache={"pages": 40, "slots": 9, "unit": 4})
    for n in range(30):
        core.submit(request([n] * 12, 2, fields={"session": str(n), "pin_seconds": 1.0}))
        core.run()
        core.clock.now += 2.0
    assert list(core.cache._sessions) == ["29"]
    assert core.release_session("3") == 0
    assert core.release_session("29") > 0


def test_loads(make_core):
    core = make_core()
    for n in range(5):
        core.submit(request([n] * 9, 4))
    core.step()
    loads = core.loads()
    assert (loads.running, loads.waiting, loads.waiting_tokens) == (3, 2, 18)
    assert 0 < loads.usage <= 1
    core.clock.now = 2.0
    core.run()
    assert core.loads().tokens_per_second == 10.0
    assert core.loads().running == 0


@pytest.mark.slow
def test_1000_cancellations_on_a_device(model, any_runner, alone):
    """Mixed requests end at random moments; the books are as at the start, and the next request is unharmed."""
    rng = random.Random(3)
    core = build_core(any_runner)

    def items():
        for number in range(1000):
            fields = [
                {},
                {"logprobs": 2, "prompt_logprobs": 1},
                {"logit_bias": {5: 3.0}, "min_tokens": 2, "stop_ids": (9,)},
                {"constraint": Listed([set(range(n, 250, 3)) for n in range(8)], model.config.vocab_size)},
                {"session": str(number % 3), "pin_seconds": 1e3, "stop_checker": StopsAt([number % 250])},
            ][rng.randrange(5)]
            tokens = prompt(rng.randrange(9), rng.randint(1, 40))
            yield request(tokens, 8, fields=fields, temperature=float(number % 2))

    cancel_at_random(core, items(), rng, steps=4)
    tokens = prompt(0, 20)
    assert serve(core, request(tokens, 8)).said == [alone(tokens, 8)]
    core.flush()
    core.check_books()
    assert (core.cache.pages.used, core.cache.slots.used, len(core.scheduler.waiting)) == (0, 0, 0)
    assert core.counters.finished["abort"] > 400
