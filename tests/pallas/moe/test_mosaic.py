"""The Mosaic GPU kernels of the experts: interpreted on small shapes, and lowered for CUDA at Kimi K3's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas import moe
from pallas.moe import mosaic_decode, mosaic_expand, mosaic_grouped
from pallas.moe.mosaic_stream import Settings
from tests.pallas.comparison import relative

INTERPRET = plgpu.InterpretGPUParams()
SCALARS = (4.0, 25.0, jnp.dtype("float32"), INTERPRET)


@pytest.fixture
def case(draw_tokens, draw_experts):
    def draw(tokens, latent, inner, experts=3, k=2):
        x, ids, weights = draw_tokens(tokens, k=k, experts=experts, latent=latent)
        arrays = jnp.asarray(x / 8, jnp.bfloat16), jnp.asarray(ids), jnp.asarray(weights)
        return arrays, draw_experts(experts=experts, latent=latent, inner=inner)

    return draw


@pytest.fixture
def check(definition):
    def compare(actual, arrays, packed, rows):
        x, ids, weights = (np.asarray(array.astype(jnp.float32)) for array in arrays)
        weights = np.where(ids < 0, 0, weights)
        expected = definition(x, np.maximum(ids, 0).astype(int), weights, packed)
        assert relative(np.asarray(actual)[rows], expected[rows]) < 4e-3

    return compare


@pytest.mark.parametrize("blocks", [1, 2])
def test_interleave_and_place_agree(blocks):
    width = 128 * blocks
    x = jnp.arange(3 * width)
    boxes = mosaic_expand.interleave(x.astype(jnp.float32)).reshape(3, width)
    where = mosaic_expand.place(np.arange(width), blocks)
    np.testing.assert_array_equal(np.sort(where), np.arange(width))
    np.testing.assert_array_equal(boxes[:, where], x.reshape(3, width))


def test_decode_interpreted(case, check):
    """Shared experts are read once, a slot may be empty, and a NaN stays in its row."""
    (x, ids, weights), packed = case(3, 128, 128)
    ids = jnp.array([[0, 2], [2, 1], [2, -1]], jnp.int32)
    arrays = (x.at[1].set(jnp.nan), ids, weights)
    cut = Settings(groups=1, split=1, stages=2, blocks=1)
    run = jax.jit(lambda *args: mosaic_decode.experts(*args, *SCALARS, (cut, cut)))
    actual = run(*arrays, packed)
    assert np.isnan(actual[1]).all()
    check(actual, (x, ids, weights), packed, [0, 2])


@pytest.mark.slow
def test_decode_interpreted_with_blocks_of_tokens(case, check):
    """Six tokens and three experts, some of which have more tokens than a block; tiny activations lose nothing."""
    (x, ids, weights), packed = case(6, 256, 128)
    arrays = x / 4096, ids, weights
    cut = Settings(groups=2, split=1, stages=2, blocks=1)
    run = jax.jit(lambda *args: mosaic_decode.experts(*args, *SCALARS, (cut, cut)))
    check(run(*arrays, packed), arrays, packed, slice(None))


@pytest.mark.slow
def test_decode_interpreted_with_shared_tiles(case, check):
    """Two warpgroups share three boxes of every tile, so that they take turns in having one more."""
    arrays, packed = case(2, 768, 256)
    shared, own = (Settings(groups=2, split=split, stages=2, blocks=1) for split in (2, 1))
    run = jax.jit(lambda *args: mosaic_decode.experts(*args, *SCALARS, (shared, own)))
    check(run(*arrays, packed), arrays, packed, slice(None))


@pytest.mark.slow
def test_grouped_interpreted(case, check):
    (x, ids, weights), packed = case(13, 256, 128, experts=4)
    ids = ids.at[3, 1].set(-1).at[5].set(-1)
    x = x.at[7].set(jnp.nan)
    cut = mosaic_grouped.Settings(stages=2, blocks=2)
    run = jax.jit(lambda *args: mosaic_grouped.experts(*args, *SCALARS, cut))
    actual = run(x, ids, weights, packed)
    assert np.isnan(actual[7]).all()
    assert not actual[5].any()
    check(actual, (x.at[7].set(0), ids, weights), packed, [n for n in range(13) if n != 7])


def abstract(tokens, inner, experts=896, latent=3584, k=16):
    def spec(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    packed = moe.PackedExperts(
        spec(jnp.uint8, experts, 2, inner, latent // 2),
        spec(jnp.uint8, experts, 2, inner, latent // 32),
        spec(jnp.uint8, experts, latent, inner // 2),
        spec(jnp.uint8, experts, latent, inner // 32),
    )
    tokens_spec = spec(jnp.bfloat16, tokens, latent), spec(jnp.int32, tokens, k), spec(jnp.float32, tokens, k)
    return (*tokens_spec, packed)


@pytest.mark.parametrize(
    ("kernel", "tokens", "inner"),
    [(mosaic_decode, 1, 3072), (mosaic_decode, 16, 384), (mosaic_decode, 64, 384), (mosaic_grouped, 8192, 3072)],
    ids=["decode", "decode16", "decode64", "grouped"],
)
def test_lowers_for_cuda(kernel, tokens, inner):
    run = jax.jit(lambda *args: kernel.experts(*args, 4.0, 25.0))
    text = run.trace(*abstract(tokens, inner)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 2
    assert ("moe_arrange" in text) == (tokens == 16)


@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 40])
def test_decode_plan(tokens, draw_tokens):
    """Every pair is one column of a block of its expert."""
    ids = draw_tokens(tokens, k=4)[1]
    if tokens > 1:
        ids[0, 1] = -1
    plan = jax.jit(mosaic_decode.plan, static_argnums=1)(jnp.asarray(ids), 6)
    used, pair, expert = int(plan.used[0]), np.asarray(plan.pair), np.asarray(plan.expert)
    load = np.bincount(ids[ids >= 0], minlength=6)
    if tokens > 1:  # as few blocks as hold four tokens each
        np.testing.assert_array_equal(np.bincount(expert[:used], minlength=6), -(-load // 4))
        assert (pair[used:] < 0).all()
    found = sorted((expert[block], pair[block, column]) for block, column in np.argwhere(pair[:used] >= 0))
    assert found == sorted((ids[token, slot], 4 * token + slot) for token, slot in np.argwhere(ids >= 0))
    if tokens <= 4:  # activations are the same for all blocks
        assert all(pair[block, column] // 4 == column for block, column in np.argwhere(pair >= 0))


def test_blocks_of_tokens_follow_the_load():
    sizes = [mosaic_grouped.block_tokens(tokens * 16, 896) for tokens in (17, 256, 1000, 2048, 65536)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 8
    # 146 tokens an expert: two blocks of 80 leave less empty than two of 128.
    assert mosaic_grouped.block_tokens(8192 * 16, 896) == 80


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, packed: (x.astype(jnp.float32), packed), "bfloat16"),
        (lambda x, packed: (x, moe.DenseExperts(jnp.zeros((1, 2, 128, 128)), jnp.zeros((1, 128, 128)))), "dense"),
    ],
)
def test_refusals_name_the_reason(change, reason, case):
    (x, *_), packed = case(1, 128, 128)
    with pytest.raises(NotImplementedError, match=reason):
        mosaic_decode.require_supported(*change(x, packed))


def test_decode_refuses_widths_that_are_no_whole_blocks(draw_experts):
    with pytest.raises(NotImplementedError, match="multiples of 128, got 64 and 96"):
        mosaic_decode.require_supported(jnp.zeros((1, 64), jnp.bfloat16), draw_experts())
