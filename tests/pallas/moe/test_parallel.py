"""Experts spread over eight devices against the unsharded layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas import moe
from pallas.moe import parallel
from tests.pallas.comparison import relative

OPTIONS = {"beta": 4.0, "linear_beta": 25.0}


def run_sharded(x, ids, weights, packed, rows):
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    local = functools.partial(parallel.experts, axis="expert", rows=rows, **OPTIONS)
    split = P("expert")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))(
        x, ids, weights, packed
    )


@pytest.mark.parametrize(("crowded", "rows"), [(False, None), (True, 1)], ids=["even", "one device, many rounds"])
def test_equals_the_unsharded_layer(crowded, rows, draw_experts, draw_tokens):
    packed = draw_experts(experts=16, latent=32, inner=32)
    x, ids, weights = map(jnp.asarray, draw_tokens(24, k=3, experts=4 if crowded else 16, latent=32))
    x = x.at[5].set(jnp.nan)
    expected = np.asarray(moe.experts(x, ids, weights, packed, **OPTIONS), np.float64)
    actual = np.asarray(run_sharded(x, ids, weights, packed, rows))
    assert np.isnan(actual[5]).all()
    finite = np.arange(24) != 5
    assert relative(actual[finite], expected[finite]) < 2e-6


def test_a_round_holds_an_even_share():
    assert parallel.rows_per_round(tokens=64, k=16, devices=128) == 10  # 64 tokens to 16 of 128 devices are 8
    assert parallel.rows_per_round(tokens=64, k=16, devices=8) == 64
    assert parallel.rows_per_round(tokens=1, k=1, devices=8) == 1
