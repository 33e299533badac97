"""KDA benchmark: device times of the kernels at Kimi K3's shapes, beside floors, goals and peers.

`python -m k3jax.bench kernels --op kda` asks for `gate()` and `measure()`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Lock
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas import timing
from pallas.benchmark import Check, Measurement, Peer, compiling, floor_us, measured_peer
from pallas.dispatch import Implementation
from pallas.kda import api, peers
from pallas.kda import gate as gate_module
from pallas.kda.gate import Call, random_call
from pallas.kda.shapes import HEAD_DIM, HEADS, LAYERS, PREFILL_TOKENS, RANK_HEADS, VERIFY_TOKENS
from pallas.kda.types import KdaWeights, Pools, Prefill

__all__ = ["gate", "measure"]

BEYOND_CACHE = 110e6
"""Bytes of state that a chain of calls walks over: twice what the L2 cache holds."""
TUNING_SECONDS = 75.0
"""How long the table waits for fla's tuning once our gate's programs are compiled."""
COMMITS = 16
"""Commits of a program."""
FLA = "fla-core, recurrence and gate alone"
JLA = "jax-linear-attention, no conv, gate or norm"


class Line(NamedTuple):
    """A line of the table: a program of `calls` chained calls from carry to carry, and what to hold it against.

    `arguments(slow)` are those of `program`, the carry first; `fla` names the peer's call.
    """

    name: str
    program: Any
    arguments: Callable[[bool], tuple]
    calls: int
    moved: float
    goal: float | None
    fla: tuple[str, int, int, int] | None = None
    jla: tuple[int, int] | None = None
    published: Peer | None = None
    regimes: tuple[bool, ...] = (False, True)


def state_bytes(rows: int, heads: int) -> float:
    """Bytes of the states of `rows` sequences in one layer."""
    return 4.0 * rows * heads * HEAD_DIM * HEAD_DIM


def pools_of(call: Call, slots: int) -> tuple[jax.Array, jax.Array]:
    """Zero pools with the shapes of the call's state and window."""
    return jnp.zeros((slots, *call.state.shape[1:])), jnp.zeros((slots, *call.window.shape[1:]), call.window.dtype)


def slot_count(rows: int, heads: int) -> int:
    """How many disjoint sets of slots a chain of calls walks over."""
    return max(2, round(BEYOND_CACHE / state_bytes(rows, heads)))


def decode_line(rows: int, heads: int, goal: float, published: Peer) -> Line:
    """One token a row; every call reads and writes other slots."""
    turns = slot_count(rows, heads)
    calls = max(turns, 8)

    def chain(pools: tuple[jax.Array, jax.Array], tokens: tuple, weights: KdaWeights) -> tuple[jax.Array, jax.Array]:
        for index in range(calls):
            slot = 1 + (index % turns) * rows + jnp.arange(rows, dtype=jnp.int32)
            result = api.decode(*tokens, weights, *pools, slot, jnp.zeros(rows, bool))
            pools = result.state_pool, result.window_pool
        return pools

    def arguments(slow: bool) -> tuple:
        call = random_call(rows, 1, heads, slow)
        return pools_of(call, turns * rows + 1), tuple(x[:, 0] for x in call.tokens), call.weights

    return Line(
        f"decode bs {rows}, {heads} heads",
        jax.jit(chain, donate_argnums=0),
        arguments,
        calls,
        2 * state_bytes(rows, heads),
        goal,
        ("recurrent", rows, 1, heads),
        published=published,
    )


def verify_line(heads: int, goal: float | None, published: Peer) -> Line:
    """Eight tokens of one row; every call reads another slot."""
    calls = slot_count(1, heads)
    length = jnp.full(1, VERIFY_TOKENS, jnp.int32)

    def chain(output: jax.Array, call: Call, pools: tuple[jax.Array, jax.Array]) -> jax.Array:
        qkvz, _, beta = call.tokens
        for index in range(calls):
            # A call's outputs are the next one's gate logits, so calls cannot overlap.
            slot = jnp.full(1, index + 1, jnp.int32)
            output = api.verify(qkvz, output, beta, call.weights, *pools, slot, length).output
        return output

    def arguments(slow: bool) -> tuple:
        call = random_call(1, VERIFY_TOKENS, heads, slow)
        return jnp.copy(call.tokens[1]), call, pools_of(call, calls + 1)

    name, fla = f"verify {VERIFY_TOKENS} tokens, {heads} heads", ("recurrent", 1, VERIFY_TOKENS, heads)
    return Line(name, jax.jit(chain), arguments, calls, state_bytes(1, heads), goal, fla, published=published)


def commit_line(heads: int, layers: int, goal: float | None, published: Peer) -> Line:
    """Eight accepted tokens of one row in every layer, each with its own pools; then again in other slots."""
    turns = max(2, round(BEYOND_CACHE / layers / state_bytes(1, heads)))
    length = jnp.full(1, VERIFY_TOKENS, jnp.int32)

    def chain(pools: list[Pools], records: list[tuple]) -> list[Pools]:
        for index in range(COMMITS):
            slot = jnp.full(1, 1 + index % turns, jnp.int32)
            pools = api.commit_layers(*zip(*records), pools, slot, length)
        return pools

    def arguments(slow: bool) -> tuple:
        call = random_call(1, VERIFY_TOKENS, heads, slow)
        pools = pools_of(call, 2)
        verified = api.verify(*call.tokens, call.weights, *pools, jnp.ones(1, jnp.int32), length)
        own = lambda x: jnp.copy(x)  # noqa: E731
        records = [jax.tree.map(own, (verified.records, call.tokens[0])) for _ in range(layers)]
        return [Pools(*pools_of(call, turns + 1)) for _ in range(layers)], records

    where = "one layer" if layers == 1 else f"{layers} layers"
    return Line(
        f"commit {VERIFY_TOKENS} tokens, {heads} heads, {where}",
        jax.jit(chain, donate_argnums=0),
        arguments,
        COMMITS,
        2 * layers * state_bytes(1, heads),
        goal,
        published=published,
        regimes=(False,),
    )


def prefill_line(heads: int, goal: float, published: Peer) -> Line:
    """One row, convolution, gates, norm and output gate included. One call a program: several in one overlap.

    Its bytes are q, k, v, z, decay logits and output in bfloat16.
    """

    def run(state: jax.Array, call: Call, length: jax.Array) -> Prefill:
        return api.prefill(*call.tokens, call.weights, state, call.window, length)

    def arguments(slow: bool) -> tuple:
        call = random_call(1, PREFILL_TOKENS, heads, slow)
        return call.state, call, jnp.full(1, PREFILL_TOKENS, jnp.int32)

    return Line(
        f"prefill {PREFILL_TOKENS}, {heads} heads",
        jax.jit(run),
        arguments,
        1,
        2.0 * 6 * PREFILL_TOKENS * heads * HEAD_DIM,
        goal,
        ("chunk", 1, PREFILL_TOKENS, heads),
        (heads, PREFILL_TOKENS),
        published,
    )


def lines() -> list[Line]:
    """The rows of the table."""
    vllm = "published: vLLM fused, H200"
    return [
        decode_line(1, HEADS, 5.5, Peer(vllm, 7.3)),
        decode_line(64, HEADS, 205.0, Peer(vllm, 226.0)),
        decode_line(1, RANK_HEADS, 4.0, Peer(vllm, 7.2)),
        verify_line(HEADS, 10.0, Peer("published: vLLM 18.6 + conv 4.3, H200", 22.9)),
        verify_line(RANK_HEADS, None, Peer("published: vLLM 7.7 + conv 4.1, H200", 11.8)),
        commit_line(HEADS, 1, None, Peer("none published", None)),
        commit_line(RANK_HEADS, LAYERS, 38.0, Peer("published: TokenSpeed", 38.0)),
        prefill_line(HEADS, 700.0, Peer("published: vLLM 890 + conv 466, H200", 1356.0)),
        prefill_line(RANK_HEADS, 200.0, Peer("published: FlashKDA 596 + conv 72, H200", 668.0)),
    ]


class OneByOne(NamedTuple):
    """A jitted function that is lowered alone: in two threads at a time the peer's refuses one of its calls."""

    run: Any
    lock: Lock

    def lower(self, *arguments: Any) -> Any:
        """As `run.lower`."""
        with self.lock:
            return self.run.lower(*arguments)


def jla_programs(table: list[Line]) -> dict[str, tuple[Any, tuple]]:
    """The peer's prefills to compile beside ours; none where it is not installed."""
    programs, lock = {}, Lock()
    for line in table:
        if line.jla is not None:
            try:
                run, arguments = peers.jla_prefill(*line.jla, False)
            except ImportError:
                return {}
            programs[f"jla {line.name}"] = OneByOne(run, lock), jax.tree.map(jax.typeof, arguments)
    return programs


def jla_us(run: Future[Callable] | None, heads: int, tokens: int, slow: bool) -> float:
    """Time of the peer's compiled prefill."""
    _, (*inputs, state) = peers.jla_prefill(heads, tokens, slow)
    assert run is not None  # importable, so it was compiled with ours
    ready = run.result()
    return timing.device_call_us(lambda state: ready(*inputs, state), state, 1)


def own_us(line: Line, run: Callable, slow: bool) -> float:
    """Time of one of our calls."""
    carry, *rest = line.arguments(slow)

    def step(carry: Any) -> Any:
        after = run(carry, *rest)
        return after.state if isinstance(after, Prefill) else after

    # By the device's clock: from one program to the next the host takes 50 to 400 us; a model's step is one program.
    return timing.device_call_us(step, carry, line.calls)


def rivals(line: Line, slow: bool, ready: dict[str, Future[Callable]], fla: peers.Fla) -> Iterator[Peer]:
    """What the line is held against: measured peers first, then the published figure."""
    if line.jla is not None:
        heads, tokens = line.jla
        yield measured_peer(JLA, lambda: jla_us(ready.get(f"jla {line.name}"), heads, tokens, slow))
    if line.fla is not None:
        call = (*line.fla, slow)
        yield measured_peer(FLA, lambda: fla.time(call))
    if line.published is not None:
        yield line.published


class Prepared(NamedTuple):
    """Programs of the gate, and of the table in its order; fla's children, which tune while those are compiled."""

    gate: dict[str, Future[Callable]]
    table: dict[str, Future[Callable]]
    fla: peers.Fla


@functools.cache
def prepared(implementation: Implementation) -> Prepared:
    """What gate and table run, taken up once and in this order: compiling takes far longer than all measuring."""
    gated = gate_module.programs(implementation)
    if jax.default_backend() != "gpu":
        return Prepared(compiling(gated), {}, peers.Fla([]))
    table = lines()
    fla = peers.Fla(fla_calls(table))
    ours = {line.name: (line.program, jax.eval_shape(line.arguments, False)) for line in table}
    started = compiling({**gated, **ours, **jla_programs(table)})
    return Prepared({name: started.pop(name) for name in gated}, started, fla)


def fla_calls(table: list[Line]) -> list[tuple]:
    """The calls of fla that the lines are held against."""
    return [(*line.fla, slow) for line in table if line.fla is not None for slow in line.regimes]


def gate(implementation: Implementation = None) -> list[Check]:
    """The correctness checks that must hold before anything is timed."""
    return gate_module.checks({name: run.result() for name, run in prepared(implementation).gate.items()})


def measure() -> Iterator[Measurement]:
    """Times every line on the present GPU, one by one, each as soon as its program is ready."""
    _, ready, fla = prepared(None)
    with contextlib.closing(fla):
        fla.wait(TUNING_SECONDS)
        for line in lines():
            yield from measured(line, ready, fla)


def measured(line: Line, ready: dict[str, Future[Callable]], fla: peers.Fla) -> Iterator[Measurement]:
    """The line in each of its gate regimes."""
    run = ready[line.name].result()
    for slow in line.regimes:
        gates = "" if len(line.regimes) == 1 else f", {'slow' if slow else 'random'} gates"
        time = own_us(line, run, slow)
        against = tuple(rivals(line, slow, ready, fla))
        yield Measurement(line.name + gates, time, floor_us(line.moved), line.goal, against)
