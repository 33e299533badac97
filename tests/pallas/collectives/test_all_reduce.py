"""The sum over devices: portable on fake devices, the kernel's program on a machine of our own, lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas import collectives
from pallas.collectives import inboxes, layout, mosaic, reference
from tests.pallas.collectives import ptx

f32, bf16 = jnp.float32, jnp.bfloat16
SPLIT = PartitionSpec("t")


def in_order(parts, dtype):
    """Sums in float32, device after device."""
    total = np.asarray(parts[0], np.float32)
    for part in parts[1:]:
        total = total + np.asarray(part, np.float32)
    return total.astype(dtype)


def bits(array):
    """Words of the array's bytes, so that NaN and -0 count."""
    return np.ascontiguousarray(np.asarray(array)).view(np.uint8).view(np.uint32)


def draw(devices, size, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal((devices, size), f32).astype(dtype)


@pytest.mark.parametrize(("kind", "dtype"), [(f32, f32), (f32, bf16), (bf16, None)])
def test_portable_sum_on_eight_devices(kind, dtype):
    mesh = jax.make_mesh((8,), ("t",), axis_types=(AxisType.Auto,))
    x = draw(8, 24, kind)

    def local(x):
        return collectives.all_reduce(x.reshape(2, 12), "t", dtype=dtype).reshape(1, 24)

    total = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False))(x)
    assert total.dtype == (dtype or kind)
    expected = in_order(x, f32)
    for row in np.asarray(total, np.float32):
        np.testing.assert_array_equal(row, np.asarray(total[0], np.float32))
        np.testing.assert_allclose(row, expected, atol=1e-6 if total.dtype == f32 else 0.05)
    np.testing.assert_array_equal(np.asarray(reference.all_reduce(jnp.asarray(x), f32)), expected)


class Devices:
    """Devices of the machine with their inboxes, and the kernels that wait to be run on them."""

    def __init__(self, count, seed):
        self.machine, self.count = ptx.Machine(seed), count
        self.inboxes = [ptx.GIGA * (device + 1) for device in range(count)]
        self.free = [inbox + (1 << 28) for inbox in self.inboxes]
        self.table = inboxes.rows(self.inboxes)
        for inbox in self.inboxes:
            self.machine.give(inbox, [layout.EMPTY] * (layout.CHANNELS * layout.channel_bytes(count) // 4))
        self.kernels, self.outputs = [[] for _ in range(count)], []

    def place(self, device, words):
        address = self.free[device]
        self.free[device] += 4 * len(words) + (-4 * len(words)) % 16
        self.machine.give(address, [int(word) for word in words])
        return address

    def enqueue(self, x, dtype, channel=0, **options):
        """A sum of the rows of x, one a device; outputs are poisoned."""
        narrow, to_narrow = x.dtype == bf16, dtype == bf16
        units = x[0].nbytes // layout.UNIT
        program = mosaic.program(self.count, units, channel, narrow, to_narrow, **{"polls": 1 << 30, **options})
        code, labels = ptx.parse(program)
        size = x.shape[1] * jnp.dtype(dtype).itemsize // 4
        places = []
        for device in range(self.count):
            operands = [self.place(device, w) for w in (self.table[device], bits(x[device]), [0x7FBADBAD] * size)]
            blocks = -(-units // mosaic.THREADS)
            # Threads beyond the last unit leave at once: two of them stand for all.
            threads = [divmod(index, mosaic.THREADS) for index in range(min(units + 2, blocks * mosaic.THREADS))]
            make = functools.partial(ptx.Thread, self.machine, code, labels, device)
            self.kernels[device].append([make(*place, operands) for place in threads])
            places.append(operands[2])
        self.outputs.append((places, size, dtype))

    def results(self):
        """Rows of words of every sum, after all of them ran."""
        ptx.run(self.machine, self.kernels)
        self.kernels = [[] for _ in range(self.count)]
        return [
            np.array([self.machine.take(place, size) for place in places], np.uint32)
            for places, size, _ in self.outputs
        ]


def small_inboxes(monkeypatch):
    """Inboxes of eight units, of which the machine's memory holds all."""
    for name, value in (("CAPACITY", 8), ("COUNTERS", 4 * 8), ("RUN", layout.UNIT * 8)):
        monkeypatch.setattr(layout, name, value)


def sum_turn_after_turn(devices, kind, dtype, seed, sizes=(2, 1, 2, 2)):
    """Sums of so many units each, with devices that run ahead and fall behind, against sums in order."""
    group, expected = Devices(devices, seed), []
    for turn, units in enumerate(sizes):
        x = draw(devices, units * layout.UNIT // jnp.dtype(kind).itemsize, kind, turn)
        x[:, 0] = -0.0
        group.enqueue(x, dtype)
        expected.append(bits(in_order(x, dtype)))
    for actual, words in zip(group.results(), expected, strict=True):
        for row in actual:
            np.testing.assert_array_equal(row, words)


@pytest.mark.parametrize(
    ("devices", "kind", "dtype"), [(2, f32, f32), (2, f32, bf16), (3, bf16, bf16), (4, f32, bf16), (8, f32, f32)]
)
def test_program_sums_in_the_order_of_devices(devices, kind, dtype, monkeypatch):
    small_inboxes(monkeypatch)
    sum_turn_after_turn(devices, kind, dtype, seed=devices)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [f32, bf16])
@pytest.mark.parametrize("devices", [4, 8])
def test_program_in_many_orders(devices, kind, monkeypatch):
    """Every seed draws another order of threads, paces of devices and delays of stores."""
    small_inboxes(monkeypatch)
    for seed in range(40):
        sum_turn_after_turn(devices, kind, f32, seed, sizes=(2, 1, 3, 2, 1, 2))


def test_two_sums_at_once_have_a_channel_each(monkeypatch):
    small_inboxes(monkeypatch)
    group, xs = Devices(2, seed=5), [draw(2, 12, f32, seed) for seed in range(6)]
    for index, x in enumerate(xs):
        group.enqueue(x, f32, channel=index % 2)
    # Kernels of both channels run side by side, and each device pairs them otherwise.
    for device, queue in enumerate(group.kernels):
        first, *pairs, last = (queue[0], *(queue[i] + queue[i + 1] for i in (1, 3)), queue[5])
        group.kernels[device] = [first, *pairs, last] if device else [queue[i] + queue[i + 1] for i in (0, 2, 4)]
    for x, actual in zip(xs, group.results(), strict=True):
        for row in actual:
            np.testing.assert_array_equal(row, bits(in_order(x, f32)))


@pytest.mark.parametrize("trap", [True, False])
def test_a_device_that_sends_nothing(trap, monkeypatch):
    """Its peers trap after so many polls; in a trial they leave with NaN."""
    small_inboxes(monkeypatch)
    group = Devices(4, seed=3)
    group.enqueue(draw(4, 8, f32), f32, polls=50, trap=trap)
    group.kernels[2] = []
    if trap:
        with pytest.raises(AssertionError, match="gave up waiting"):
            group.results()
        return
    for device, row in enumerate(group.results()[0]):
        assert device == 2 or np.isnan(row.view(np.float32)).all()
        assert device != 2 or (row == 0x7FBADBAD).all()


@pytest.mark.parametrize("kind", [f32, bf16])
def test_no_value_is_taken_for_an_empty_word(kind, monkeypatch):
    """NaN with all bits set is what an empty slot holds: it arrives as another NaN, and nothing waits for ever."""
    small_inboxes(monkeypatch)
    group, size = Devices(2, seed=1), layout.UNIT // jnp.dtype(kind).itemsize
    words = np.full((2, 4), layout.EMPTY, np.uint32)
    words[1, 2:] = 0
    group.enqueue(words.view(kind).reshape(2, size), f32)
    for row in group.results()[0]:
        assert np.isnan(row.view(np.float32)).all()


@pytest.mark.parametrize(("devices", "size"), [(2, 7168), (8, 16 * 7168), (8, 3584)])
def test_lowers_for_cuda(devices, size, monkeypatch):
    """Inside shard_map, without any exchange but the kernel's own; what an inbox does not hold is the runtime's."""
    monkeypatch.setattr(mosaic, "require_capability", lambda *name: None)
    mesh = jax.make_mesh((devices,), ("t",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    table = jax.device_put(inboxes.rows(range(devices)), NamedSharding(mesh, SPLIT))

    def lowered(size):
        def local(table, x):
            return collectives.all_reduce(x, "t", table, dtype=bf16)

        run = jax.shard_map(local, mesh=mesh, in_specs=(SPLIT, SPLIT), out_specs=SPLIT, check_vma=False)
        return jax.jit(run).trace(table, jnp.zeros((devices, size))).lower(lowering_platforms=("cuda",)).as_text()

    text, larger = lowered(size), lowered(16 * 7168 + 4)
    assert "mosaic_gpu" in text
    assert "stablehlo.all_reduce" not in text
    assert "stablehlo.all_reduce" in larger
    assert "mosaic_gpu" not in larger


def test_refusals():
    table = jnp.zeros((1, layout.row_words(2)), jnp.uint32)
    with pytest.raises(NotImplementedError, match="not whole units"):
        mosaic.all_reduce(table, jnp.zeros((1, 6)), f32, devices=2)
    with pytest.raises(NotImplementedError, match="too large"):
        mosaic.all_reduce(table, jnp.zeros((1, 4 * layout.CAPACITY + 4)), f32, devices=2)
    with pytest.raises(NotImplementedError, match="int32"):
        mosaic.all_reduce(table, jnp.zeros((1, 8), jnp.int32), f32, devices=2)
    mesh = jax.make_mesh((2,), ("t",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with pytest.raises(NotImplementedError, match="not all devices are GPUs"):
        collectives.connect(mesh)
