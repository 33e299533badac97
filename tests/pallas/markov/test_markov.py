"""The Markov walk: portable, interpreted, and lowered for CUDA at Kimi K3's shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas import gemv, markov
from pallas.gemv import int8
from pallas.markov import mosaic

VOCABULARY, RANK, STEPS = 328, 128, 3
ANCHOR = VOCABULARY - 1
"""The last row of the table: the copy engine's box goes past its end."""


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    logits, noise = (jnp.asarray(rng.standard_normal((n, VOCABULARY)), jnp.float32) for n in (STEPS + 1, STEPS))
    table = jnp.asarray(rng.standard_normal((VOCABULARY, RANK)), jnp.bfloat16)
    head = gemv.quantize(jnp.asarray(rng.standard_normal((VOCABULARY, RANK)), jnp.float32))
    return logits, noise, jnp.float32(0.3), jnp.int32(ANCHOR), table, head


def definition(logits, noise, scale, anchor, table, head):
    codes = np.asarray(int8.restore(head.codes), np.float64) * np.asarray(head.scale, np.float64)[:, None]
    tokens, scores = [int(anchor)], []
    for row, drawn in zip(*(np.asarray(x, np.float64) for x in (logits, noise))):
        scores.append(float(scale) * (row + codes @ np.asarray(table, np.float64)[tokens[-1]]))
        tokens.append(int(np.argmax(scores[-1] + drawn)))
    return tokens[1:], np.stack(scores)


def test_walk(inputs):
    token, score = markov.walk(*inputs)
    expected, scores = definition(*inputs)
    np.testing.assert_array_equal(token, expected)
    np.testing.assert_allclose(score, scores, rtol=1e-5, atol=1e-4)
    assert len(set(expected)) > 1


@pytest.mark.parametrize("slots", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_interpreted(inputs, slots):
    """Six tiles, the last of which overlaps the one before, for two warpgroups, which keep `slots` of three."""
    *rest, head = inputs
    cut = mosaic.Settings(groups=2, blocks=1, slots=slots)
    interpret = plgpu.InterpretGPUParams()
    token, score = jax.jit(lambda *x: mosaic.walk(*x, interpret, cut))(*rest, *head)
    expected, scores = definition(*inputs)
    np.testing.assert_array_equal(token, expected)
    np.testing.assert_allclose(score, scores, rtol=1e-5, atol=1e-4)


def test_of_equal_scores_the_first_token_counts(inputs):
    logits, noise, _, anchor, table, head = inputs
    noise = jnp.zeros_like(noise).at[:, 70].set(5.0).at[:, 200].set(5.0)
    cut, interpret = mosaic.Settings(groups=2, blocks=1, slots=2), plgpu.InterpretGPUParams()
    token, _ = jax.jit(lambda *x: mosaic.walk(*x, interpret, cut))(logits, noise, jnp.float32(0), anchor, table, *head)
    np.testing.assert_array_equal(token, [70] * STEPS)


def test_lowers_for_cuda():
    kinds = (
        ((8, 163840), jnp.float32),
        ((7, 163840), jnp.float32),
        ((), jnp.float32),
        ((), jnp.int32),
        ((163840, 256), jnp.bfloat16),
        ((163840, 256), jnp.int8),
        ((163840,), jnp.float32),
    )
    shapes = [jax.ShapeDtypeStruct(*kind) for kind in kinds]
    assert "mosaic_gpu" in jax.jit(mosaic.walk).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("dtype", "rank", "outputs", "reason"),
    [(jnp.float32, 128, 64, "bfloat16"), (jnp.bfloat16, 384, 64, "ranks of"), (jnp.bfloat16, 128, 60, "at least 64")],
)
def test_refusals_name_the_reason(dtype, rank, outputs, reason):
    with pytest.raises(NotImplementedError, match=reason):
        mosaic.require_supported(jnp.zeros((outputs, rank), dtype), jnp.zeros((outputs, rank), jnp.int8))


def test_a_named_kernel_refuses_without_a_gpu(inputs):
    with pytest.raises(NotImplementedError, match="GPU"):
        markov.walk(*inputs, implementation="mosaic")
