"""AttnRes benchmark: whole reads (add, mix, norm) at Kimi K3's width, beside floors, goals and peers.

`python -m k3jax.bench kernels --op attn_res` asks for `gate()` and `measure()`.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas import timing
from pallas.attn_res import api, reference
from pallas.attn_res.shapes import HIDDEN, MOST_SOURCES, PREFILL_TOKENS
from pallas.benchmark import Check, Measurement, Peer, compiled, floor_us, measured_peer
from pallas.dispatch import Implementation
from pallas.peers import PeerProcess

__all__ = ["gate", "measure"]

EPS = 1e-5
FLA = "fla-core fused_attnres, without the addition"


class Line(NamedTuple):
    """A line of the table: reads of `sources` frozen vectors and the prefix for `tokens` tokens."""

    tokens: int
    sources: int
    calls: int
    goal: float | None
    published: tuple[Peer, ...] = ()

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"read, {self.sources + 1} vectors, {self.tokens} tokens"

    @property
    def moved(self) -> float:
        """Bytes: every vector and the sublayer's output in, new prefix and normed mix out."""
        return 2.0 * HIDDEN * self.tokens * (self.sources + 4)


def arguments(tokens: int, sources: int, seed: int = 0, dtype: jnp.dtype = jnp.bfloat16) -> tuple[Any, ...]:
    """(prefix, output, sources, norm, query, out_norm), random, with scores of about one."""
    keys = iter(jax.random.split(jax.random.key(seed), sources + 5))
    normal = lambda *shape: jax.random.normal(next(keys), shape)  # noqa: E731
    vectors = [normal(tokens, HIDDEN).astype(dtype) for _ in range(sources + 2)]
    weights = (1 + 0.1 * normal(HIDDEN), normal(HIDDEN) / HIDDEN**0.5, 1 + 0.1 * normal(HIDDEN))
    return vectors[-2], vectors[-1], tuple(vectors[:-2]), *(x.astype(dtype) for x in weights)


def expected_read(prefix: Any, output: Any, sources: Any, norm: Any, query: Any, out_norm: Any) -> api.Read:
    """The definition in float32, after the prefix has been rounded."""
    summed = prefix if output is None else prefix + output
    wide = lambda x: x.astype(jnp.float32)  # noqa: E731
    mixed = reference.mix(tuple(map(wide, sources)), wide(summed), wide(norm), wide(query), eps=EPS)
    scale = jax.lax.rsqrt(jnp.mean(mixed**2, axis=-1, keepdims=True) + EPS)
    return api.Read(summed, mixed * scale * wide(out_norm)[None])


def cases() -> dict[str, tuple[Any, ...]]:
    """Calls by name: random ones, equal scores, a source of zeros and one of huge norm; token counts of both kernels."""
    calls: dict[str, tuple[Any, ...]] = {}
    for tokens in (3, 130):
        for sources in (0, 3, MOST_SOURCES):
            calls[f"{tokens} tokens, {sources} sources"] = arguments(tokens, sources, seed=tokens + sources)
        prefix, output, frozen, norm, query, out_norm = arguments(tokens, MOST_SOURCES)
        odd = (jnp.zeros_like(prefix), *frozen[1:-1], frozen[-1] * jnp.bfloat16(1e15))
        calls[f"{tokens} tokens, odd sources"] = (prefix, None, odd, norm, query, out_norm)
        level = (prefix, output, frozen, norm, jnp.zeros_like(query), out_norm)
        calls[f"{tokens} tokens, equal scores"] = level
    return calls


def gate(implementation: Implementation = None) -> list[Check]:
    """Reads against the definition, all compiled side by side; the prefix must be equal."""

    def read(prefix: Any, output: Any, sources: Any, *weights: Any) -> api.Read:
        return api.read(sources, prefix, output, *weights, eps=EPS, norm_eps=EPS, implementation=implementation)

    calls, sides = cases(), {"ours": jax.jit(read), "expected": jax.jit(expected_read)}
    ready = compiled({f"{side} {name}": (run, call) for name, call in calls.items() for side, run in sides.items()})
    results: list[Check] = []
    for name, call in calls.items():
        actual, expected = (ready[f"{side} {name}"](*call) for side in sides)
        results.append(Check(f"{name}: prefix", float(jnp.any(actual.prefix != expected.prefix)), 0.0))
        results.append(Check(f"{name}: normed mix", timing.relative_rms(actual.normed, expected.normed), 2**-7))
    return results


def program(line: Line) -> Any:
    """Chained reads: each takes the last one's prefix, and its normed mix for a sublayer's output."""

    def chain(carry: tuple[jax.Array, jax.Array], *rest: Any) -> tuple[jax.Array, jax.Array]:
        sources, *weights = rest
        prefix, output = carry
        for _ in range(line.calls):
            prefix, output = api.read(sources, prefix, output, *weights, eps=EPS, norm_eps=EPS)
        return prefix, output

    return jax.jit(chain, donate_argnums=0)


def inputs(line: Line) -> tuple[Any, ...]:
    """The arguments of a line's program."""
    prefix, output, *rest = arguments(line.tokens, line.sources)
    return (prefix, output), *rest


def lines() -> list[Line]:
    """The rows of the table."""
    speed = Peer("published: TokenSpeed, GB300", 3.67)
    return [
        # The long ones first: they bring the clocks up.
        Line(PREFILL_TOKENS, MOST_SOURCES, 1, 386.0),
        *(Line(PREFILL_TOKENS, sources, 1, None) for sources in reversed(range(MOST_SOURCES))),
        Line(1, MOST_SOURCES, 120, 3.5, (speed,)),
        Line(8, MOST_SOURCES, 120, 4.0),
        Line(64, MOST_SOURCES, 40, None),
        Line(1, 1, 120, None),
    ]


def measure() -> Iterator[Measurement]:
    """Times every line on the present GPU, one by one, once all programs are compiled."""
    table = lines()
    calls = {line: (line.sources + 1, line.tokens) for line in table}
    with PeerProcess("pallas.attn_res.peers", list(calls.values())) as child:
        programs: dict[str, tuple[Any, tuple]] = {}
        for line in table:
            programs[line.name] = program(line), jax.eval_shape(partial(inputs, line))
            programs[f"inputs {line.name}"] = jax.jit(partial(inputs, line)), ()
        ready = compiled(programs)
        for line in table:
            carry, *rest = ready[f"inputs {line.name}"]()
            run, enqueued = ready[line.name], max(2, 12 // line.calls)
            time = timing.median_call_us(
                lambda carry, run=run, rest=rest: run(carry, *rest), carry, line.calls, enqueued=enqueued
            )
            rival = measured_peer(FLA, partial(child.time, calls[line]))
            yield Measurement(line.name, time, floor_us(line.moved), line.goal, (rival, *line.published))
