"""Acceptance in three launches, interpreted, against the rules as they are written; lowered at Kimi K3's shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas import acceptance
from pallas.acceptance import mosaic

ROWS, WIDTH, VOCABULARY = 5, 4, 128
DRAFTS = WIDTH - 1
ONE, TWO = mosaic.Settings.of(VOCABULARY, columns=8, groups=1), mosaic.Settings.of(VOCABULARY, columns=8, groups=2)
"""Two blocks of one warpgroup; one of two."""
STREAMS = 1, 2
GREEDY, PENALISED, IDLE = 1, 2, 3
"""Rows of the batch that are special; the others sample freely."""


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_compilation: None) -> None:
    """For all tests of this file."""


def softmax(logits):
    mass = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return mass / mass.sum(axis=-1, keepdims=True)


def noise_of(seed, position, stream):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), stream)
    uniforms, gumbel = jax.random.uniform(key, (DRAFTS,)), jax.random.gumbel(key, (VOCABULARY,))
    return np.asarray(uniforms, np.float64), np.asarray(gumbel, np.float64)


def penalised(logits, token, prompt, count, repetition, frequency, presence):
    """Row by row, as if the drafts before it had been said."""
    rows, count = [], count.copy()
    for k, row in enumerate(logits):
        if k:
            count[token[k - 1]] += 1
        seen = prompt | (count > 0)
        row = np.where(seen, np.where(row > 0, row / repetition, row * repetition), row)
        rows.append(row - frequency * count - presence * (count > 0))
    return np.stack(rows)


def stand(rule, p, q, token, chance, limit):
    """How many drafts stand, and what the next token is drawn from."""
    ratio = np.array([p[k, x] / q[k, x] for k, x in enumerate(token)])
    mass = np.ones(limit + 1)
    for k in range(limit):
        mass[k + 1] = min(1.0, mass[k] * ratio[k])
    excess = lambda k: np.maximum(mass[k] * p[k] - q[k], 0.0)  # noqa: E731
    if rule == "standard":
        fails = [k for k in range(limit) if chance[k] >= min(1.0, ratio[k])]
        count, mass = (fails[0] if fails else limit), np.ones(limit + 1)
    else:
        count = 0
        for k in range(1, limit + 1):
            left = excess(k).sum() if k < limit else 0.0
            cut = mass[k] if k == limit else 1.0 if mass[k] == 1 else left / (left + 1 - mass[k])
            count = k if chance[k - 1] < cut else count
    return count, p[count] if count == limit else excess(count)


def definition(rule, row, target, draft, token, requests, seen):
    """What one row emits: drafts that stand, tokens, their log-probabilities, and whether it goes on."""
    logits = np.asarray(target[row], np.float64)
    token, temperature = np.asarray(token[row]), float(requests.temperature[row])
    history = np.asarray(seen.prompt[row]), np.asarray(seen.count[row])
    score = penalised(logits, token, *history, *(float(x[row]) for x in requests[1:4]))
    limit, position, seed = int(seen.limit[row]), int(seen.position[row]), int(requests.seed[row])
    if temperature == 0:
        best = score.argmax(axis=-1)
        count = next((k for k in range(limit) if best[k] != token[k]), limit)
        following = best[count]
    else:
        p, q = softmax(score / temperature), softmax(np.asarray(draft[row], np.float64))
        count, left = stand(rule, p, q, token, noise_of(seed, position, STREAMS[0])[0], limit)
        with np.errstate(divide="ignore"):
            following = np.argmax(np.log(left) + noise_of(seed, position, STREAMS[1])[1])
    emitted = [*token[:count], following][: int(seen.remaining[row])]
    stops = [k for k, x in enumerate(emitted) if x in np.asarray(requests.stop_ids[row])]
    emitted = emitted[: stops[0] + 1] if stops else emitted
    logprobs = [np.log(softmax(logits[k]))[x] for k, x in enumerate(emitted)]
    return count, emitted, logprobs, not stops and len(emitted) < int(seen.remaining[row])


def inputs_of(seed, limit=DRAFTS):
    """Drafts from logits close to the target's."""
    rng = np.random.default_rng(seed)
    f32, i32 = (functools.partial(jnp.asarray, dtype=kind) for kind in (jnp.float32, jnp.int32))
    temperature = rng.uniform(0.5, 1.5, ROWS)
    temperature[GREEDY] = 0
    target = rng.standard_normal((ROWS, WIDTH, VOCABULARY)) * 3
    draft = target[:, :DRAFTS] + rng.standard_normal((ROWS, DRAFTS, VOCABULARY)) * 0.3
    draft /= np.where(temperature > 0, temperature, 1.0)[:, None, None]
    token = (draft + rng.gumbel(size=draft.shape) * (temperature > 0)[:, None, None]).argmax(axis=-1)
    penalties = np.array([[1.0, 0.0, 0.0]] * ROWS)
    penalties[PENALISED] = 1.3, 0.2, 0.1
    stop_ids = np.full((ROWS, 2), -1)
    stop_ids[4, 1] = token[4, 1]
    running = np.ones(ROWS)
    running[IDLE] = 0
    requests = acceptance.Requests(
        f32(temperature), *map(f32, penalties.T), jnp.arange(ROWS, dtype=jnp.uint32) + seed, i32(stop_ids)
    )
    seen = acceptance.Seen(
        jnp.asarray(rng.random((ROWS, VOCABULARY)) < 0.3),
        i32(rng.integers(0, 2, (ROWS, VOCABULARY))),
        i32(40 + 7 * np.arange(ROWS)),
        i32(running),
        i32([100, 100, 100, 100, 3]),
        i32([limit] * ROWS),
    )
    return f32(target), f32(draft), i32(token), requests, seen


@functools.cache
def program(rule, cut):
    run = functools.partial(mosaic.judge, rule, streams=STREAMS, interpret=plgpu.InterpretGPUParams(), settings=cut)
    return jax.jit(run).lower(*inputs_of(0)).compile()


def check(rule, given, cut=ONE):
    """The kernels' answer, compared with the definition; how many drafts stood."""
    stands, stood = program(rule, cut)(*given), []
    for row in set(range(ROWS)) - {IDLE}:
        count, tokens, logprobs, goes_on = definition(rule, row, *given)
        assert int(stands.accepted[row]) == count
        assert int(stands.count[row]) == len(tokens)
        np.testing.assert_array_equal(stands.token[row, : len(tokens)], tokens)
        np.testing.assert_allclose(stands.logprob[row, : len(tokens)], logprobs, atol=1e-5)
        assert (bool(stands.goes_on[row]), int(stands.running[row])) == (goes_on, goes_on)
        assert int(stands.anchor[row]) == tokens[-1]
        assert int(stands.position[row]) == int(given[-1].position[row]) + len(tokens)
        assert int(stands.remaining[row]) == int(given[-1].remaining[row]) - len(tokens)
        stood.append(count)
    assert (int(stands.count[IDLE]), int(stands.accepted[IDLE]), int(stands.goes_on[IDLE])) == (0, 0, 0)
    assert bool(np.all(stands.finite))
    np.testing.assert_array_equal(stands.verified, np.where(np.arange(ROWS) == IDLE, 0, given[-1].limit))
    return stood


def test_interpreted():
    """Sampled, greedy, penalised, stopping and idle rows; rows that are not finite end: one program."""
    assert len(set(check("block", inputs_of(0)))) > 2
    target, *rest = inputs_of(0)
    for row, value in enumerate((jnp.nan, jnp.inf, -jnp.inf)):
        target = target.at[row, row, 17].set(value)
    stands = program("block", ONE)(target, *rest)
    np.testing.assert_array_equal(stands.finite, [0, 0, 0, 1, 1])
    np.testing.assert_array_equal(stands.count[:3], 1)
    np.testing.assert_array_equal(stands.goes_on[:3], 0)
    # Drafts without a distribution do not stand; what follows is the target's own.
    target, draft, token, requests, seen = inputs_of(0)
    stands = program("block", ONE)(target, draft.at[0].set(jnp.nan), token, requests, seen)
    score = np.asarray(target[0, 0], np.float64) / float(requests.temperature[0])
    gumbel = noise_of(int(requests.seed[0]), int(seen.position[0]), STREAMS[1])[1]
    assert (int(stands.accepted[0]), int(stands.token[0, 0])) == (0, np.argmax(score + gumbel))
    assert bool(stands.finite[0])


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["block", "standard"])
def test_more_draws(rule):
    """All drafts, none and some stand."""
    stood = [count for seed in range(8) for count in check(rule, inputs_of(seed), TWO)]
    assert {0, DRAFTS} < set(stood)


@pytest.mark.slow
def test_limits_end_a_block():
    for limit in range(DRAFTS):
        assert max(check("block", inputs_of(limit, limit))) == limit


@pytest.mark.slow
def test_lowers_for_cuda():
    one = lambda kind, *shape: jax.ShapeDtypeStruct(shape, kind)  # noqa: E731
    size, f32, i32 = 163840, jnp.float32, jnp.int32
    requests = acceptance.Requests(*(one(f32, 1),) * 4, one(jnp.uint32, 1), one(i32, 1, 4))
    seen = acceptance.Seen(one(jnp.bool_, 1, size), one(i32, 1, size), *(one(i32, 1),) * 4)
    run = functools.partial(mosaic.judge, "block", streams=STREAMS)
    shapes = one(f32, 1, 8, size), one(f32, 1, 7, size), one(i32, 1, 7), requests, seen
    lowered = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    for name in ("measure", "weigh", "decide"):
        assert f"acceptance_{name}" in lowered


@pytest.mark.parametrize(("size", "blocks", "told"), [(163840, 128, 128), (1280, 1, 64), (128000, 100, 128)])
def test_cut(size, blocks, told):
    cut = mosaic.Settings.of(size)
    assert (cut.blocks, cut.told) == (blocks, told)


def test_refusals_name_the_reason(monkeypatch):
    with pytest.raises(NotImplementedError, match="multiples of 1280 tokens, got 64"):
        mosaic.Settings.of(64)
    given = inputs_of(0)
    with pytest.raises(NotImplementedError, match="GPU"):
        acceptance.judge("block", *given, STREAMS)
    monkeypatch.setattr(mosaic, "require_capability", lambda *_: None)
    for shape, reason in (((1, 9, 1280), "up to 7 drafts"), ((1, 1, 1280), "7 drafts"), ((1639, 8, 163840), "2.31")):
        with pytest.raises(NotImplementedError, match=reason):
            mosaic.require_supported(shape, (shape[0], shape[1] - 1, shape[2]))
    mosaic.require_supported((1638, 8, 163840), (1638, 7, 163840))
