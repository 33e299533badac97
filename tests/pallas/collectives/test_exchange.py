"""The sum inside another kernel: its program on the machine, beside sums that are kernels of their own."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas import attn_res, dispatch
from pallas.collectives import exchange, inboxes, layout
from tests.pallas.collectives import ptx
from tests.pallas.collectives.test_all_reduce import Devices, bf16, bits, draw, f32, in_order, small_inboxes

OUT = ["$0", "$1", "$2", "$3"]


class Sites(Devices):
    """Devices that also run kernels which sum on their way."""

    def enqueue_site(self, x, units):
        """A sum of the rows of x [devices, numbers], so many units a thread, in bfloat16, half of it in a block."""
        places, words = ["$10", "$11", "$12"], 2 * units
        send = named(exchange.send_program(self.count, units), ["turns", *places])
        receive = named(exchange.receive_program(self.count, units), [*OUT[:words], *places, "turns"])
        store = f"st.global.v{words}.b32 [a], {{{', '.join(OUT[:words])}}};"
        code, labels = ptx.parse(f"{{{send}{receive}mul.wide.u32 a, t, 8; add.s64 a, a, $13; {store}}}")
        outputs, half = [], x[0].nbytes // 2
        for device in range(self.count):
            table, terms = (self.place(device, words) for words in (self.table[device], bits(x[device])))
            out, kernel = self.place(device, [0x7FBADBAD] * (half // 4)), []
            for block in range(2):
                operands = [0] * 10 + [table, terms, terms + block * half, out + block * half // 2]
                make = functools.partial(ptx.Thread, self.machine, code, labels, device)
                kernel += [make(block, thread, operands) for thread in range(half // (units * layout.UNIT))]
            self.kernels[device].append(kernel)
            outputs.append(out)
        self.outputs.append((outputs, half // 4, bf16))


def named(program, names):
    """The inside of a program with these registers as its operands."""
    inside = program.strip().removeprefix("{").removesuffix("}")
    return re.sub(r"\$(\d)", lambda found: names[int(found[1])], inside)


@pytest.mark.parametrize(("devices", "units"), [(2, 1), (2, 2), (4, 2), (8, 1)])
def test_program_sums_in_the_order_of_devices(devices, units, monkeypatch):
    """Turn after turn on the channel of sums of one unit less, so that neighbouring units are in different turns."""
    small_inboxes(monkeypatch)
    group, expected = Sites(devices, seed=devices), []
    for turn in range(4):
        x, y = draw(devices, 16, f32, turn), draw(devices, 12, f32, 9 + turn)
        x[:, 0], x[0, 1] = -0.0, np.inf
        group.enqueue_site(x, units)
        group.enqueue(y, f32)
        expected += [bits(in_order(x, bf16)), bits(in_order(y, f32))]
    for actual, words in zip(group.results(), expected, strict=True):
        for row in actual:
            np.testing.assert_array_equal(row, words)


def kernels_of_a_read(tokens, monkeypatch):
    """Kernels in a program that reads the stream of eight devices, lowered for CUDA, and the runtime's sums in it."""
    monkeypatch.setattr(dispatch, "require_gpu", lambda name: None)
    mesh, split, whole = jax.make_mesh((8,), ("t",), axis_types=(AxisType.Auto,)), PartitionSpec("t"), PartitionSpec()
    table = jax.device_put(inboxes.rows(range(8)), NamedSharding(mesh, split))

    def local(table, term, prefix, weight):
        return attn_res.read((prefix, prefix), prefix, term[0], *[weight] * 3, table=table, axis="t").normed[None]

    run = jax.shard_map(local, mesh=mesh, in_specs=(split, split, whole, whole), out_specs=split, check_vma=False)
    shapes = ((8, tokens, 7168), f32), ((tokens, 7168), bf16), ((7168,), bf16)
    program = jax.jit(run).trace(table, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    kernels = {"attn_res_read", "all_reduce"} & set(re.findall(r"00([a-z_]+?)_mosaic_gpu", text))
    return kernels, text.count("stablehlo.all_reduce")


def test_a_read_sums_what_an_inbox_holds(monkeypatch):
    """Sixteen tokens in one kernel; more are the runtime's sum and a read."""
    assert kernels_of_a_read(16, monkeypatch) == ({"attn_res_read"}, 0)
    assert kernels_of_a_read(17, monkeypatch) == ({"attn_res_read"}, 1)


def test_refusals():
    with pytest.raises(NotImplementedError, match="float32 terms, got bfloat16"):
        exchange.require_supported(jnp.zeros((1, 8), bf16))
    with pytest.raises(NotImplementedError, match="30464 units is too large, an inbox holds 28672"):
        exchange.require_supported(jnp.zeros((17, 7168), f32))
