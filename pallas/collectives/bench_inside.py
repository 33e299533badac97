"""Benchmark of sums inside other kernels, reads of the residual stream and norms, beside kernels of their own."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas import attn_res, timing
from pallas.benchmark import Check, Measurement, compiled, measured_peer
from pallas.collectives import api, xla
from pallas.collectives.shapes import HIDDEN, LATENT
from pallas.dispatch import Implementation

CALLS = 60
"""Reads or norms of a timed program."""
SOURCES = 4
"""Frozen vectors of a read, half of what the last layer has."""
TOKENS = (1, 8)
SPLIT, WHOLE = PartitionSpec("device"), PartitionSpec()

Kind = Literal["inside", "apart", "nccl"]
"""Where the terms are summed: by the read or norm, by a kernel in front of it, by the runtime."""
PEERS: dict[Kind, str] = {"apart": "a sum in one hop in front", "nccl": "NCCL in front"}


def _site(kind: Kind, implementation: Implementation, table: jax.Array, term: jax.Array, *given: Any) -> attn_res.Read:
    """One read of the stream with this device's term of an output."""
    sources, prefix, weights = given
    if kind == "inside":
        options = {"table": table, "axis": "device", "implementation": implementation}
        return attn_res.read(sources, prefix, term, *weights, **options)
    way = "xla" if kind == "nccl" else implementation
    output = api.all_reduce(term, "device", table, dtype=prefix.dtype, implementation=way)
    return attn_res.read(sources, prefix, output, *weights, implementation=implementation)


def _program(mesh: Mesh, kind: Kind, calls: int, implementation: Implementation = None) -> Callable[..., jax.Array]:
    """So many reads, each of a term that the read before made: prefix and mix of the last, [devices, 2, T, D]."""

    def local(table: jax.Array, term: jax.Array, *given: Any) -> jax.Array:
        sources, prefix, weights = given
        # The exchange of the runtime's that every program needs.
        term = term[0] + jax.lax.psum(0 * term[0, :1, :1], "device")
        for _ in range(calls):
            prefix, normed = _site(kind, implementation, table, term, sources, prefix, weights)
            term = normed.astype(jnp.float32)
        return jnp.stack([prefix, normed])[None]

    specs = (SPLIT, SPLIT, WHOLE, WHOLE, WHOLE)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=SPLIT, check_vma=False))


def draw(mesh: Mesh, tokens: int, width: int, seed: int) -> tuple[Any, ...]:
    """Every device's term, sources, prefix and the three weights of a read."""
    keys = iter(jax.random.split(jax.random.key(seed), SOURCES + 5))

    def normal(*shape: int, kind: Any = jnp.bfloat16, place: PartitionSpec = WHOLE) -> jax.Array:
        values = jax.random.normal(next(keys), shape, jnp.float32).astype(kind)
        return jax.device_put(values, NamedSharding(mesh, place))

    term = normal(mesh.size, tokens, width, kind=jnp.float32, place=SPLIT)
    sources = tuple(normal(tokens, width) for _ in range(SOURCES))
    return term, sources, normal(tokens, width), tuple(normal(width) for _ in range(3))


def _norms(mesh: Mesh, kind: Kind, calls: int, implementation: Implementation = None) -> Callable[..., jax.Array]:
    """So many norms of sums, each of a term that the norm before made: the last, [devices, T, L]."""

    def one(table: jax.Array, term: jax.Array, weight: jax.Array) -> jax.Array:
        options = {"dtype": jnp.bfloat16, "implementation": "xla" if kind == "nccl" else implementation}
        if kind == "inside":
            return api.normed_all_reduce(term, "device", table, weight, eps=1e-5, **options)
        return xla.norm(api.all_reduce(term, "device", table, **options), weight, 1e-5)

    def local(table: jax.Array, term: jax.Array, weight: jax.Array) -> jax.Array:
        term = term[0] + jax.lax.psum(0 * term[0, :1, :1], "device")
        for _ in range(calls):
            normed = one(table, term, weight)
            term = normed.astype(jnp.float32)
        return normed[None]

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(SPLIT, SPLIT, WHOLE), out_specs=SPLIT, check_vma=False))


class Subject(NamedTuple):
    """What is measured: its programs by kind and number of calls, and what they take after the table."""

    name: str
    program: Callable[..., Callable[..., jax.Array]]
    given: tuple[Any, ...]


def subjects(mesh: Mesh, tokens: int, widths: tuple[int, int], seed: int) -> list[Subject]:
    """The read and the norm of terms of so many tokens."""
    hidden, latent = widths
    term, _, _, (weight, *_) = draw(mesh, tokens, latent, seed)
    return [
        Subject(f"read that sums {tokens} x {hidden}", _program, draw(mesh, tokens, hidden, seed)),
        Subject(f"norm of a sum of {tokens} x {latent}", _norms, (term, weight)),
    ]


def gate(mesh: Mesh, table: jax.Array, implementation: Implementation = None) -> list[Check]:
    """Reads and norms that sum against those of sums by a kernel of its own, which has a gate of its own.

    Three turns each; and how many devices have other bits than the first.
    """
    gpu, checks = jax.default_backend() == "gpu", []
    for tokens in (1, 16) if gpu else (2,):
        for subject in subjects(mesh, tokens, (HIDDEN, LATENT) if gpu else (64, 32), tokens):
            ours, theirs = (subject.program(mesh, kind, 3, implementation) for kind in ("inside", "apart"))
            actual, expected = (jnp.asarray(jax.device_get(run(table, *subject.given))) for run in (ours, theirs))
            name = f"{mesh.size} devices, {subject.name}"
            others = jnp.sum(jnp.any((actual != actual[:1]).reshape(mesh.size, -1), axis=1))
            checks += [
                Check(name, timing.relative_rms(actual, expected), 3e-3),
                Check(f"{name}: devices that differ", float(others), 0.0),
            ]
    return checks


def measure(mesh: Mesh, table: jax.Array) -> Iterator[Measurement]:
    """Times a sum inside the read or norm, a sum in front of it, and the runtime's sum in front of it."""
    kinds: tuple[Kind, ...] = ("inside", "apart", "nccl")
    chosen = {each.name: each for tokens in TOKENS for each in subjects(mesh, tokens, (HIDDEN, LATENT), 0)}
    programs: dict[Any, Any] = {
        (kind, name): (each.program(mesh, kind, CALLS), (table, *each.given))
        for name, each in chosen.items()
        for kind in kinds
    }
    runs = compiled(programs)

    def time(kind: Kind, name: str) -> float:
        def run(_: Any) -> jax.Array:
            return runs[kind, name](table, *chosen[name].given)

        return timing.median_call_us(run, None, CALLS)

    for name in chosen:
        peers = tuple(measured_peer(title, functools.partial(time, kind, name)) for kind, title in PEERS.items())
        yield Measurement(f"{mesh.size} devices, {name}", time("inside", name), 0.0, None, peers)
