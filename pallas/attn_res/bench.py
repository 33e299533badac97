"""AttnRes benchmark: whole reads (add, mix, norm) at Kimi K3's width, beside floors, goals and peers.

`python -m k3jax.bench kernels --op attn_res` asks for `gate()` and `measure()`.
"""

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from pallas import timing
from pallas.attn_res import api, reference
from pallas.attn_res.shapes import HIDDEN, MOST_SOURCES, PREFILL_TOKENS, SITES
from pallas.benchmark import Check, Measurement, Peer, compiled, floor_us, measured_peer
from pallas.dispatch import Implementation
from pallas.peers import PeerProcess

__all__ = ["gate", "measure"]

EPS = 1e-5
FEW_TOKENS = 64
PHASE_ONE = f"phase one of {SITES} reads, 8 sources, 1 token"
SUMMARIES = 40
"""First phases in one program."""
FLA = "fla-core fused_attnres, without the addition"
READY_SECONDS = 40.0
"""What the peer may take longer than our own compilation."""


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
    """Calls by name: random ones, equal scores, sources of zeros and of huge norm; token counts of both kernels."""
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
    return [*results, *summary_checks(implementation)]


def summary_checks(implementation: Implementation) -> Iterator[Check]:
    """Phase one of all reads of a block for two tokens, then phase two, against reads in one phase."""
    prefix, _, sources, *_ = arguments(2, MOST_SOURCES, seed=1)
    rows = arguments(2 * SITES, 0)[0]
    norms, queries = 1 + rows[:SITES] / 8, rows[SITES:] / jnp.bfloat16(HIDDEN**0.5)
    summary = api.summarize(sources, norms, queries, eps=EPS, implementation=implementation)
    for site in (0, SITES - 1):
        actual = api.merge(summary, site, prefix, norms[site], queries[site], eps=EPS)
        expected = reference.mix(sources, prefix, norms[site], queries[site], eps=EPS)
        yield Check(f"two phases, read {site}", timing.relative_rms(actual, expected), 2**-7)


def program(line: Line) -> Any:
    """Chained reads: each takes the last one's prefix, and its normed mix for a sublayer's output."""

    def chain(carry: tuple[jax.Array, jax.Array], *rest: Any) -> tuple[jax.Array, jax.Array]:
        sources, *weights = rest
        prefix, output = carry
        for _ in range(line.calls):
            prefix, output = api.read(sources, prefix, output, *weights, eps=EPS, norm_eps=EPS)
        return prefix, output

    # Few tokens keep their addresses, or captured graphs would be updated; many would be copied to keep them.
    return jax.jit(chain, donate_argnums=(0,) if line.tokens <= FEW_TOKENS else ())


def inputs(line: Line, vectors: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a line's program, cut out of `arguments` of the largest call."""
    prefix, output, sources, *weights = vectors
    carry = tuple(jnp.copy(x[: line.tokens]) for x in (prefix, output))
    return carry, tuple(x[: line.tokens] for x in sources[: line.sources]), *weights


def lines() -> list[Line]:
    """The rows of the table."""
    speed = Peer("published: TokenSpeed, GB300", 3.67)
    return [
        # The long ones first: they bring the clocks up.
        Line(PREFILL_TOKENS, MOST_SOURCES, 6, 386.0),
        *(Line(PREFILL_TOKENS, sources, 6, None) for sources in reversed(range(MOST_SOURCES))),
        Line(1, MOST_SOURCES, 120, 3.5, (speed,)),
        Line(8, MOST_SOURCES, 120, 4.0),
        Line(FEW_TOKENS, MOST_SOURCES, 40, None),
        Line(1, 1, 120, None),
    ]


def measure() -> Iterator[Measurement]:
    """Times every line on the present GPU, one by one, once all programs are compiled."""
    table = lines()
    calls = {line: (line.sources + 1, line.tokens) for line in table if line.goal is not None}
    draw = jax.jit(partial(arguments, PREFILL_TOKENS, MOST_SOURCES))
    shapes = jax.eval_shape(draw)
    with contextlib.ExitStack() as stack:
        # A process each: the peer tunes itself for half a minute for every number of tokens.
        peers = {
            line: stack.enter_context(PeerProcess("pallas.attn_res.peers", [call])) for line, call in calls.items()
        }
        programs = {line.name: (program(line), jax.eval_shape(partial(inputs, line), shapes)) for line in table}
        programs[PHASE_ONE] = jax.jit(summaries), jax.eval_shape(summary_inputs, shapes)
        ready = compiled({"draw": (draw, ()), **programs})
        deadline = time.monotonic() + READY_SECONDS
        for child in peers.values():
            child.wait(max(0.0, deadline - time.monotonic()))
        vectors = ready["draw"]()
        times: dict[tuple[int, int], float] = {}
        for line in table:
            carry, *rest = inputs(line, vectors)
            run = ready[line.name]
            # By the device's clock: programs of few tokens are over before the host is back.
            times[line.tokens, line.sources] = measured = timing.device_call_us(
                lambda carry, run=run, rest=rest: run(carry, *rest), carry, line.calls
            )
            rivals = (measured_peer(FLA, partial(peers[line].time, calls[line])),) if line in calls else ()
            yield Measurement(line.name, measured, floor_us(line.moved), line.goal, (*rivals, *line.published))
        saved = SITES * (times[1, MOST_SOURCES] - times[1, 1])
        yield phase_one(ready[PHASE_ONE], vectors, saved)


def summaries(
    carry: jax.Array, sources: tuple[jax.Array, ...], norms: jax.Array, queries: jax.Array
) -> Float32[Array, ""]:
    """Chained first phases, with a small operation between two calls."""
    for _ in range(SUMMARIES):
        head = sources[0] + carry.astype(sources[0].dtype)
        carry = api.summarize((head, *sources[1:]), norms, queries, eps=EPS).maximum[0, 0] * 0
    return carry


def summary_inputs(vectors: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `summaries` for one token and all reads of a block."""
    sources = vectors[2]
    rows = sources[0][:SITES], sources[1][:SITES] / jnp.bfloat16(HIDDEN**0.5)
    return jnp.float32(0), tuple(x[:1] for x in sources), *rows


def phase_one(run: Any, vectors: tuple[Any, ...], saved: float) -> Measurement:
    """What a first phase for all reads of a block costs, beside what shorter reads would save at most."""
    carry, *rest = summary_inputs(vectors)
    measured = timing.device_call_us(lambda carry: run(carry, *rest), carry, SUMMARIES)
    moved = 2.0 * HIDDEN * (MOST_SOURCES + 4 * SITES)
    gain = Peer(f"what {SITES} reads of 2 vectors save against 9", saved)
    return Measurement(PHASE_ONE, measured, floor_us(moved), None, (gain,))
