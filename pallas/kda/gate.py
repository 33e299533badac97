"""What must hold before KDA is timed: the kernels against the token-by-token form, and against one another."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas import timing
from pallas.benchmark import Check
from pallas.dispatch import Implementation
from pallas.kda import api, mosaic_commit, mosaic_decode_cluster, mosaic_prefill, mosaic_verify_cluster
from pallas.kda.shapes import HEAD_DIM, HEADS, RANK_HEADS, VERIFY_TOKENS
from pallas.kda.types import KdaWeights

BOUND = 1e-2
"""Relative RMS that bfloat16 operands explain; on an H200 5e-3 is seen."""


class Call(NamedTuple):
    """Random arguments of a prefill."""

    tokens: tuple[jax.Array, jax.Array, jax.Array]
    weights: KdaWeights
    state: jax.Array
    window: jax.Array


@partial(jax.jit, static_argnums=(0, 1, 2))
def random_call(rows: int, tokens: int, heads: int, slow: bool | jax.Array, seed: int = 0) -> Call:
    """bfloat16 inputs; gates are K3's with random logits, or slow ones with g in about [-0.05, -1e-4]."""
    keys = iter(jax.random.split(jax.random.key(seed), 9))

    def normal(*shape: int, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    bf16 = jnp.bfloat16
    logits = normal(rows, tokens, heads, HEAD_DIM, dtype=bf16)
    logits = jnp.where(slow, -7.0 + logits.clip(-2.0, 2.0), logits)
    bias = jnp.where(slow, 0.0, normal(heads, HEAD_DIM))
    weights = KdaWeights(0.5 * normal(4, heads, 3, HEAD_DIM), jnp.zeros(heads), bias, 1 + 0.1 * normal(HEAD_DIM))
    qkvz, beta = normal(rows, tokens, heads, 4, HEAD_DIM, dtype=bf16), normal(rows, tokens, heads, dtype=bf16)
    state = 0.3 * normal(rows, heads, HEAD_DIM, HEAD_DIM)
    return Call((qkvz, logits, beta), weights, state, normal(rows, 3, heads, 3, HEAD_DIM, dtype=bf16))


class Ops(NamedTuple):
    """The ops under test; boundaries of a prefill come last."""

    prefill: Callable
    decode: Callable
    verify: Callable
    commit: Callable


def ops_of(implementation: Implementation) -> Ops:
    """The public ops, or where nothing is named and there is no GPU, the Mosaic kernels interpreted."""
    if implementation is None and jax.default_backend() != "gpu":
        from jax.experimental.pallas import mosaic_gpu as plgpu

        emulation, scalars = plgpu.InterpretGPUParams(), (-5.0, 1e-5)
        return Ops(
            lambda *args: mosaic_prefill.prefill(*args, *scalars, emulation),
            lambda *args: mosaic_decode_cluster.decode(*args, *scalars, emulation),
            lambda *args: mosaic_verify_cluster.verify(*args, *scalars, emulation),
            lambda *args: mosaic_commit.commit(*args, emulation),
        )
    named = {"implementation": implementation}
    return Ops(
        lambda *args: api.prefill(*args[:-1], boundaries=args[-1], **named),
        partial(api.decode, **named),
        partial(api.verify, **named),
        partial(api.commit, **named),
    )


@partial(jax.jit, static_argnums=(0, 1))
def prefill_arguments(heads: int, tokens: int, slow: bool | jax.Array) -> tuple:
    """Two ragged rows with boundaries on and off the chunks."""
    call = random_call(2, tokens, heads, slow)
    length = jnp.array([tokens, tokens - 27], jnp.int32)
    boundaries = jnp.array([[0, tokens // 2, tokens], [1, 33, tokens]], jnp.int32)
    return (*call.tokens, call.weights, call.state, call.window, length, boundaries)


class Verified(NamedTuple):
    """Arguments of a verify of three rows, one of them on the dummy slot, and how many tokens are then accepted."""

    call: Call
    pools: tuple[jax.Array, jax.Array]
    slot: jax.Array
    length: jax.Array
    accepted: jax.Array


@partial(jax.jit, static_argnums=(0, 1))
def verify_arguments(heads: int, tokens: int) -> Verified:
    """Six slots, of which rows use two."""
    call = random_call(3, tokens, heads, False)
    slot, accepted = jnp.array([4, 0, 2], jnp.int32), jnp.array([tokens, 3, (tokens + 1) // 2], jnp.int32)
    states = jnp.full((6, *call.state.shape[1:]), 0.5).at[slot].set(call.state)
    windows = jnp.zeros((6, *call.window.shape[1:]), call.window.dtype).at[slot].set(call.window)
    return Verified(call, (states, windows), slot, jnp.full(3, tokens, jnp.int32), accepted)


def prefill_checks(run: Callable, recurrent: Callable, heads: int, tokens: int) -> Iterator[Check]:
    """Prefill of ragged rows against the token-by-token form, in both gate regimes, with unaligned boundaries."""
    for slow in (False, True):
        args = prefill_arguments(heads, tokens, slow)
        actual, expected = run(*args), recurrent(*args)
        for name in ("output", "state", "boundary_states"):
            error = timing.relative_rms(getattr(actual, name), getattr(expected, name))
            yield Check(f"prefill {name}, {'slow' if slow else 'random'} gates", error, BOUND)


def recurrent(*args: Any) -> api.Prefill:
    """The token-by-token form with the boundaries last."""
    return api.recurrent(*args[:-1], boundaries=args[-1])


class Sizes(NamedTuple):
    """Heads and tokens of the prefill, the heads of the decodes, and tokens verified at once."""

    heads: int
    length: int
    decoded: tuple[int, ...]
    width: int


def sizes() -> Sizes:
    """One small head and few tokens where there is no GPU; on one, decodes of many heads and of few: other kernels."""
    if jax.default_backend() == "gpu":
        return Sizes(HEADS, 1000, (HEADS, RANK_HEADS), VERIFY_TOKENS)
    return Sizes(1, 60, (1,), 4)


def programs(implementation: Implementation) -> dict[str, tuple]:
    """What `checks` runs, to be compiled."""
    of, ops = sizes(), ops_of(implementation)
    prefilled = jax.eval_shape(prefill_arguments, of.heads, of.length, False)
    made = {"prefill": (jax.jit(ops.prefill), prefilled), "recurrent": (jax.jit(recurrent), prefilled)}
    for heads in of.decoded:
        made |= {f"{name} {heads}": program for name, program in token_programs(ops, heads, of.width).items()}
    return made


def token_programs(ops: Ops, heads: int, width: int) -> dict[str, tuple]:
    """Verify, decode, commit, and the token-by-token form that they are held against."""
    case = jax.eval_shape(verify_arguments, heads, width)
    tokens, weights, pools = case.call.tokens, case.call.weights, case.pools
    first = tuple(jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype) for x in tokens)
    fresh = jax.ShapeDtypeStruct(case.slot.shape, bool)
    records = jax.eval_shape(ops.verify, *tokens, weights, *pools, case.slot, case.length).records
    return {
        "verify": (jax.jit(ops.verify), (*tokens, weights, *pools, case.slot, case.length)),
        "decode": (jax.jit(ops.decode), (*first, weights, *pools, case.slot, fresh)),
        "commit": (jax.jit(ops.commit), (records, tokens[0], *pools, case.slot, case.accepted)),
        "short": (jax.jit(api.recurrent), (*tokens, weights, case.call.state, case.call.window, case.length)),
    }


def checks(run: dict[str, Callable]) -> list[Check]:
    """Every check, on compiled `programs`."""
    of = sizes()
    found = list(prefill_checks(run["prefill"], run["recurrent"], of.heads, of.length))
    for heads in of.decoded:
        ops = {name: run[f"{name} {heads}"] for name in ("verify", "decode", "commit", "short")}
        for check in decode_checks(ops, verify_arguments(heads, of.width)):
            found.append(check._replace(name=f"{check.name}, {heads} heads"))
    return found


def decode_checks(run: dict[str, Callable], case: Verified) -> Iterator[Check]:
    """Verify against the token-by-token form; commit and decode steps bit for bit equal."""
    call, slot = case.call, case.slot
    live = slot != 0
    arguments = (*call.tokens, call.weights)
    verified = run["verify"](*arguments, *case.pools, slot, case.length)
    start = case.pools[0][slot], case.pools[1][slot]
    expected = run["short"](*arguments, *start, jnp.where(live, case.length, 0))
    yield Check("verify output", timing.relative_rms(verified.output, expected.output), BOUND)
    committed = run["commit"](verified.records, call.tokens[0], *case.pools, slot, case.accepted)
    stepped = case.pools
    for token in range(call.tokens[0].shape[1]):
        at = (x[:, token] for x in call.tokens)
        place = jnp.where(token < case.accepted, slot, 0)
        step = run["decode"](*at, call.weights, *stepped, place, jnp.zeros(3, bool))
        stepped = step.state_pool, step.window_pool
        wanted = jnp.where((place != 0)[:, None, None], verified.output[:, token], jnp.zeros_like(step.output))
        yield Check(f"decode output, token {token}, equals verify", float(jnp.any(step.output != wanted)), 0.0)
    yield Check("commit state equals decode", float(jnp.any(committed.state_pool != stepped[0])), 0.0)
    yield Check("commit window equals decode", float(jnp.any(committed.window_pool != stepped[1])), 0.0)
    yield Check("decode state", timing.relative_rms(stepped[0][4], expected.state[0]), BOUND)
