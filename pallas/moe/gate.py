"""What must hold before the experts' times mean anything."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas import timing
from pallas.benchmark import Check, compiled
from pallas.dispatch import Implementation
from pallas.moe import api, gate_front, mxfp4
from pallas.moe.mosaic_expand import DEPTH, ROWS
from pallas.moe.mosaic_pair import COLUMNS, TOKENS, Pairs, split
from pallas.moe.mosaic_stream import Settings, Work, stream
from pallas.moe.shapes import BETA, CHOSEN, INNER, LATENT, LINEAR_BETA
from pallas.moe.types import PackedExperts

BOUND = 6e-3
"""Relative RMS error: two roundings to bfloat16 and sums in another order make 2.4e-3."""


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def random_experts(experts: int, latent: int, inner: int, seed: int = 0) -> PackedExperts:
    """Random codes; scales around 2^-9, so that activations neither vanish nor saturate."""
    keys = iter(jax.random.split(jax.random.key(seed), 4))

    def codes(*shape: int) -> jax.Array:
        return jax.random.bits(next(keys), shape, jnp.uint8)

    def scale(*shape: int) -> jax.Array:
        return 116 + codes(*shape) % 5

    return PackedExperts(
        codes(experts, 2, inner, latent // 2),
        scale(experts, 2, inner, latent // 32),
        codes(experts, latent, inner // 2),
        scale(experts, latent, inner // 32),
    )


def random_tokens(tokens: int, experts: int, latent: int, k: int, seed: int = 1) -> tuple[jax.Array, ...]:
    """Activations, distinct random experts of each token, weights."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).astype(np.int32)
    x = jax.random.normal(jax.random.key(seed), (tokens, latent), jnp.bfloat16)
    return x, jnp.asarray(ids), jnp.asarray(rng.random((tokens, k)), jnp.float32)


@jax.jit
def definition(x: jax.Array, ids: jax.Array, weights: jax.Array, packed: PackedExperts) -> jax.Array:
    """The layer in float32 at full precision, pair by pair."""
    highest = jax.lax.Precision.HIGHEST

    def pair(x: jax.Array, index: jax.Array) -> jax.Array:
        gate_up = mxfp4.dequantize(packed.gate_up_packed[index], packed.gate_up_scale[index])
        gate, up = jnp.einsum("ifl,l->if", gate_up, x, precision=highest)
        hidden = BETA * jnp.tanh(gate / BETA) * jax.nn.sigmoid(gate) * LINEAR_BETA * jnp.tanh(up / LINEAR_BETA)
        down = mxfp4.dequantize(packed.down_packed[index], packed.down_scale[index])
        return jnp.einsum("lf,f->l", down, hidden, precision=highest)

    def token(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        x, ids, weights = inputs
        return jnp.sum(weights[:, None] * jax.lax.map(lambda index: pair(x, index), ids), axis=0)

    return jax.lax.map(token, (x.astype(jnp.float32), ids, weights))


@functools.partial(jax.jit, static_argnums=0)
def run(implementation: Implementation, *args: jax.Array | PackedExperts) -> jax.Array:
    """The experts as the model calls them."""
    return api.experts(*args, beta=BETA, linear_beta=LINEAR_BETA, implementation=implementation)


def layer_checks(implementation: Implementation, latent: int, inner: int, counts: tuple[int, ...]) -> Iterator[Check]:
    """Token counts around every switch of kernel or block, then what routing can do at worst."""
    packed = random_experts(2 * CHOSEN, latent, inner)
    calls = {(tokens, CHOSEN): random_tokens(tokens, 2 * CHOSEN, latent, CHOSEN) for tokens in counts}
    for tokens in (8, 40):
        x, ids, weights = random_tokens(tokens, 2 * CHOSEN, latent, 1)
        calls[tokens, 1] = x, jnp.full_like(ids, 5), weights
    programs: dict[Any, tuple[Any, tuple]] = {}
    for call, args in calls.items():
        programs[call, "run"] = run, (implementation, *args, packed)
        programs[call, "definition"] = definition, (*args, packed)
    done = compiled(programs)
    for (tokens, k), args in calls.items():
        actual, expected = (done[(tokens, k), what](*args, packed) for what in ("run", "definition"))
        name = f"{tokens} tokens, widths {latent} and {inner}" + (", one expert" if k == 1 else "")
        yield Check(name, timing.relative_rms(actual, expected), BOUND)
        if k == 1:
            x, ids, weights = args
            spoilt = done[(tokens, k), "run"](x.at[3].set(jnp.nan), ids, weights, packed)
            kept = jnp.delete(spoilt, 3, axis=0) == jnp.delete(actual, 3, axis=0)
            leaks = ~(kept.all() & jnp.isnan(spoilt[3]).all())
            yield Check(f"a NaN stays in its row, {tokens} tokens", float(leaks), 0.0)


def code_check() -> Check:
    """Every code with every scale 1 .. 252 through the kernel itself: products with unit vectors are exact."""
    scale = jnp.arange(4 * ROWS, dtype=jnp.int32).clip(1, mxfp4.MAX_SCALE).astype(jnp.uint8).reshape(1, 1, ROWS, 4)
    codes = jnp.arange(DEPTH // 2, dtype=jnp.int32)
    packed = (2 * codes % 16 + 16 * ((2 * codes + 1) % 16)).astype(jnp.uint8)
    packed = jnp.broadcast_to(packed, (1, 1, ROWS, DEPTH // 2))
    blocks = DEPTH // TOKENS
    number = jnp.arange(blocks, dtype=jnp.int32)
    target = TOKENS * number[:, None] + jnp.arange(TOKENS, dtype=jnp.int32)[None]
    work = Work(jnp.zeros(blocks, jnp.int32), COLUMNS * number, jnp.full(1, blocks, jnp.int32), target)
    units = split(jnp.eye(DEPTH, dtype=jnp.bfloat16), DEPTH)
    pairs = Pairs(units.rows, units.unit.reshape(blocks, TOKENS))
    out = jax.ShapeDtypeStruct((DEPTH, ROWS), jnp.float32)
    values = stream(pairs, packed, scale, work, out, lambda value: value, Settings(split=1, blocks=4), "moe_codes")
    expected = mxfp4.dequantize(packed[0, 0], scale[0, 0]).T
    return Check("every code and scale, differing values", float(jnp.sum(values != expected)), 0.0)


def gate(implementation: Implementation = None) -> list[Check]:
    """Every check; narrow layers where there is no GPU."""
    if jax.default_backend() != "gpu":
        return [*gate_front.checks(implementation, gpu=False), *layer_checks(implementation, 256, 256, (1, 40))]
    full = layer_checks(implementation, LATENT, INNER, (1, 4, 8, 17, 100, 150))
    checks = [*gate_front.checks(implementation, gpu=True), *full, *layer_checks(implementation, 512, 384, (1, 9))]
    return checks if implementation == "xla" else [*checks, code_check()]
