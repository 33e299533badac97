"""Context rows of all draft layers stored in one launch: what storing them layer by layer leaves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax import params
from k3jax.cache import Rows
from k3jax.dspark import context_rows, quantized
from k3jax.dspark.config import Rope, Yarn
from k3jax.dspark.model import DSpark, stored_by_layer
from k3jax.dspark.tensors import draft_specs
from tests import small_draft

WIDTH, RANK, SHARED, PAGE, LAYERS = 512, 512, 64, 4, 2


class Target:
    vocab_size, hidden_size = 16, WIDTH


@pytest.fixture(scope="module")
def draft():
    config = small_draft.published(Target, layers=LAYERS)
    attention = dataclasses.replace(config.attention, kv_lora_rank=RANK, qk_rope_head_dim=SHARED)
    yarn = Yarn(factor=8.0, original_positions=64, mscale=1.0, mscale_all_dim=0.5)
    config = dataclasses.replace(config, attention=attention, rope=Rope(theta=1e3, interleaved=True, yarn=yarn))
    rng = np.random.default_rng(3)
    fill = lambda spec: jnp.asarray(rng.standard_normal(spec.shape), jnp.bfloat16)  # noqa: E731
    return DSpark(config, quantized.quantize(params.map_tree(fill, draft_specs(config))))


@pytest.mark.slow
def test_rows_are_those_of_layer_by_layer(draft):
    rng = np.random.default_rng(0)
    context = jnp.asarray(rng.standard_normal((1, context_rows.TOKENS, WIDTH)), jnp.bfloat16)
    pools = tuple(jnp.asarray(rng.standard_normal((5, PAGE, RANK + SHARED)), jnp.bfloat16) for _ in range(LAYERS))
    number = lambda *x: jnp.asarray(x, jnp.int32)  # noqa: E731
    rows = Rows(number(1), number(4, 2, 0)[None], number(3), number(6))
    ours = jax.jit(lambda *x: context_rows.store(draft, *x, rows, plgpu.InterpretGPUParams()))(pools, context)
    other = jax.jit(lambda *x: stored_by_layer(draft, *x, rows))(pools, context)
    for one, expected, before in zip(ours, other, pools, strict=True):
        different = np.asarray(one) != np.asarray(expected)
        assert different.mean() < 1e-3  # of sums in another order that round apart
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (one, expected)), rtol=1e-2, atol=1e-2)
        assert np.mean(np.asarray(one) != np.asarray(before)) > 0.2


@pytest.mark.slow
def test_lowers_for_cuda(draft, monkeypatch):
    monkeypatch.setattr(context_rows, "require_capability", lambda *_: None)
    number = jnp.ones(1, jnp.int32)
    pools = (jnp.zeros((5, PAGE, RANK + SHARED), jnp.bfloat16),) * LAYERS
    context = jnp.zeros((1, context_rows.TOKENS, WIDTH), jnp.bfloat16)
    run = jax.jit(lambda *given: context_rows.store(draft, *given, Rows(number, number[None], number, number)))
    lowered = run.trace(pools, context).lower(lowering_platforms=("cuda",)).as_text()
    assert "latent_rows" in lowered


def test_refusals_name_the_reason(draft):
    shape = (1, context_rows.TOKENS, WIDTH)
    pools = (jnp.zeros((1, 1, 1), jnp.bfloat16),) * LAYERS
    with pytest.raises(NotImplementedError, match=r"8 tokens of one row in bfloat16, got bfloat16 \(2, 8\)"):
        context_rows.require_supported(draft, pools, jnp.zeros((2, *shape[1:]), jnp.bfloat16))
    number = jnp.ones(1, jnp.int32)
    with pytest.raises(NotImplementedError, match="GPU"):
        context_rows.store(draft, pools, jnp.zeros(shape, jnp.bfloat16), Rows(number, number[None], number, number))
