"""Products that are finished before they are stored, and products by head, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas import gemv
from pallas.gemv import finish, finished, int8, mosaic, widen
from tests.pallas.comparison import relative

INTERPRET = plgpu.InterpretGPUParams()
TOKENS, DEPTH = 8, 256
RNG = np.random.default_rng(3)


def bf16(*shape):
    """Random numbers that bfloat16 holds."""
    return np.asarray(jnp.asarray(RNG.standard_normal(shape), jnp.bfloat16), np.float64)


def draw(rows):
    """Activations, a matrix in 8 bits, and their product."""
    x, codes = bf16(TOKENS, DEPTH), RNG.integers(-127, 128, (rows, DEPTH))
    scale = (RNG.uniform(0.5, 2.0, rows) / 1000).astype(np.float32)
    matrix = gemv.Int8Matrix(int8.interleave(jnp.asarray(codes, jnp.int8)), jnp.asarray(scale))
    return jnp.asarray(x / 16, jnp.float16), matrix, x @ codes.T * scale.astype(np.float64)


def run(x, matrix, kind, operands, **cut):
    settings = mosaic.Settings(groups=2, stages=1, blocks=2, **cut)
    call = jax.jit(lambda x, matrix, operands: finished.finished(x, matrix, kind, operands, settings, INTERPRET))
    return [np.asarray(out, np.float64) for out in call(x, matrix, operands)]


def test_residual_and_next_norm():
    x, matrix, product = draw(96)
    stream, weights = bf16(TOKENS, 96), bf16(96)
    operands = jnp.asarray(stream, jnp.bfloat16), jnp.asarray(weights, jnp.bfloat16)
    after, half, squares = run(x, matrix, finish.Residual(), operands, height=48)
    assert relative(after, stream + product) < 3e-3
    assert relative(half * 16, after * weights) < 5e-4
    assert squares.shape == (2, TOKENS)
    assert relative(squares, np.square(after).reshape(TOKENS, 2, 48).sum(axis=2).T) < 1e-6


def test_gate_and_up_in_turn():
    x, matrix, product = draw(128)
    squares = RNG.uniform(0.1, 9.0, (4, TOKENS)).astype(np.float32)
    (half,) = run(x, matrix, finish.Gated(1e-5), (jnp.asarray(squares),))
    pairs = product / np.sqrt(squares.sum(axis=0, dtype=np.float64) / DEPTH + 1e-5)[:, None]
    gate, up = pairs[:, 0::2], pairs[:, 1::2]
    assert relative(half * 16, gate / (1 + np.exp(-gate)) * up) < 5e-4


@pytest.mark.slow
def test_last_channels_of_heads_are_rotated():
    x, matrix, product = draw(144)
    angle = RNG.uniform(0, 6, (TOKENS, 8))
    tables = jnp.asarray(np.concatenate([np.cos(angle), np.sin(angle)]), jnp.float32)
    (query,) = run(x, matrix, finish.Rotated(own=32, width=48), (tables,), height=48)
    heads = product.reshape(TOKENS, 3, 48)
    turned = (heads[..., 32::2] + 1j * heads[..., 33::2]) * np.exp(1j * angle)[:, None]
    heads[..., 32::2], heads[..., 33::2] = turned.real, turned.imag
    assert relative(query, heads.reshape(TOKENS, -1)) < 3e-3


@pytest.mark.parametrize(
    ("shared", "dtype", "factor"),
    [(False, jnp.float32, 1), pytest.param(True, jnp.float16, widen.HALF_SCALE, marks=pytest.mark.slow)],
    ids=["own tiles", "float16"],
)
def test_heads_have_inputs_of_their_own(shared, dtype, factor):
    """Of 192 channels a head's matrix reads 128; float16 is a sixteenth."""
    x, matrices = bf16(TOKENS, 2 * 192), bf16(2, 64, 128)
    expected = np.einsum("thk,hnk->thn", x.reshape(TOKENS, 2, 192)[..., :128], matrices).reshape(TOKENS, -1)
    given = jnp.asarray(x, jnp.bfloat16), jnp.asarray(matrices, jnp.bfloat16)
    settings = mosaic.Settings(groups=2, stages=1, blocks=1, shared=shared)
    actual = jax.jit(lambda *given: finished.by_head(*given, dtype, settings, INTERPRET))(*given)
    assert relative(np.asarray(actual, np.float64) * factor, expected) < 5e-4


def test_parts_of_the_depth_are_one_turn():
    """33 tiles of 64 outputs for 132 blocks are cut into four parts."""
    cut = finished.one_turn((1536, 576), 7168)
    assert (cut.slices, cut.groups, 7168 % cut.unit(narrow=True)) == (4, 2, 0)


@pytest.mark.parametrize(("rows", "depth"), [(1920, 1536), (3072, 7168), (768, 512)])
@pytest.mark.parametrize("whole", [True, False])
def test_sums_that_are_finished_are_those_of_the_whole_depth(rows, depth, whole):
    """However few tiles or inputs there are; and all warpgroups of a block finish a tile together."""
    other = mosaic.settings_for([rows], depth, narrow=True)
    assert other.slices > 1 or not other.shared
    cut = mosaic.settings_for([rows], depth, narrow=True, finished=True, whole=whole)
    assert (cut.slices, cut.shared) == (1, True)
    assert not whole or rows % cut.height == 0


def test_what_is_not_served_is_refused():
    x, matrix, _ = draw(96)
    for given, kind, cut, reason in (
        (x.astype(jnp.bfloat16), finish.Normed(1e-5), {}, "float16, got 8 of bfloat16"),
        (x, finish.Residual(), {"height": 64}, "none may overlap, got 256 and 96"),
    ):
        settings = mosaic.Settings(groups=2, stages=1, blocks=2, **cut)
        with pytest.raises(NotImplementedError, match=reason):
            finished.finished(given, matrix, kind, settings=settings)
