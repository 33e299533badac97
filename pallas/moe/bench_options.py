"""Benchmark of what the experts offer beside their default: MXFP8 activations and the Triton backend.

A module of its own, so that the table of the default kernels takes no longer.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas import timing
from pallas.benchmark import Check, Measurement, Peer, compiling, measured_peer
from pallas.dispatch import Implementation
from pallas.moe import api, bench, mxfp4
from pallas.moe import gate as gates
from pallas.moe.mxfp8 import FEWEST_TOKENS, Activations, rounded
from pallas.moe.shapes import BETA, CHOSEN, EXPERTS, INNER, LATENT, LINEAR_BETA
from pallas.moe.types import PackedExperts


class Option(NamedTuple):
    """A way of running the experts."""

    name: str
    implementation: Implementation
    activations: Activations


DEFAULT = Option("default", None, None)
OPTIONS = (
    Option("MXFP8", None, "mxfp8"),
    Option("Triton", "triton", None),
    Option("Triton, MXFP8", "triton", "mxfp8"),
)
TOKENS = (64, 1000, 8192)
QUANTISED = 5.5e-2
"""Relative RMS error that MXFP8 activations may make: 2.6e-2 a product, through SiTU of random experts 4.7e-2."""


def run(option: Option, x: jax.Array, ids: jax.Array, weights: jax.Array, packed: PackedExperts) -> jax.Array:
    """The experts as the model would call them."""
    options = {"implementation": option.implementation, "activations": option.activations}
    return api.experts(x, ids, weights, packed, beta=BETA, linear_beta=LINEAR_BETA, **options)


@jax.jit
def definition(x: jax.Array, ids: jax.Array, weights: jax.Array, packed: PackedExperts) -> jax.Array:
    """The layer in float32 with exactly quantised inputs, pair by pair; hidden numbers have the type of `x` before."""
    highest, dtype = jax.lax.Precision.HIGHEST, x.dtype

    def pair(x: jax.Array, index: jax.Array) -> jax.Array:
        gate_up = mxfp4.dequantize(packed.gate_up_packed[index], packed.gate_up_scale[index])
        gate, up = jnp.einsum("ifl,l->if", gate_up, x, precision=highest)
        hidden = BETA * jnp.tanh(gate / BETA) * jax.nn.sigmoid(gate) * LINEAR_BETA * jnp.tanh(up / LINEAR_BETA)
        down = mxfp4.dequantize(packed.down_packed[index], packed.down_scale[index])
        # Spelled out: XLA drops a conversion to bfloat16 and back, and what is rounded twice may land one step away.
        stored = jax.lax.reduce_precision(hidden, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)
        kept = rounded(stored)
        return jnp.einsum("lf,f->l", down, kept, precision=highest)

    def token(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        x, ids, weights = inputs
        return jnp.sum(weights[:, None] * jax.lax.map(lambda index: pair(x, index), ids), axis=0)

    return jax.lax.map(token, (rounded(x).astype(jnp.float32), ids, weights))


def gate(implementation: Implementation = None) -> list[Check]:
    """Every option against the definitions with quantised and with exact inputs; narrow layers without a GPU."""
    on_gpu = jax.default_backend() == "gpu"
    latent, inner = (LATENT, INNER) if on_gpu else (256, 256)
    packed = gates.random_experts(2 * CHOSEN, latent, inner)
    x, *routing = gates.random_tokens(FEWEST_TOKENS, 2 * CHOSEN, latent, CHOSEN)
    # The portable form rounds gate and up as well, so that numbers between two of the format would differ.
    args = (x if on_gpu else x.astype(jnp.float32), *routing, packed)
    exact, quantised = gates.definition(*args), definition(*args)
    checks = []
    for option in OPTIONS:
        if implementation not in (None, option.implementation) or (option.implementation == "triton" and not on_gpu):
            continue
        actual = jax.jit(partial(run, option))(*args)
        if option.activations is None:
            checks.append(Check(option.name, timing.relative_rms(actual, exact), gates.BOUND))
        else:
            error = timing.relative_rms(actual, quantised)
            checks.append(Check(f"{option.name}, against quantised inputs", error, gates.BOUND))
            error = timing.relative_rms(actual, exact)
            checks.append(Check(f"{option.name}, against exact inputs", error, QUANTISED))
    return checks


def measure() -> Iterator[Measurement]:
    """Times every option beside the default kernels."""
    packed = gates.random_experts(EXPERTS, LATENT, INNER)
    lines = {tokens: bench.Line(tokens, INNER, 1, None, Peer("none", None)) for tokens in TOKENS}
    inputs = {tokens: bench.arguments(line, packed) for tokens, line in lines.items()}
    runs = compiling(
        {
            (tokens, option): (jax.jit(partial(run, option)), _call(inputs[tokens]))
            for tokens in TOKENS
            for option in (DEFAULT, *OPTIONS)
            if option.activations is None or tokens >= FEWEST_TOKENS
        }
    )

    def time(tokens: int, option: Option) -> float:
        program, (x, *rest) = runs[tokens, option].result(), _call(inputs[tokens])
        call: Callable[[jax.Array], jax.Array] = lambda x: program(x, *rest)  # noqa: E731
        return timing.device_call_us(call, x, 1)

    for tokens in TOKENS:
        default = measured_peer("default kernels", partial(time, tokens, DEFAULT))
        floor, _ = bench.floor_us(lines[tokens], inputs[tokens])
        for option in OPTIONS:
            if (tokens, option) in runs:
                yield Measurement(f"{tokens} tokens, {option.name}", time(tokens, option), floor, None, (default,))


def _call(inputs: tuple) -> tuple:
    x, ids, *rest = inputs
    return x, ids[0], *rest
