"""Benchmark of acceptance by kernels: a gate against the portable form, then its time at Kimi K3's shapes."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax import sampling
from k3jax.cache import K3Cache, Rows
from k3jax.speculation import parts
from k3jax.speculation.acceptance import Rule
from k3jax.speculation.drafters import Proposal
from k3jax.speculation.state import SpeculativeState
from pallas import timing
from pallas.acceptance import mosaic
from pallas.benchmark import Check, Measurement, compiled, floor_us, measured_peer
from pallas.dispatch import Implementation, select

DRAFTS, VOCABULARY, SMALL = 7, 163840, 128
Inputs = tuple[jax.Array, Proposal, SpeculativeState, parts.Given]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def draw(size: int, temperature: float, penalty: float, seed: Any) -> Inputs:
    """Logits of the target, a proposal whose logits are close to them, and what else `parts.judge` takes."""
    keys = jax.random.split(jax.random.key(seed), 5)
    logits = 3 * jax.random.normal(keys[0], (1, DRAFTS + 1, size))
    scores = logits[:, :-1] + 0.3 * jax.random.normal(keys[1], (1, DRAFTS, size))
    scores /= temperature or 1.0
    noise = jax.random.gumbel(keys[2], scores.shape) if temperature else 0.0
    token = jnp.argmax(scores + noise, axis=-1).astype(jnp.int32)
    one = jnp.ones(1, jnp.int32)
    count = jax.random.randint(keys[3], (1, size), 0, 2, jnp.int32)
    history = sampling.History(jax.random.bernoulli(keys[4], 0.3, (1, size)), count, one)
    rows = Rows(one, one[:, None], 40 * one, one)
    state = SpeculativeState(K3Cache(()), (), rows, 0 * one, 100 * one, history)
    settings = sampling.Sampling.of(1, temperature=temperature, repetition_penalty=penalty, seed=7)
    given = parts.Given(jax.tree.map(jnp.asarray, settings), jnp.full((1, 1), -1, jnp.int32))
    return logits, Proposal(token, None, scores=scores), state, given


def program(kind: Implementation, rule: Rule) -> Callable[..., parts.Judged]:
    """`parts.judge` of requests without filters, by kernels, portable, or by whatever serves the device."""
    return _jitted(select(kind, mosaic=parts.by_kernels, xla=parts.portable), rule)


def interpreted(rule: Rule) -> Callable[..., parts.Judged]:
    """The same by the kernels without a GPU, for `SMALL` tokens."""
    cut = mosaic.Settings.of(SMALL, columns=8, groups=1)
    judge = functools.partial(mosaic.judge, interpret=plgpu.InterpretGPUParams(), settings=cut)
    return _jitted(functools.partial(parts.by_kernels, judge=judge), rule)


def _jitted(judge: Callable[..., parts.Judged], rule: Rule) -> Callable[..., parts.Judged]:
    def run(logits: jax.Array, proposal: Proposal, state: SpeculativeState, given: parts.Given) -> parts.Judged:
        limit = jnp.full(1, DRAFTS, jnp.int32)
        return judge(logits, proposal, state, given, parts.Options(rule, sampling.NO_FILTERS), limit)

    return jax.jit(run)


def gate(implementation: Implementation = None) -> list[Check]:
    """What stands and is emitted against the portable form, for both rules and several kinds of requests.

    Without a GPU and a named implementation the kernels are interpreted.
    """
    gpu = jax.default_backend() == "gpu"
    size, checks = VOCABULARY if gpu else SMALL, []
    for rule in ("block", "standard"):
        ours = program(implementation, rule) if gpu or implementation else interpreted(rule)
        runs = ours, program("xla", rule)
        for temperature, penalty in ((1.0, 1.0), (0.7, 1.2), (0.0, 1.0)):
            for seed in range(3):
                ours, other = (run(*draw(size, temperature, penalty, seed)) for run in runs)
                name = f"{rule}, temperature {temperature:g}, penalty {penalty:g}, draw {seed}"
                checks += compare(name, ours.block, other.block)
    return checks


def compare(name: str, ours: Any, other: Any) -> list[Check]:
    """Emitted tokens and their log-probabilities."""
    emitted = np.arange(DRAFTS + 1)[None] < np.asarray(other.count)[:, None]
    wrong = np.sum(emitted & (np.asarray(ours.token) != np.asarray(other.token)))
    wrong += np.sum(np.asarray(ours.count) != np.asarray(other.count))
    logprobs = (jnp.where(emitted, block.logprob, 0.0) for block in (ours, other))
    return [
        Check(f"tokens, {name}", float(wrong), 0.0),
        Check(f"logprobs, {name}", timing.relative_rms(*logprobs), 1e-5),
    ]


def measure() -> Iterator[Measurement]:
    """Times one row on the present GPU, without penalties and with them."""
    for penalty in (1.0, 1.2):
        inputs = draw(VOCABULARY, 1.0, penalty, 0)
        runs = compiled({kind or "best": (program(kind, "block"), inputs) for kind in (None, "xla")})
        times = {kind: functools.partial(_time, run, inputs) for kind, run in runs.items()}
        name = f"{DRAFTS} drafts of {VOCABULARY}" + (", penalties" if penalty > 1 else "")
        moved = 4.0 * VOCABULARY * (2 * DRAFTS + 1)
        yield Measurement(name, times["best"](), floor_us(moved), None, (measured_peer("XLA", times["xla"]),))


def _time(run: Any, inputs: Inputs) -> float:
    return timing.device_call_us(lambda _: run(*inputs), None, 1)
