"""A whole read (add, mix, norm): the portable form, the Mosaic kernels interpreted, and both lowered for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas import attn_res
from pallas.attn_res import bench, mosaic, mosaic_read, mosaic_stream, mosaic_summary
from pallas.attn_res.shapes import HIDDEN, MOST_SOURCES, PREFILL_TOKENS, SITES
from tests.pallas.comparison import relative

EPS, NORM_EPS = 1e-5, 2e-5
INTERPRET = plgpu.InterpretGPUParams()
WIDTH = 1024


def definition(sources, prefix, output, norm, query, out_norm):
    """Float64, except that the new prefix is rounded before it is read."""
    prefix = np.asarray(prefix if output is None else prefix + output)
    values = np.stack([np.asarray(x, np.float64) for x in (*sources, prefix)])
    keys = values / np.sqrt((values**2).mean(-1, keepdims=True) + EPS)
    scores = keys @ (np.asarray(norm, np.float64) * np.asarray(query, np.float64))
    weights = np.exp(scores - scores.max(0))
    mixed = (weights[..., None] * values).sum(0) / weights.sum(0)[..., None]
    scaled = mixed / np.sqrt((mixed**2).mean(-1, keepdims=True) + NORM_EPS)
    return prefix, scaled * np.asarray(out_norm, np.float64)


def draw(sources, tokens=3, width=WIDTH, dtype=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    vectors = [jnp.asarray(2 * normal(tokens, width), dtype) for _ in range(sources + 2)]
    norm, out_norm = (jnp.asarray(1 + 0.1 * normal(width), dtype) for _ in range(2))
    query = jnp.asarray(normal(width) * 2 / np.sqrt(width), dtype)
    return tuple(vectors[:-2]), *vectors[-2:], norm, query, out_norm


def in_blocks(*args):
    """Interpretation knows no clusters: all channels in one block."""
    run = lambda *args: mosaic_read.read(*args, EPS, NORM_EPS, interpret=INTERPRET)  # noqa: E731
    return jax.jit(run)(*args)


def streamed(*args):
    return jax.jit(lambda *args: mosaic_stream.read(*args, EPS, NORM_EPS, interpret=INTERPRET))(*args)


def portable(*args):
    return attn_res.read(*args, eps=EPS, norm_eps=NORM_EPS, implementation="xla")


def check(read, args, bound=2**-7):
    expected = definition(*args)
    actual = read(*args)
    assert np.array_equal(actual.prefix, expected[0])
    assert relative(actual.normed, expected[1]) < bound
    return actual


@pytest.mark.parametrize("sources", [0, 1, 8])
def test_portable_read(sources):
    check(portable, draw(sources, dtype=jnp.float32), 1e-6)


@pytest.mark.parametrize(("read", "count"), [(in_blocks, 8), (streamed, 3)])
def test_interpreted_reads(read, count, monkeypatch):
    """Among the sources one of zeros and one of huge norm; a prefix cut out of a wider array."""
    monkeypatch.setattr(mosaic_stream, "BLOCKS", 2)
    sources, prefix, output, *weights = draw(count)
    wide = jnp.concatenate([prefix[:, None], jnp.full_like(prefix, jnp.nan)[:, None]], axis=1)
    sources = (jnp.zeros_like(prefix), *sources[1:-1], sources[-1] * jnp.bfloat16(1e15))
    args = (sources, wide[:, 0], output, *weights)
    actual = check(read, args)
    order = np.array([2, 0, 1])
    moved = read(*jax.tree.map(lambda x: x[order] if x.ndim == 2 else x, args))
    assert np.array_equal(moved.normed, actual.normed[order])


@pytest.mark.slow
@pytest.mark.parametrize("read", [in_blocks, streamed])
@pytest.mark.parametrize("sources", [0, 1, 3])
def test_interpreted_reads_without_an_output(read, sources):
    sources, prefix, _, *weights = draw(sources, tokens=2)
    check(read, (sources, prefix, None, *weights))


@pytest.mark.slow
@pytest.mark.parametrize("read", [in_blocks, streamed])
def test_equal_scores_interpreted(read):
    sources, prefix, output, norm, query, out_norm = draw(8, tokens=1)
    args = (sources, prefix, output, norm, jnp.zeros_like(query), out_norm)
    check(read, args)


def test_a_read_is_a_sum_a_mix_and_a_norm():
    sources, prefix, output, norm, query, out_norm = draw(3, dtype=jnp.float32)
    actual = portable(sources, prefix, output, norm, query, out_norm)
    mixed = attn_res.mix(sources, prefix + output, norm, query)
    scale = np.sqrt(np.mean(np.square(mixed), axis=-1, keepdims=True) + NORM_EPS)
    assert relative(actual.normed, mixed / scale * out_norm[None]) < 1e-6


@pytest.mark.parametrize(
    ("kernel", "tokens", "with_output"),
    [(mosaic_read, 8, True), (mosaic_stream, PREFILL_TOKENS, False)],
)
def test_lowers_for_cuda(kernel, tokens, with_output):
    row, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((tokens, HIDDEN), (HIDDEN,)))
    args = ((row,) * MOST_SOURCES, row, row if with_output else None, weight, weight, weight)
    traced = jax.jit(lambda *args: kernel.read(*args, EPS, NORM_EPS)).trace(*args)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_gradients_are_the_portable_form_s(monkeypatch):
    """The kernel itself has no derivative; here the portable form stands for its values."""
    monkeypatch.setattr(mosaic.mosaic_read, "read", lambda *args: portable(*args[:6]))
    monkeypatch.setattr(mosaic.mosaic_stream, "read", lambda *args: portable(*args[:6]))
    args = draw(2, width=64, dtype=jnp.float32)

    def gradients(read):
        loss = lambda *args: sum(jnp.sum(x**2) for x in read(*args))  # noqa: E731
        return jax.tree.leaves(jax.jit(jax.grad(loss, argnums=tuple(range(6))))(*args))

    kernel = gradients(lambda *args: mosaic.differentiable_read(*args, EPS, NORM_EPS))
    for a, b in zip(kernel, gradients(portable), strict=True):
        assert relative(a, b) < 1e-5


@pytest.mark.parametrize(
    ("kernel", "sources", "width", "dtype", "reason"),
    [
        (mosaic_read, 1, HIDDEN, jnp.float32, "float32"),
        (mosaic_stream, 1, HIDDEN, jnp.float32, "float32"),
        (mosaic_read, 1, 768, jnp.bfloat16, "768"),
        (mosaic_stream, 1, 768, jnp.bfloat16, "768"),
        (mosaic_read, 40, HIDDEN, jnp.bfloat16, "40"),
    ],
)
def test_refusals_carry_their_reason(kernel, sources, width, dtype, reason):
    row, weight = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, width), (width,)))
    args = ((row,) * sources, row, row, weight, weight, weight)
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(lambda *args: kernel.read(*args, EPS, NORM_EPS), *args)


def test_interpreted_phase_one_and_phase_two_are_a_read():
    """Four reads of two tokens in two groups; a source of zeros and one of huge norm among the three."""
    sources, prefix, _, *_ = draw(3, tokens=2)
    sources = (jnp.zeros_like(prefix), *sources[1:-1], sources[-1] * jnp.bfloat16(1e15))
    rng = np.random.default_rng(3)
    norms, queries = (jnp.asarray(rng.standard_normal((4, WIDTH)) / scale, jnp.bfloat16) for scale in (1, 16))
    run = lambda *args: mosaic_summary.summarize(*args, EPS, groups=2, interpret=INTERPRET)  # noqa: E731
    summary = jax.jit(run)(sources, norms, queries)
    for site in range(4):
        actual = attn_res.merge(summary, site, prefix, norms[site], queries[site])
        values = np.stack([np.asarray(x, np.float64) for x in (*sources, prefix)])
        keys = values / np.sqrt((values**2).mean(-1, keepdims=True) + EPS)
        scores = keys @ (np.asarray(norms[site], np.float64) * np.asarray(queries[site], np.float64))
        weights = np.exp(scores - scores.max(0))
        assert relative(actual, (weights[..., None] * values).sum(0) / weights.sum(0)[..., None]) < 2**-7


def test_phase_one_lowers_for_cuda():
    row, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, HIDDEN), (SITES, HIDDEN)))
    traced = jax.jit(lambda *args: mosaic_summary.summarize(*args, EPS)).trace((row,) * MOST_SOURCES, weight, weight)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("sources", "tokens", "sites", "reason"),
    [(9, 1, 24, "got 9"), (8, 65, 24, "65"), (8, 1, 20, "20"), (0, 1, 8, "got 0")],
)
def test_phase_one_refuses_with_a_reason(sources, tokens, sites, reason):
    row, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((tokens, HIDDEN), (sites, HIDDEN)))
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(lambda *args: mosaic_summary.summarize(*args, EPS), (row,) * sources, weight, weight)


def test_a_named_kernel_refuses_without_a_gpu():
    with pytest.raises(NotImplementedError, match="GPU"):
        attn_res.read(*draw(1), implementation="mosaic")


@pytest.mark.slow
def test_the_gate_of_the_benchmark_is_green():
    assert all(check.passed for check in bench.gate("xla"))
