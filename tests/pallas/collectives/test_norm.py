"""The norm of a sum over devices: portable on fake devices, lowered for CUDA, and what its kernel refuses."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas import collectives, dispatch
from pallas.collectives import inboxes, layout, mosaic_norm
from tests.pallas.collectives.test_all_reduce import bf16, draw, f32

SPLIT, WHOLE = PartitionSpec("t"), PartitionSpec()


def program(dtype):
    """The norm of a sum of eight devices, and their table."""
    mesh = jax.make_mesh((8,), ("t",), axis_types=(AxisType.Auto,))

    def local(table, term, weight):
        return collectives.normed_all_reduce(term[0], "t", table, weight, dtype=dtype, eps=1e-5)[None]

    run = jax.shard_map(local, mesh=mesh, in_specs=(SPLIT, SPLIT, WHOLE), out_specs=SPLIT, check_vma=False)
    return jax.jit(run), jax.device_put(inboxes.rows(range(8)), NamedSharding(mesh, SPLIT))


def test_portable_norm_of_a_sum():
    run, table = program(f32)
    term, weight = draw(8, 96, f32).reshape(8, 2, 48), np.linspace(0.5, 2, 48, dtype=np.float32)
    total = term.sum(0, dtype=np.float64)
    expected = weight * total / np.sqrt(np.mean(total**2, axis=-1, keepdims=True) + 1e-5)
    for normed in np.asarray(run(table, term, weight)):
        np.testing.assert_allclose(normed, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("tokens", "kernels"), [(32, {"all_reduce_norm"}), (33, set())])
def test_lowers_for_cuda(tokens, kernels, monkeypatch):
    """What an inbox holds is one kernel; more is the runtime's sum and XLA's norm."""
    monkeypatch.setattr(dispatch, "require_gpu", lambda name: None)
    run, table = program(bf16)
    shapes = ((8, tokens, 3584), f32), ((3584,), bf16)
    traced = run.trace(table, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert {"all_reduce", "all_reduce_norm"} & set(re.findall(r"00([a-z_]+?)_mosaic_gpu", text)) == kernels
    assert text.count("stablehlo.all_reduce") == (not kernels)


def test_refusals():
    table = jnp.zeros((1, layout.row_words(2)), jnp.uint32)
    for width, dtype, reason in ((512, f32, "bfloat16, got float32"), (640, bf16, "512 numbers, got 640")):
        with pytest.raises(NotImplementedError, match=reason):
            mosaic_norm.normed_sum(jnp.zeros((1, width)), table, jnp.ones(width, dtype), jnp.dtype(dtype), 1e-5, 2)
