"""The skinny product: portable, interpreted, and lowered for CUDA at Kimi K3's shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas import gemv
from pallas.gemv import mosaic
from tests.pallas.comparison import relative

INTERPRET = plgpu.InterpretGPUParams()


def draw(tokens, outputs, inputs, dtype=jnp.bfloat16):
    rng = np.random.default_rng(tokens)
    x, weights = rng.standard_normal((tokens, inputs)), rng.standard_normal((outputs, inputs))
    return jnp.asarray(x, dtype), jnp.asarray(weights, dtype)


def definition(x, weights):
    return np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-6), (jnp.bfloat16, 3e-3)])
def test_matmul(dtype, bound):
    x, weights = draw(3, 40, 72, dtype)
    actual = gemv.matmul(x, weights)
    assert actual.dtype == dtype
    assert relative(actual, definition(x, weights)) < bound


@pytest.mark.parametrize("tokens", [2, 40])
def test_project_contracts_several_axes(tokens):
    """Few rows and many take different ways to the same sum."""
    x, weights = draw(tokens, 30, 24, jnp.float32)
    (actual,) = gemv.project(x.reshape(2, tokens // 2, 4, 6), weights.reshape(5, 3, 2, 4, 6), contract=2)
    assert actual.shape == (2, tokens // 2, 5, 3, 2)
    assert relative(actual.reshape(tokens, 30), definition(x, weights)) < 1e-6


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "cut"),
    [(3, 136, 256, {}), (9, 64, 512, {"slices": 2}), (3, 136, 256, {"height": 40})],
    ids=["overlap", "slices", "low tiles"],
)
def test_interpreted(tokens, outputs, inputs, cut):
    """136 rows: the last tile of 64 overlaps the one before, and that of 40 as well."""
    x, weights = draw(tokens, outputs, inputs)
    cut = mosaic.Settings(groups=2, stages=2, blocks=2, **cut)
    actual = jax.jit(lambda x, w: mosaic.matmuls(x, (w,), None, INTERPRET, cut))(x.at[1].set(jnp.nan), weights)[0]
    assert np.isnan(np.asarray(actual[1], np.float32)).all()
    others = [row for row in range(tokens) if row != 1]
    assert relative(actual[np.array(others)], definition(x, weights)[others]) < 3e-3


@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(1, 49376, 7168), (16, 2112, 7168), (8, 7168, 12288)])
def test_lowers_for_cuda(tokens, outputs, inputs):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((tokens, inputs), (outputs, inputs))]
    text = jax.jit(lambda x, w: mosaic.matmuls(x, (w,))).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_several_matrices_in_one_pass():
    x, weights = draw(2, 200, 256)
    parts = weights[:64], weights[64:200]
    cut = mosaic.Settings(groups=2, stages=2, blocks=2)
    kinds = jnp.dtype("float32"), jnp.dtype("bfloat16")
    first, second = jax.jit(lambda x, *w: mosaic.matmuls(x, w, kinds, INTERPRET, cut))(x, *parts)
    assert (first.dtype, second.dtype) == kinds
    assert relative(first, definition(x, parts[0])) < 1e-6
    assert relative(second, definition(x, parts[1])) < 3e-3


@pytest.mark.parametrize(
    ("rows", "depth", "height", "slices"),
    [(49376, 7168, 64, 1), (7168, 12288, 56, 1), (6288, 7168, 48, 1), (2112, 7168, 64, 4)],
)
def test_every_block_gets_as_many_tiles(rows, depth, height, slices):
    """132 blocks: 772, 128, 131, and 33 tiles of four slices."""
    cut = mosaic.settings_for([rows], depth)
    assert (cut.height, cut.slices) == (height, slices)


def test_warpgroups_take_tiles_of_their_own():
    x, weights = draw(3, 136, 128)
    cut = mosaic.Settings(groups=2, stages=2, blocks=2, shared=False)
    (actual,) = jax.jit(lambda x, w: mosaic.matmuls(x, (w,), None, INTERPRET, cut))(x, weights)
    assert relative(actual, definition(x, weights)) < 3e-3


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "dtype", "reason"),
    [
        (17, 64, 256, jnp.bfloat16, "up to 16 rows"),
        (1, 64, 256, jnp.float32, "bfloat16"),
        (1, 60, 256, jnp.bfloat16, "at least 64"),
        (1, 64, 1000, jnp.bfloat16, "multiples of 256"),
    ],
)
def test_refusals_name_the_reason(tokens, outputs, inputs, dtype, reason):
    x, weights = draw(tokens, outputs, inputs, dtype)
    with pytest.raises(NotImplementedError, match=reason):
        mosaic.matmuls(x, (weights,))


def test_a_named_kernel_refuses_without_a_gpu():
    with pytest.raises(NotImplementedError, match="GPU"):
        gemv.matmul(*draw(1, 64, 256), implementation="mosaic")
