"""Routing and experts against float64 definitions written here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas import moe
from pallas.activation import situ
from pallas.moe import reference
from tests.pallas.comparison import relative

EXPERTS = 6
OPTIONS = {"beta": 4.0, "linear_beta": 25.0}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_code_and_every_scale(dtype, decode):
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
def test_experts(tokens, draw_experts, draw_tokens, definition):
    """Few tokens gather their weights, many are sorted into blocks; both are the same sum."""
    packed = draw_experts()
    x, ids, weights = draw_tokens(tokens)
    assert relative(moe.experts(x, ids, weights, packed, **OPTIONS), definition(x, ids, weights, packed)) < 2e-6


@pytest.mark.parametrize("tokens", [4, 40])
def test_a_slot_without_an_expert_counts_nowhere(tokens, draw_experts, draw_tokens, definition):
    packed = draw_experts()
    x, ids, weights = draw_tokens(tokens)
    expected = definition(x, ids, np.where(np.arange(3) == 1, 0, weights), packed)
    ids[:, 1] = -1
    weights[:, 1] = np.nan
    assert relative(moe.experts(x, ids, weights, packed, **OPTIONS), expected) < 2e-6
    assert moe.expert_load(jnp.asarray(ids), EXPERTS).sum() == 2 * tokens


def test_an_expert_named_twice_is_refused(draw_experts, draw_tokens):
    x, ids, weights = draw_tokens(3)
    ids[2] = 4
    with pytest.raises(ValueError, match="token 2 names expert 4 twice"):
        moe.experts(x, ids, weights, draw_experts(), **OPTIONS)


def test_expert_load():
    ids = jnp.array([[0, 2], [2, 3], [2, -1]], jnp.int32)
    np.testing.assert_array_equal(moe.expert_load(ids, 5), [1, 0, 3, 1, 0])


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("tokens", [4, 100])
def test_packed_equals_dense(tokens, dense, draw_experts, draw_tokens):
    packed = draw_experts()
    x, ids, weights = draw_tokens(tokens)
    arrays = moe.DenseExperts(
        moe.dequantize(packed.gate_up_packed, packed.gate_up_scale),
        moe.dequantize(packed.down_packed, packed.down_scale),
    )
    function = reference.experts if dense else moe.experts
    x, ids, weights = map(jnp.asarray, (x, ids, weights))
    expected = moe.experts(x, ids, weights, packed, **OPTIONS)
    assert relative(function(x, ids, weights, arrays, **OPTIONS), expected) < 2e-6


@pytest.mark.parametrize("tokens", [70, 300])
def test_all_tokens_on_one_expert(tokens, draw_experts, draw_tokens, definition):
    packed = draw_experts()
    x, ids, weights = draw_tokens(tokens, k=1)
    ids[:] = EXPERTS - 1
    assert relative(moe.experts(x, ids, weights, packed, **OPTIONS), definition(x, ids, weights, packed)) < 2e-6


@pytest.mark.parametrize("tokens", [5, 64])
def test_a_nan_stays_in_its_row(tokens, draw_experts, draw_tokens):
    packed = draw_experts()
    x, ids, weights = draw_tokens(tokens)
    expected = np.asarray(moe.experts(x, ids, weights, packed, **OPTIONS))
    x[2] = np.nan
    actual = np.asarray(moe.experts(x, ids, weights, packed, **OPTIONS))
    np.testing.assert_array_equal(np.delete(actual, 2, 0), np.delete(expected, 2, 0))
    assert np.isnan(actual[2]).all()


def test_experts_are_differentiable(draw_experts, draw_tokens):
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


@pytest.mark.parametrize("tokens", [5, 20])
def test_choose_orders_as_top_k_does(tokens):
    """Few tokens are ranked by counting, many by a sort: ties, infinities and NaNs included."""
    logits = np.random.default_rng(2).integers(-3, 4, (tokens, 50)).astype(np.float32)
    logits[0, ::3], logits[1, 7], logits[2, 9] = np.nan, np.inf, -np.inf
    routing = moe.choose(jnp.asarray(logits), jnp.zeros(50), k=8)
    _, expected = jax.lax.top_k(jax.nn.sigmoid(logits), 8)
    np.testing.assert_array_equal(routing.ids, expected)


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
