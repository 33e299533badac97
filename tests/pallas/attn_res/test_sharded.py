"""The token-sharded read on eight devices against the read of one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas import attn_res
from pallas.attn_res import sharded


def mesh_of(devices):
    return jax.make_mesh(
        (devices,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
    )


@pytest.mark.parametrize("devices", [8])
@pytest.mark.parametrize("with_output", [True, False])
def test_a_split_stream_reads_like_a_whole_one(devices, with_output):
    rng = np.random.default_rng(devices)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    batch, tokens, width = 2, 16, 48
    sources, prefix = tuple(normal(batch, tokens, width) for _ in range(3)), normal(batch, tokens, width)
    terms = normal(devices, batch, tokens, width) if with_output else None
    weights = (normal(width), normal(width), normal(width))
    mesh = mesh_of(devices)
    split, whole = P(None, "tensor"), P()
    read = jax.shard_map(
        lambda sources, prefix, terms, *weights: sharded.read(
            sources, prefix, None if terms is None else terms[0], *weights, axis="tensor", implementation="xla"
        ),
        mesh=mesh,
        in_specs=(split, split, P("tensor"), whole, whole, whole),
        out_specs=attn_res.Read(split, whole),
        check_vma=False,
    )
    actual = jax.jit(read)(sources, prefix, terms, *weights)
    summed = None if terms is None else jnp.sum(terms, axis=0)
    expected = attn_res.read(sources, prefix, summed, *weights, implementation="xla")
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_the_stream_is_reduced_in_scattered_form():
    """No all-reduce of the whole stream is left: that is what splitting it saves."""
    mesh = mesh_of(2)
    row, weight = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 8, 48), (48,)))
    read = jax.shard_map(
        partial(sharded.read, axis="tensor", implementation="xla"),
        mesh=mesh,
        in_specs=((P(None, "tensor"),), P(None, "tensor"), P(), P(), P(), P()),
        out_specs=attn_res.Read(P(None, "tensor"), P()),
        check_vma=False,
    )
    text = jax.jit(read).lower((row,), row, row, weight, weight, weight).as_text()
    assert "reduce_scatter" in text
    assert "all_gather" in text
    assert "all_reduce" not in text
