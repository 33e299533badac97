"""The kernel of one token: interpreted on small shapes, cut and lowered for CUDA at Kimi K3's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas import moe
from pallas.moe import mosaic_token
from pallas.moe.mosaic_stream import Settings
from tests.pallas.comparison import relative

INTERPRET = plgpu.InterpretGPUParams()


@pytest.mark.parametrize(
    ("inner", "parts", "groups"),
    [(128, 2, 2), pytest.param(384, 1, 3, marks=pytest.mark.slow), pytest.param(256, 1, 2, marks=pytest.mark.slow)],
)
def test_interpreted(inner, parts, groups, draw_tokens, draw_experts, definition):
    """Parts of 64, 384 and 256 inputs, which lie in lines of 32, 64 and 128 bytes; one slot has no expert."""
    x, ids, weights = draw_tokens(1, k=3, experts=4, latent=256)
    packed = draw_experts(experts=4, latent=256, inner=inner)
    x, ids = jnp.asarray(x / 8, jnp.bfloat16), jnp.asarray(ids).at[0, 1].set(-1)
    settings = Settings(groups=groups, split=groups, stages=2)
    down = mosaic_token.down_of(inner // parts, 256, 16384, groups)
    options = {"dtype": jnp.dtype("float32"), "interpret": INTERPRET, "settings": settings, "down": down}
    run = jax.jit(lambda *args: mosaic_token.experts(*args, 4.0, 25.0, **options))
    actual = run(x, ids, jnp.asarray(weights), packed)
    kept = np.where(np.asarray(ids) < 0, 0, weights)
    expected = definition(np.asarray(x.astype(jnp.float32)), np.maximum(np.asarray(ids), 0), kept, packed)
    assert relative(np.asarray(actual), expected) < 4e-3


@pytest.mark.parametrize(("inner", "blocks", "part", "rows"), [(3072, 128, 384, 64), (384, 96, 64, 448)])
def test_cut_for_kimi(inner, blocks, part, rows):
    """At most as many blocks as multiprocessors."""
    down = mosaic_token.cut_of(inner, 3584, 16)
    assert (16 * inner // down.part, down.part, down.rows) == (blocks, part, rows)
    assert down.copies * down.lines * down.line * down.rows // down.copies == down.part // 2 * down.rows


@pytest.mark.parametrize("inner", [128, 640, 896, 1152, 2048])
def test_every_width_has_a_cut(inner):
    for latent in (128, 3584):
        down = mosaic_token.cut_of(inner, latent, 16)
        assert inner % down.part == 0
        assert latent % down.rows == 0
        assert down.lines * down.line * 2 == down.part
        assert down.room * down.held * down.line <= 16384


@pytest.mark.parametrize("inner", [384, 3072])
def test_lowers_for_cuda(inner):
    spec = jax.ShapeDtypeStruct
    shapes = (896, 2, inner, 1792), (896, 2, inner, 112), (896, 3584, inner // 2), (896, 3584, inner // 32)
    packed = moe.PackedExperts(*(spec(shape, jnp.uint8) for shape in shapes))
    token = spec((1, 3584), jnp.bfloat16), spec((1, 16), jnp.int32), spec((1, 16), jnp.float32)
    run = jax.jit(partial(mosaic_token.experts, beta=4.0, linear_beta=25.0))
    assert "moe_token" in run.trace(*token, packed).lower(lowering_platforms=("cuda",)).as_text()
