"""KDA benchmark: a correctness gate, then device times of the kernels at Kimi K3's shapes.

The interface that `python -m k3jax.bench kernels` asks of every op folder: `gate()` and `measure()`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas import timing
from pallas.kda import api, peers
from pallas.kda.shapes import HEAD_DIM, HEADS, PREFILL_TOKENS, RANK_HEADS, VERIFY_TOKENS
from pallas.kda.types import KdaWeights, Records

BANDWIDTH = 4.3e12
"""Bytes per second of a device-to-device copy on an H200, read plus written."""
SLOTS = 33
"""Decode walks over 32 slots, several times the L2 cache with 96 heads."""


class Check(NamedTuple):
    """One comparison of the gate: relative RMS error against the bound it must keep."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error keeps the bound; a non-finite error does not."""
        return self.error <= self.bound


class Measurement(NamedTuple):
    """One line of the table, times in microseconds; a peer of None could not be run here."""

    name: str
    measured: float
    floor: float
    goal: float
    peer: float | None
    peer_name: str


class Call(NamedTuple):
    """Random arguments of a prefill."""

    tokens: tuple[jax.Array, jax.Array, jax.Array]
    weights: KdaWeights
    state: jax.Array
    window: jax.Array


def random_call(rows: int, tokens: int, heads: int, slow: bool, seed: int = 0) -> Call:
    """bfloat16 inputs; gates are K3's with random logits, or slow ones with g in about [-0.05, -1e-4]."""
    keys = iter(jax.random.split(jax.random.key(seed), 9))

    def normal(*shape: int, dtype: jnp.dtype = jnp.float32) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    bf16 = jnp.bfloat16
    logits = normal(rows, tokens, heads, HEAD_DIM, dtype=bf16)
    if slow:
        logits = -7.0 + logits.clip(-2.0, 2.0)
    bias = jnp.zeros((heads, HEAD_DIM)) if slow else normal(heads, HEAD_DIM)
    weights = KdaWeights(0.5 * normal(4, heads, 3, HEAD_DIM), jnp.zeros(heads), bias, 1 + 0.1 * normal(HEAD_DIM))
    qkvz, beta = normal(rows, tokens, heads, 4, HEAD_DIM, dtype=bf16), normal(rows, tokens, heads, dtype=bf16)
    state = 0.3 * normal(rows, heads, HEAD_DIM, HEAD_DIM)
    return Call((qkvz, logits, beta), weights, state, normal(rows, 3, heads, 3, HEAD_DIM, dtype=bf16))


def prefill_checks(implementation: api.Implementation, heads: int, tokens: int) -> Iterator[Check]:
    """Prefill of ragged rows against the token-by-token form, in both gate regimes, with unaligned boundaries."""
    for slow in (False, True):
        call = random_call(2, tokens, heads, slow)
        length = jnp.array([tokens, tokens - 27], jnp.int32)
        boundaries = jnp.array([[0, tokens // 2, tokens], [1, 33, tokens]], jnp.int32)
        args = (*call.tokens, call.weights, call.state, call.window, length)
        actual = api.prefill(*args, boundaries=boundaries, implementation=implementation)
        expected = api.recurrent(*args, boundaries=boundaries)
        for name in ("output", "state", "boundary_states"):
            error = timing.relative_rms(getattr(actual, name), getattr(expected, name))
            yield Check(f"prefill {name}, {'slow' if slow else 'random'} gates", error, 1e-2)


def decode_checks(implementation: api.Implementation, heads: int) -> Iterator[Check]:
    """Verify against the token-by-token form; commit and decode steps bit for bit equal."""
    rows, tokens = 3, VERIFY_TOKENS
    call = random_call(rows, tokens, heads, False)
    slot, accepted = jnp.array([4, 0, 2], jnp.int32), jnp.array([tokens, 3, 5], jnp.int32)
    states = jnp.full((6, *call.state.shape[1:]), 0.5).at[slot].set(call.state)
    windows = jnp.zeros((6, *call.window.shape[1:]), call.window.dtype).at[slot].set(call.window)
    length = jnp.full(rows, tokens, jnp.int32)
    verified = api.verify(*call.tokens, call.weights, states, windows, slot, length, implementation=implementation)
    expected = api.recurrent(*call.tokens, call.weights, states[slot], windows[slot], jnp.where(slot == 0, 0, length))
    yield Check("verify output", timing.relative_rms(verified.output, expected.output), 1e-2)
    committed = api.commit(
        verified.records, call.tokens[0], states, windows, slot, accepted, implementation=implementation
    )
    stepped = states, windows
    for token in range(tokens):
        at = (x[:, token] for x in call.tokens)
        live = jnp.where(token < accepted, slot, 0)
        step = api.decode(*at, call.weights, *stepped, live, jnp.zeros(rows, bool), implementation=implementation)
        stepped = step.state_pool, step.window_pool
        wanted = jnp.where((live != 0)[:, None, None], verified.output[:, token], jnp.zeros_like(step.output))
        yield Check(f"decode output, token {token}, equals verify", float(jnp.any(step.output != wanted)), 0.0)
    yield Check("commit state equals decode", float(jnp.any(committed.state_pool != stepped[0])), 0.0)
    yield Check("commit window equals decode", float(jnp.any(committed.window_pool != stepped[1])), 0.0)
    yield Check("decode state", timing.relative_rms(stepped[0][4], expected.state[0]), 1e-2)


def gate(implementation: api.Implementation = None) -> list[Check]:
    """Every check; small heads and lengths where there is no GPU."""
    gpu = jax.default_backend() == "gpu"
    heads, tokens = (HEADS, 1000) if gpu else (2, 100)
    return [*prefill_checks(implementation, heads, tokens), *decode_checks(implementation, heads)]


def decode_us(rows: int, heads: int) -> float:
    """One decode call; every call reads and writes other slots."""
    slots = max(SLOTS, 2 * rows + 1)
    call = random_call(rows, 1, heads, False)
    tokens = tuple(x[:, 0] for x in call.tokens)
    turns = max(2, (slots - 1) // rows)
    calls = max(64, 2 * turns) if rows == 1 else 4 * turns

    @partial(jax.jit, donate_argnums=0)
    def chain(pools: tuple[jax.Array, jax.Array], call: tuple) -> tuple[jax.Array, jax.Array]:
        for index in range(calls):
            slot = 1 + (index % turns) * rows + jnp.arange(rows, dtype=jnp.int32)
            result = api.decode(*call, *pools, slot, jnp.zeros(rows, bool))
            pools = result.state_pool, result.window_pool
        return pools

    return timing.median_call_us(lambda pools: chain(pools, (*tokens, call.weights)), pools_of(call, slots), calls)


def verify_us(heads: int) -> float:
    """One verify of eight tokens of one row; every call reads another slot."""
    calls = SLOTS - 1
    call = random_call(1, VERIFY_TOKENS, heads, False)
    pools = pools_of(call, SLOTS)
    length = jnp.full(1, VERIFY_TOKENS, jnp.int32)

    @jax.jit
    def chain(output: jax.Array, call: Call, pools: tuple[jax.Array, jax.Array]) -> jax.Array:
        for index in range(calls):
            # The next call's gates depend on this one's output, so calls cannot overlap.
            logits = call.tokens[1] + 0 * output
            result = api.verify(
                call.tokens[0], logits, call.tokens[2], call.weights, *pools, jnp.full(1, index + 1, jnp.int32), length
            )
            output = result.output
        return output

    return timing.median_call_us(lambda output: chain(output, call, pools), jnp.zeros_like(call.tokens[1]), calls)


def commit_us(heads: int) -> float:
    """One commit of eight tokens of one row; every call updates another slot."""
    calls = SLOTS - 1
    call = random_call(1, VERIFY_TOKENS, heads, False)
    pools = pools_of(call, SLOTS)
    length = jnp.full(1, VERIFY_TOKENS, jnp.int32)
    records = api.verify(*call.tokens, call.weights, *pools, jnp.ones(1, jnp.int32), length).records

    @partial(jax.jit, donate_argnums=0)
    def chain(pools: tuple[jax.Array, jax.Array], records: Records, qkvz: jax.Array) -> tuple[jax.Array, jax.Array]:
        for index in range(calls):
            pools = tuple(api.commit(records, qkvz, *pools, jnp.full(1, index + 1, jnp.int32), length))
        return pools

    return timing.median_call_us(lambda pools: chain(pools, records, call.tokens[0]), pools, calls)


def pools_of(call: Call, slots: int) -> tuple[jax.Array, jax.Array]:
    """Zero pools with the shapes of the call's state and window."""
    return jnp.zeros((slots, *call.state.shape[1:])), jnp.zeros((slots, *call.window.shape[1:]), call.window.dtype)


def prefill_us(heads: int, tokens: int, slow: bool) -> float:
    """One prefill of one row, the state of a call feeding the next."""
    calls = 4
    length = jnp.full(1, tokens, jnp.int32)
    call = random_call(1, tokens, heads, slow)

    def chain(state: jax.Array) -> jax.Array:
        for _ in range(calls):
            state = api.prefill(*call.tokens, call.weights, state, call.window, length).state
        return state

    return timing.median_call_us(chain, call.state, calls)


def state_bytes(rows: int, heads: int) -> float:
    """Bytes of the states of `rows` sequences in one layer."""
    return 4.0 * rows * heads * HEAD_DIM * HEAD_DIM


def prefill_bytes(tokens: int, heads: int) -> float:
    """Bytes that a prefill must move: q, k, v, z, decay logits and output in bfloat16."""
    return 2.0 * 6 * tokens * heads * HEAD_DIM


def lines() -> Iterator[tuple[str, Callable[[], float], float, float, Callable[[], float] | None, str]]:
    """The rows of the table: name, measurement, bytes, goal, peer, its name."""
    fla = lambda rows, heads: lambda: peers.fla_decode_us(rows, heads)  # noqa: E731
    for rows, heads, goal in ((1, HEADS, 5.5), (64, HEADS, 205.0), (1, RANK_HEADS, 4.0)):
        moved = 2 * state_bytes(rows, heads)
        name = "fla recurrence alone"
        yield (
            f"decode bs {rows}, {heads} heads",
            lambda r=rows, h=heads: decode_us(r, h),
            moved,
            goal,
            fla(rows, heads),
            name,
        )
    name = f"verify {VERIFY_TOKENS} tokens, {HEADS} heads"
    yield name, lambda: verify_us(HEADS), state_bytes(1, HEADS), 10.0, None, ""
    yield f"commit, {HEADS} heads", lambda: commit_us(HEADS), 2 * state_bytes(1, HEADS), 5.5, None, ""
    for heads, goal in ((HEADS, 700.0), (RANK_HEADS, 200.0)):
        for slow in (False, True):
            gates = "slow" if slow else "random"
            yield (
                f"prefill {PREFILL_TOKENS}, {heads} heads, {gates} gates",
                lambda h=heads, s=slow: prefill_us(h, PREFILL_TOKENS, s),
                prefill_bytes(PREFILL_TOKENS, heads),
                goal,
                lambda h=heads, s=slow: peers.jla_prefill_us(h, PREFILL_TOKENS, s),
                "jax-linear-attention, no conv or gate",
            )


def measure() -> Iterator[Measurement]:
    """Times every line on the present GPU, one by one."""
    for name, run, moved, goal, peer, peer_name in lines():
        yield Measurement(name, run(), moved / BANDWIDTH * 1e6, goal, peer and peers.available(peer), peer_name)
