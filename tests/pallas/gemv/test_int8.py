"""Matrices of 8 bits: rounding, the order of the codes, and their products, portable, interpreted and lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas import gemv
from pallas.gemv import int8, mosaic, widen
from tests.pallas.comparison import relative

INTERPRET = plgpu.InterpretGPUParams()


def draw(tokens, outputs, inputs):
    """Activations, codes in the order of the inputs, scales."""
    rng = np.random.default_rng(outputs)
    codes, scale = rng.integers(-127, 128, (outputs, inputs)), rng.uniform(0.5, 2.0, outputs)
    x = np.asarray(jnp.asarray(rng.standard_normal((tokens, inputs)), jnp.bfloat16), np.float64)
    return x, codes, scale.astype(np.float32)


def matrix_of(codes, scale):
    return gemv.Int8Matrix(int8.interleave(jnp.asarray(codes, jnp.int8)), jnp.asarray(scale))


def definition(x, codes, scale):
    return (x @ codes.T) * scale.astype(np.float64)


def test_a_thread_finds_its_codes_together():
    """Thread t of four multiplies inputs 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of every sixteen."""
    order = np.asarray(int8.interleave(jnp.arange(256, dtype=jnp.int32)))
    for box in range(2):
        for thread in range(4):
            first = box * 128 + thread * 32
            wanted = [box * 128 + 16 * step + 2 * thread + at for step in range(8) for at in (0, 1, 8, 9)]
            np.testing.assert_array_equal(order[first : first + 32], wanted)
    np.testing.assert_array_equal(int8.restore(jnp.asarray(order)), np.arange(256))
    np.testing.assert_array_equal(int8.interleave(jnp.arange(72)), np.arange(72))


def test_rounding_keeps_half_a_step():
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((3, 5, 4, 32)).astype(np.float32)
    matrix[1, 2] = 0.0
    rounded = gemv.quantize(jnp.asarray(matrix), contract=2)
    assert (rounded.codes.shape, rounded.scale.shape) == ((3, 5, 128), (3, 5))
    codes, scale = np.asarray(int8.restore(rounded.codes), np.float64), np.asarray(rounded.scale, np.float64)
    assert np.abs(codes).max() == 127
    assert np.abs(codes).max(axis=-1).min() == 0  # the row of zeros
    error = np.abs(codes * scale[..., None] - matrix.reshape(3, 5, 128))
    assert (error <= scale[..., None] * 0.5001).all()


@pytest.mark.parametrize(("inputs", "tokens"), [(128, 3), (72, 3), (128, 40)], ids=["boxes", "no boxes", "many rows"])
def test_project(inputs, tokens):
    """Several axes on either side, few rows and many."""
    x, codes, scale = draw(tokens, 30, inputs)
    matrix = matrix_of(codes, scale)
    matrix = gemv.Int8Matrix(matrix.codes.reshape(5, 6, inputs), matrix.scale.reshape(5, 6))
    (actual,) = gemv.project(jnp.asarray(x, jnp.float32).reshape(tokens, 2, inputs // 2), matrix, contract=2)
    assert actual.shape == (tokens, 5, 6)
    assert relative(actual.reshape(tokens, 30), definition(x, codes, scale)) < 1e-6


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "cut"),
    [
        (3, 136, 512, {}),
        (9, 64, 512, {"slices": 2}),
        (2, 136, 128, {"shared": False}),
        (3, 136, 512, {"height": 56}),
    ],
    ids=["overlap", "slices", "own tiles", "low tiles"],
)
def test_interpreted(tokens, outputs, inputs, cut):
    """136 rows: the last tile of 64 overlaps the one before."""
    x, codes, scale = draw(tokens, outputs, inputs)
    matrix, kind = matrix_of(codes, scale), (jnp.dtype("float32"),)
    settings = mosaic.Settings(groups=2, stages=2, blocks=2, **cut)
    run = jax.jit(lambda x, w, s: mosaic.matmuls(x, (w,), kind, INTERPRET, settings, (s,)))
    (actual,) = run(jnp.asarray(x, jnp.bfloat16).at[1].set(jnp.nan), *matrix)
    assert np.isnan(np.asarray(actual[1])).all()
    others = [row for row in range(tokens) if row != 1]
    assert relative(actual[np.array(others)], definition(x, codes, scale)[others]) < 1e-6


@pytest.mark.slow
def test_several_matrices_have_their_own_scales():
    x, codes, scale = draw(2, 264, 256)
    parts = [matrix_of(codes[rows], scale[rows]) for rows in (slice(72), slice(72, 264))]
    cut, kinds = mosaic.Settings(groups=2, stages=2, blocks=2), (jnp.dtype("float32"),) * 2
    run = jax.jit(lambda x, w, s: mosaic.matmuls(x, w, kinds, INTERPRET, cut, s))
    products = run(jnp.asarray(x, jnp.bfloat16), *zip(*parts, strict=True))
    assert relative(jnp.concatenate(products, axis=1), definition(x, codes, scale)) < 1e-6


@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(8, 28672, 7168), (1, 163840, 256), (16, 7168, 35840)])
def test_lowers_for_cuda(tokens, outputs, inputs):
    kinds = ((tokens, inputs), jnp.bfloat16), ((outputs, inputs), jnp.int8), ((outputs,), jnp.float32)
    x, codes, scale = (jax.ShapeDtypeStruct(*kind) for kind in kinds)
    run = jax.jit(lambda x, w, s: mosaic.matmuls(x, (w,), scales=(s,)))
    assert "mosaic_gpu" in run.trace(x, codes, scale).lower(lowering_platforms=("cuda",)).as_text()


def test_shallow_matrices_are_not_shared():
    assert not mosaic.settings_for([163840], 256, narrow=True).shared
    assert mosaic.settings_for([163840], 7168, narrow=True).shared


def test_kinds_are_not_mixed_in_a_launch(monkeypatch):
    monkeypatch.setattr(mosaic, "require_capability", lambda *name: None)
    x, codes, scale = draw(2, 64, 512)
    matrices = matrix_of(codes, scale), jnp.zeros((64, 512), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="of one kind"):
        mosaic.on_gpu(jnp.asarray(x, jnp.bfloat16), matrices, (jnp.dtype("float32"),) * 2)


def test_activations_become_float16_without_loss():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.choice([-1, 1], 4000) * 2 ** rng.uniform(-24, 19.9, 4000), jnp.bfloat16)
    back = np.asarray(widen.to_half(x), np.float64) * widen.HALF_SCALE
    given = np.asarray(x, np.float64)
    large = np.abs(given) >= 2.0**-10
    np.testing.assert_array_equal(back[large], given[large])
    assert np.abs(back - given).max() < 5e-7
    ends = np.asarray(widen.to_half(jnp.asarray([1e9, -1e9, np.nan], jnp.bfloat16)), np.float64)
    np.testing.assert_array_equal(ends, [65504.0, -65504.0, np.nan])
