"""Benchmark of sums over devices: a gate, then times of one sum in a long chain, beside the runtime's.

Where only one GPU is there it plays several devices in one launch: all that the kernel does but for the way between
devices.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas import timing
from pallas.benchmark import Check, Measurement, compiled, measured_peer
from pallas.collectives import api, bench_inside, inboxes, layout, mosaic, reference
from pallas.collectives.shapes import HIDDEN, LATENT
from pallas.dispatch import Implementation

LINK = 450e9
"""Bytes per second that an H200 sends to its peers."""
CALLS = 60
"""Sums of a timed program."""
GOAL = 6.0
"""Microseconds for one token: launch, and once over the link."""
SPLIT = PartitionSpec("device")


class Line(NamedTuple):
    """Rows of activations and their width, the terms' and the sum's dtype, whether the goal is set for it."""

    rows: int
    width: int
    kind: Any
    dtype: Any
    goal: bool


LINES = (
    Line(1, HIDDEN, jnp.float32, jnp.bfloat16, True),
    Line(1, LATENT, jnp.float32, jnp.bfloat16, True),
    Line(1, HIDDEN, jnp.bfloat16, jnp.bfloat16, True),
    Line(8, HIDDEN, jnp.float32, jnp.bfloat16, False),
    Line(16, HIDDEN, jnp.float32, jnp.bfloat16, False),
)


def _mesh() -> Mesh:
    devices = jax.devices()[: layout.MOST_DEVICES]
    return jax.make_mesh((len(devices),), ("device",), axis_types=(AxisType.Auto,), devices=devices)


def _on_mesh(mesh: Mesh, line: Line, implementation: Implementation, calls: int) -> Callable[..., jax.Array]:
    """A program of dependent sums of x [devices, size], each in the terms' dtype unless there is but one."""
    dtype = line.dtype if calls == 1 else line.kind

    def local(table: jax.Array, x: jax.Array) -> jax.Array:
        x = x + jax.lax.psum(0 * x[:, :1], "device")  # the exchange of the runtime's that every program needs
        for _ in range(calls):
            x = api.all_reduce(x, "device", table, dtype=dtype, implementation=implementation)
        return x

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(SPLIT, SPLIT), out_specs=SPLIT, check_vma=False))


def _played(devices: int, line: Line, calls: int) -> Callable[..., jax.Array]:
    """The same program where one GPU plays all devices."""
    one = jax.jit(functools.partial(mosaic.all_reduce, devices=devices), static_argnums=2)
    dtype = line.dtype if calls == 1 else line.kind

    def run(table: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(calls):
            x = one(table, x, dtype)
        return x

    return jax.jit(run)


def draw(devices: int, line: Line, seed: int) -> jax.Array:
    """What every device adds to the sum."""
    shape = devices, line.rows * line.width
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(line.kind)


def _check(name: str, run: Callable[..., jax.Array], table: jax.Array, x: jax.Array, line: Line) -> list[Check]:
    """The sum of every device against the definition, and how many devices have other bits than the first."""
    actual, expected = run(table, x), reference.all_reduce(jnp.asarray(jax.device_get(x)), line.dtype)
    whole = jnp.asarray(jax.device_get(actual))
    error = timing.relative_rms(whole, jnp.broadcast_to(expected, whole.shape))
    others = float(jnp.sum(jnp.any(whole != whole[:1], axis=1)))
    title = f"{name}, {line.rows} x {line.width} {jnp.dtype(line.kind)}"
    return [Check(title, error, 3e-3), Check(f"{title}: devices that differ", others, 0.0)]


def gate(implementation: Implementation = None) -> list[Check]:
    """Sums on the devices that there are, and on one GPU that plays two and eight; three turns each."""
    gpu, checks = jax.default_backend() == "gpu", []
    lines = LINES if gpu else (Line(2, 64, jnp.float32, jnp.bfloat16, False),)
    if len(jax.devices()) > 1:
        mesh = _mesh()
        sharding = NamedSharding(mesh, SPLIT)
        nowhere = inboxes.Inboxes(jax.device_put(inboxes.rows(range(mesh.size)), sharding), ())
        group = inboxes.connect(mesh) if gpu else nowhere
        for line, turn in itertools.product(lines, range(3)):
            x, run = jax.device_put(draw(mesh.size, line, turn), sharding), _on_mesh(mesh, line, implementation, 1)
            checks += _check(f"{mesh.size} devices", run, group.table, x, line)
        checks += bench_inside.gate(mesh, group.table, implementation)
    for count in (2, 8) if gpu else ():
        group = inboxes.played(count)
        for line, turn in itertools.product(lines, range(3)):
            x, run = draw(count, line, turn), _played(count, line, 1)
            checks += _check(f"{count} devices played by one", run, group.table, x, line)
    return checks


def measure() -> Iterator[Measurement]:
    """Times every line on all GPUs, or on one that plays two and eight devices."""
    if len(jax.devices()) > 1:
        yield from _measure_mesh(_mesh())
        return
    for devices in (2, 8):
        group = inboxes.played(devices)
        xs = {line: draw(devices, line, 0) * 0 for line in LINES}
        programs: dict[Any, Any] = {line: (_played(devices, line, CALLS), (group.table, xs[line])) for line in LINES}
        runs = compiled(programs)
        for line in LINES:
            time = timing.median_call_us(functools.partial(runs[line], group.table), xs[line], CALLS)
            name = f"{devices} devices played by one, {line.rows} x {line.width} {jnp.dtype(line.kind)}"
            yield Measurement(name, time, 0.0, None)


def _measure_mesh(mesh: Mesh) -> Iterator[Measurement]:
    group, sharding = inboxes.connect(mesh), NamedSharding(mesh, SPLIT)
    xs = {line: jax.device_put(draw(mesh.size, line, 0) * 0, sharding) for line in LINES}
    kinds: tuple[Implementation, ...] = (None, "xla")
    programs: dict[Any, Any] = {
        (line, kind): (_on_mesh(mesh, line, kind, CALLS), (group.table, x)) for line, x in xs.items() for kind in kinds
    }
    runs = compiled(programs)

    def time(line: Line, kind: Implementation) -> float:
        return timing.median_call_us(functools.partial(runs[line, kind], group.table), xs[line], CALLS)

    for line in LINES:
        sent = (mesh.size - 1) * line.rows * line.width * jnp.dtype(line.kind).itemsize
        name = f"{mesh.size} devices, {line.rows} x {line.width} {jnp.dtype(line.kind)}"
        peer = measured_peer("XLA (NCCL)", functools.partial(time, line, "xla"))
        yield Measurement(name, time(line, None), sent / LINK * 1e6, GOAL if line.goal else None, (peer,))
    yield from bench_inside.measure(mesh, group.table)
