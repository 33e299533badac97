"""Whether sums in one hop are right on these very devices: asked once, before a model relies on them.

Every device draws numbers from a hash that all devices can compute, so each knows what the sum must be, bit for bit and
without asking anybody. Kernels of the check give up waiting after about a second, so a link that loses words makes a
wrong sum and not a standstill.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32, UInt32

from pallas.collectives import inboxes, mosaic
from pallas.collectives.shapes import HIDDEN, LATENT

CALLS = 32
"""Runs of a program that has each of `LINES` twice, once in each turn of the inboxes."""
POLLS = 1 << 20
"""Polls, of about a microsecond, before a kernel of the check gives up and leaves NaN."""
PATIENCE = 120.0
"""Seconds for everything that runs, the runtime's own first exchange included."""


class Unproved(NotImplementedError):
    """Sums in one hop came out wrong."""


class StuckError(RuntimeError):
    """Devices are in a state that this process cannot get out of."""


class Line(NamedTuple):
    """A trial sum: how many numbers, the terms' dtype and the sum's."""

    size: int
    kind: Any
    dtype: Any


LINES = (
    Line(LATENT, jnp.float32, jnp.bfloat16),
    Line(HIDDEN, jnp.float32, jnp.bfloat16),
    Line(16 * HIDDEN, jnp.float32, jnp.float32),
    Line(HIDDEN, jnp.bfloat16, jnp.bfloat16),
)

type Sum = Callable[[jax.Array, jax.Array, Any], jax.Array]
"""Table, terms [1, size] and dtype to the sum [1, size]."""


@functools.cache
def proved(mesh: Mesh) -> inboxes.Inboxes | NotImplementedError:
    """Inboxes of a mesh whose sums were tried and are right, or why there are none; the same answer every time.

    Raises `StuckError` where the devices cannot be used any more.
    """
    try:
        group = inboxes.connect(mesh)
        add = functools.partial(mosaic.all_reduce, devices=mesh.size, polls=POLLS, trap=False)
        check(mesh, group.table, jax.jit(add, static_argnums=2))  # jitted, so that a kernel is compiled once
    except NotImplementedError as reason:
        return reason
    return group


def check(mesh: Mesh, table: UInt32[Array, "N W"], add: Sum, *, patience: float = PATIENCE) -> None:
    """Tries `add`, which sums over the devices of a mesh of one axis.

    Raises `Unproved` for a wrong sum and `StuckError` when the devices fail or are not done after `patience` seconds.
    """
    split, whole = PartitionSpec(mesh.axis_names[0]), PartitionSpec()
    local = functools.partial(_wrong, mesh.axis_names[0], mesh.size, add)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(split, whole), out_specs=split, check_vma=False))
    seeds = [jax.device_put(np.uint32(call), NamedSharding(mesh, whole)) for call in range(CALLS)]
    program = run.lower(table, seeds[0]).compile()
    end = time.monotonic() + patience
    for call, seed in enumerate(seeds):
        wrong, missing = _outcome(program(table, seed), end, patience).T
        if wrong.any():
            devices = ", ".join(str(mesh.devices.flat[int(rank)].id) for rank in np.nonzero(wrong)[0])
            raise Unproved(
                f"{wrong.sum()} numbers of trial sums are wrong on devices {devices} "
                f"({missing.sum()} never came; call {call + 1} of {CALLS})"
            )


def _outcome(counts: jax.Array, end: float, patience: float) -> Int32[np.ndarray, "N 2"]:
    """The counts on the host, if they are there before `end`."""
    while not counts.is_ready():  # pyright: ignore[reportAttributeAccessIssue]
        if time.monotonic() > end:
            raise StuckError(f"the devices do not end their trial sums within {patience:g} s")
        time.sleep(1e-4)
    try:
        return np.asarray(counts)
    except jax.errors.JaxRuntimeError as error:
        raise StuckError(f"the devices failed at their trial sums: {error}") from error


def _wrong(axis: str, devices: int, add: Sum, table: jax.Array, seed: jax.Array) -> jax.Array:
    """How many numbers of this device's sums are wrong, and how many of these are NaN: [1, 2].

    Each sum's terms depend on the sum before, as the sums of one channel must.
    """
    rank = lax.axis_index(axis).astype(jnp.uint32)
    state = seed + lax.psum(rank, axis)  # the exchange of the runtime's that every program needs
    counts = jnp.zeros(2, jnp.int32)
    for number, line in enumerate(LINES * 2):
        state = state * jnp.uint32(2 * len(LINES)) + jnp.uint32(number)
        total = add(table, draw(state, rank, line)[None], line.dtype)[0]
        parts = (draw(state, jnp.uint32(device), line).astype(jnp.float32) for device in range(devices))
        differs = _bits(total) != _bits(functools.reduce(jnp.add, parts).astype(line.dtype))
        counts += jnp.stack([jnp.sum(differs), jnp.sum(differs & jnp.isnan(total))]).astype(jnp.int32)
        state += _bits(total)[-1].astype(jnp.uint32)
    return counts[None]


def draw(state: UInt32[Array, ""], rank: UInt32[Array, ""], line: Line) -> Float[Array, " N"]:
    """A device's terms, from -0.5 to 0.5: in bfloat16 of so few bits that no conversion rounds them."""
    word = lax.iota(jnp.uint32, line.size) + (state * jnp.uint32(8) + rank) * jnp.uint32(0x9E3779B1)
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
        word = (word ^ (word >> jnp.uint32(shift))) * jnp.uint32(factor)
    mantissa = jnp.uint32(0x7F0000 if jnp.dtype(line.kind) == jnp.bfloat16 else 0x7FFFFF)
    one_to_two = jnp.uint32(0x3F800000) | ((word >> jnp.uint32(9)) & mantissa)
    return (lax.bitcast_convert_type(one_to_two, jnp.float32) - 1.5).astype(line.kind)


def _bits(x: jax.Array) -> jax.Array:
    """The numbers as unsigned integers of their own width."""
    return lax.bitcast_convert_type(x, jnp.uint16 if x.dtype == jnp.bfloat16 else jnp.uint32)
