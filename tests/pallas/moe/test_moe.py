"""Routing and experts against float64 definitions written here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas import moe
from pallas.activation import situ
from pallas.moe import reference

EXPERTS, LATENT, INNER = 6, 64, 96
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def decode(packed, scale):
    """MXFP4 as the format document says, in float64."""
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    values = MAGNITUDES[codes & 7] * np.where(codes & 8, -1.0, 1.0)
    return values * 2.0 ** (np.repeat(scale, 32, axis=-1).astype(np.float64) - 127)


def draw_experts(seed=0, experts=EXPERTS, latent=LATENT, inner=INNER):
    rng = np.random.default_rng(seed)

    def packed(*shape):
        return rng.integers(0, 256, shape).astype(np.uint8)

    def scale(*shape):
        return rng.integers(122, 126, shape).astype(np.uint8)

    arrays = (
        packed(experts, 2, inner, latent // 2),
        scale(experts, 2, inner, latent // 32),
        packed(experts, latent, inner // 2),
        scale(experts, latent, inner // 32),
    )
    return moe.PackedExperts(*map(jnp.asarray, arrays))


def definition(x, ids, weights, packed, beta=4.0, linear_beta=25.0):
    gate_up = decode(np.asarray(packed.gate_up_packed), np.asarray(packed.gate_up_scale))
    down = decode(np.asarray(packed.down_packed), np.asarray(packed.down_scale))
    output = np.zeros(x.shape)
    for token, slot in np.ndindex(*ids.shape):
        gate, up = gate_up[ids[token, slot]] @ x[token].astype(np.float64)
        hidden = beta * np.tanh(gate / beta) / (1 + np.exp(-gate)) * linear_beta * np.tanh(up / linear_beta)
        output[token] += float(weights[token, slot]) * (down[ids[token, slot]] @ hidden)
    return output


def draw_tokens(tokens, k=3, seed=1, experts=EXPERTS, latent=LATENT):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, latent)).astype(np.float32)
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).astype(np.int32)
    weights = rng.random((tokens, k)).astype(np.float32)
    return x, ids, weights


def relative(actual, expected):
    actual = np.asarray(actual, np.float64)
    assert np.isfinite(actual).all()
    return np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))


OPTIONS = {"beta": 4.0, "linear_beta": 25.0}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_code_and_every_scale(dtype):
    codes = np.tile(np.arange(16, dtype=np.uint8), 2)
    packed = np.tile(codes[0::2] | (codes[1::2] << 4), (253, 1))
    scale = np.arange(253, dtype=np.uint8)[:, None]
    values = np.asarray(
        moe.dequantize(jnp.asarray(packed), jnp.asarray(scale), jnp.dtype(dtype)).astype(jnp.float32), np.float64
    )
    np.testing.assert_array_equal(values, decode(packed, scale))
    assert np.signbit(values[:, 8]).all()  # code 8 is minus zero


def test_dequantize_vector():
    """Three bytes with scale 128, lower nibble first: 1, 2, 3, 4, -12, 12."""
    packed = np.zeros((1, 16), np.uint8)
    packed[0, :3] = [0x21, 0x43, 0x7F]
    values = moe.dequantize(jnp.asarray(packed), jnp.asarray([[128]], jnp.uint8))
    np.testing.assert_array_equal(values[0, :7], [1, 2, 3, 4, -12, 12, 0])


def test_dequantize_refuses_float16():
    with pytest.raises(ValueError, match="float16"):
        moe.dequantize(jnp.zeros((1, 16), jnp.uint8), jnp.zeros((1, 1), jnp.uint8), jnp.dtype(jnp.float16))


@pytest.mark.parametrize("tokens", [1, 2, 21, 22, 40, 200])
def test_experts(tokens):
    """Few tokens gather their weights, many are sorted into blocks; both are the same sum."""
    packed = draw_experts()
    x, ids, weights = draw_tokens(tokens)
    assert relative(moe.experts(x, ids, weights, packed, **OPTIONS), definition(x, ids, weights, packed)) < 2e-6


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("tokens", [4, 100])
def test_packed_equals_dense(tokens, dense):
    packed = draw_experts()
    x, ids, weights = draw_tokens(tokens)
    arrays = moe.DenseExperts(
        moe.dequantize(packed.gate_up_packed, packed.gate_up_scale),
        moe.dequantize(packed.down_packed, packed.down_scale),
    )
    function = reference.experts if dense else moe.experts
    x, ids, weights = map(jnp.asarray, (x, ids, weights))
    expected = moe.experts(x, ids, weights, packed, **OPTIONS)
    assert relative(function(x, ids, weights, arrays, **OPTIONS), np.asarray(expected, np.float64)) < 2e-6


@pytest.mark.parametrize("tokens", [70, 300])
def test_all_tokens_on_one_expert(tokens):
    packed = draw_experts()
    x, ids, weights = draw_tokens(tokens, k=1)
    ids[:] = EXPERTS - 1
    assert relative(moe.experts(x, ids, weights, packed, **OPTIONS), definition(x, ids, weights, packed)) < 2e-6


@pytest.mark.parametrize("tokens", [5, 64])
def test_a_nan_stays_in_its_row(tokens):
    packed = draw_experts()
    x, ids, weights = draw_tokens(tokens)
    expected = np.asarray(moe.experts(x, ids, weights, packed, **OPTIONS))
    x[2] = np.nan
    actual = np.asarray(moe.experts(x, ids, weights, packed, **OPTIONS))
    np.testing.assert_array_equal(np.delete(actual, 2, 0), np.delete(expected, 2, 0))
    assert np.isnan(actual[2]).all()


def test_experts_are_differentiable():
    packed = draw_experts()
    x, ids, weights = draw_tokens(40)

    def loss(x):
        return jnp.sum(moe.experts(x, ids, weights, packed, **OPTIONS) ** 2)

    direction = np.random.default_rng(5).standard_normal(x.shape).astype(np.float32)
    step = np.float32(1e-3)
    slope = (loss(x + step * direction) - loss(x - step * direction)) / (2 * step)
    assert np.isclose(slope, jnp.vdot(jax.grad(loss)(x), direction, precision="highest"), rtol=2e-3)


def test_route():
    rng = np.random.default_rng(0)
    x, router = rng.standard_normal((5, 32)).astype(np.float32), rng.standard_normal((10, 32)).astype(np.float32)
    bias = rng.standard_normal(10).astype(np.float32)
    routing = moe.route(x, router, bias, k=3, scaling=1.7)
    scores = 1 / (1 + np.exp(-(x.astype(np.float64) @ router.T.astype(np.float64))))
    expected = np.argsort(-(scores + bias), axis=1)[:, :3]
    np.testing.assert_array_equal(routing.ids, expected)
    chosen = np.take_along_axis(scores, expected, 1)
    np.testing.assert_allclose(routing.weights, 1.7 * chosen / chosen.sum(1, keepdims=True), rtol=1e-5)


def test_route_ties_go_to_the_lowest_id():
    routing = moe.route(np.ones((2, 4), np.float32), np.zeros((9, 4), np.float32), np.zeros(9, np.float32), k=4)
    np.testing.assert_array_equal(routing.ids, [[0, 1, 2, 3]] * 2)
    np.testing.assert_allclose(routing.weights, 0.25)


def test_the_bias_moves_the_choice_and_never_the_weights():
    x, router = np.ones((1, 4), np.float32), np.zeros((3, 4), np.float32)
    routing = moe.route(x, router, np.array([0, 5, 9], np.float32), k=2)
    np.testing.assert_array_equal(routing.ids, [[2, 1]])
    np.testing.assert_allclose(routing.weights, 0.5)


def test_route_reads_bfloat16_at_full_precision():
    """A bfloat16 product would tie these two experts."""
    x = jnp.ones((1, 512), jnp.bfloat16)
    router = jnp.full((2, 512), 2.0**-9, jnp.bfloat16).at[1, 0].set(2.0**-9 + 2.0**-16)
    assert moe.route(x, router, jnp.zeros(2, jnp.float32), k=1).ids[0, 0] == 1


def test_situ():
    gate, up = np.meshgrid(np.linspace(-30, 30, 61), np.linspace(-90, 90, 31))
    expected = 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)
    actual = situ(jnp.asarray(gate, jnp.float32), jnp.asarray(up, jnp.float32), beta=4.0, linear_beta=25.0)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(actual).max() <= 100
