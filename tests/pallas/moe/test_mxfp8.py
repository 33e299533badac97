"""MXFP8 activations: the format against its definition, the portable form, and the kernel interpreted and lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas import moe
from pallas.moe import mosaic_mxfp8, mosaic_mxfp8_expand, mxfp8
from tests.pallas.comparison import relative
from tests.pallas.moe.conftest import decode, draw_experts, draw_tokens

INTERPRET = plgpu.InterpretGPUParams()
OPTIONS = {"beta": 4.0, "linear_beta": 25.0}
MAGNITUDES = np.array(
    [m * 2.0**-9 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
)
MAGNITUDES = MAGNITUDES[:-1]
"""Of e4m3, by code; the last code is NaN."""


def nearest(x, block=32):
    """`x` in MXFP8 as the format documents say, in float64: the nearest of all numbers, ties to the even code."""
    blocks = np.asarray(x, np.float64).reshape(-1, block)
    largest = np.abs(blocks).max(1)
    scale = 2.0 ** np.ceil(np.log2(np.where(largest == 0, 2.0**-100, largest) / 448.0))[:, None]
    distance = np.abs(np.abs(blocks / scale)[..., None] - MAGNITUDES)
    best = distance.min(-1, keepdims=True)
    even = np.arange(MAGNITUDES.size) % 2
    code = np.where(distance == best, even, 2).argmin(-1)
    return (np.sign(blocks) * MAGNITUDES[code] * scale).reshape(np.shape(x))


def spread(rows, depth, seed=0):
    """Numbers of many sizes, some halfway between two of the format, some tiny beside their neighbours."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, depth)) * 2.0 ** rng.integers(-20, 8, (rows, depth))
    x[:, ::7] = rng.integers(-16, 17, x[:, ::7].shape) * 2.0**-4
    return np.array(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))


def test_quantised_numbers_are_the_nearest():
    """None saturates, and a block with a NaN or an infinity is NaN without its neighbours."""
    x = spread(8, 96)
    x[2, 32:64] = 0
    x[3, :32], x[3, 32:64], x[3, 64:] = 448, 449, 1.7578125
    found = mxfp8.quantize(jnp.asarray(x))
    values = np.asarray(found.values.astype(jnp.float32), np.float64)
    values *= 2.0 ** (np.repeat(np.asarray(found.scale), 32, axis=1).astype(np.float64) - 127)
    np.testing.assert_array_equal(values, nearest(x))
    assert relative(values[3], x[3]) < 2.0**-5
    x[5, 40], x[6, 70] = np.nan, np.inf
    kept = np.asarray(jax.jit(mxfp8.rounded)(jnp.asarray(x, jnp.bfloat16)).astype(jnp.float32))
    spoilt = np.zeros(x.shape, bool)
    spoilt[5, 32:64] = spoilt[6, 64:] = True
    np.testing.assert_array_equal(np.isnan(kept), spoilt)
    np.testing.assert_array_equal(kept[~spoilt], values[~spoilt])


def quantized_definition(x, ids, weights, packed, dtype=np.float64):
    """The layer in float64 with exactly quantised inputs of both products; hidden numbers are rounded to `dtype`."""
    gate_up = decode(np.asarray(packed.gate_up_packed), np.asarray(packed.gate_up_scale))
    down = decode(np.asarray(packed.down_packed), np.asarray(packed.down_scale))
    output, x = np.zeros(x.shape), nearest(x)
    for token, slot in np.argwhere(ids >= 0):
        gate, up = gate_up[ids[token, slot]] @ x[token]
        hidden = 4.0 * np.tanh(gate / 4.0) / (1 + np.exp(-gate)) * 25.0 * np.tanh(up / 25.0)
        output[token] += float(weights[token, slot]) * (down[ids[token, slot]] @ nearest(hidden.astype(dtype)))
    return output


def test_the_portable_form_quantises_both_inputs(definition):
    """From `FEWEST_TOKENS` tokens on; a hidden number at a boundary may round the other way, hence not 1e-6."""
    packed = draw_experts()
    x, ids, weights = draw_tokens(mxfp8.FEWEST_TOKENS)
    found = moe.experts(x, ids, weights, packed, activations="mxfp8", **OPTIONS)
    assert relative(found, quantized_definition(x, ids, weights, packed)) < 1e-3
    assert 1e-2 < relative(found, definition(x, ids, weights, packed)) < 5e-2
    few = x[:-1], ids[:-1], weights[:-1]
    np.testing.assert_array_equal(
        moe.experts(*few, packed, activations="mxfp8", **OPTIONS), moe.experts(*few, packed, **OPTIONS)
    )


def test_dense_experts_are_refused():
    dense = moe.DenseExperts(jnp.zeros((2, 2, 32, 32)), jnp.zeros((2, 32, 32)))
    x, ids, weights = draw_tokens(mxfp8.FEWEST_TOKENS, k=1, experts=2, latent=32)
    with pytest.raises(ExceptionGroup) as refusals:
        moe.experts(x, ids, weights, dense, activations="mxfp8", **OPTIONS)
    assert refusals.group_contains(NotImplementedError, match="packed experts, got dense")


@pytest.mark.parametrize("blocks", [1, 2])
def test_interleave_and_place_agree(blocks):
    width = 128 * blocks
    x = jnp.arange(3 * width)
    boxes = mosaic_mxfp8_expand.interleave(x.astype(jnp.float32)).reshape(3, width)
    where = mosaic_mxfp8_expand.place(np.arange(width), blocks)
    np.testing.assert_array_equal(np.sort(where), np.arange(width))
    np.testing.assert_array_equal(boxes[:, where], x.reshape(3, width))


def test_scales_fold_into_codes():
    """Weights of groups up to 2^11 below their box's largest are exact, smaller ones are zero."""
    packed = np.random.default_rng(0).integers(0, 256, (64, 64)).astype(np.uint8)
    scale = np.full((64, 4), 130, np.uint8)
    scale[:, 2] -= np.arange(64, dtype=np.uint8) % 14
    level, factor = mosaic_mxfp8_expand.emulated_levels(jnp.asarray(scale.astype(np.int32)), 1)
    found = mosaic_mxfp8_expand.emulated_expand(jnp.asarray(packed), level, 1, 0).astype(jnp.float32)
    found = np.asarray(found) * np.asarray(factor)[:, None] * mosaic_mxfp8_expand.CODE_UNIT
    expected = decode(packed, scale)
    expected[np.arange(64) % 14 > 11, 64:96] = 0
    where = mosaic_mxfp8_expand.place(np.arange(128), 1)
    np.testing.assert_array_equal(found[:, where], expected)


@pytest.mark.slow
def test_the_kernel_interpreted():
    """Slots without an expert are empty, a NaN stays in its row, and the sums are those of the portable form."""
    x, ids, weights = draw_tokens(13, k=2, experts=4, latent=256)
    x = np.asarray(jnp.asarray(x / 8, jnp.bfloat16).astype(jnp.float32))
    packed = draw_experts(experts=4, latent=256, inner=128)
    ids[3, 1], ids[5] = -1, -1
    spoilt = jnp.asarray(x, jnp.bfloat16).at[7].set(jnp.nan)
    cut = mosaic_mxfp8.Settings(stages=2, blocks=2)
    run = jax.jit(lambda *args: mosaic_mxfp8.experts(*args, 4.0, 25.0, jnp.dtype("float32"), INTERPRET, cut))
    found = np.asarray(run(spoilt, ids, weights, packed))
    assert np.isnan(found[7]).all()
    assert not found[5].any()
    others = [n for n in range(13) if n != 7]
    expected = quantized_definition(x, ids, weights, packed, jnp.bfloat16)
    assert relative(found[others], expected[others]) < 4e-3


def test_lowers_for_cuda():
    def spec(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    packed = moe.PackedExperts(
        spec(jnp.uint8, 896, 2, 3072, 1792),
        spec(jnp.uint8, 896, 2, 3072, 112),
        spec(jnp.uint8, 896, 3584, 1536),
        spec(jnp.uint8, 896, 3584, 96),
    )
    args = spec(jnp.bfloat16, 8192, 3584), spec(jnp.int32, 8192, 16), spec(jnp.float32, 8192, 16), packed
    run = jax.jit(lambda *args: mosaic_mxfp8.experts(*args, 4.0, 25.0))
    assert run.trace(*args).lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu") >= 2
