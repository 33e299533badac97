"""The Mosaic GPU kernels: interpreted on the CPU on small shapes, and lowered for CUDA at Kimi K3's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas import kda
from pallas.kda import mosaic, mosaic_affine, mosaic_decode, mosaic_prefill, mosaic_verify, xla
from pallas.kda.shapes import HEAD_DIM, HEADS, PREFILL_TOKENS, VERIFY_TOKENS

BOUND, EPS = -5.0, 1e-5
INTERPRET = plgpu.InterpretGPUParams()


def pools(case, slot, slots=5):
    rng = np.random.default_rng(1)
    state = jnp.asarray(rng.standard_normal((slots, *case.state.shape[1:])), jnp.float32)
    window = jnp.asarray(rng.standard_normal((slots, *case.window.shape[1:])), case.window.dtype)
    return state.at[slot].set(case.state), window.at[slot].set(case.window)


def decode(case, token, state, window, slot, fresh):
    inputs = [x[:, token] for x in case.tokens[:3]]
    run = jax.jit(lambda *args: mosaic_decode.decode(*args, BOUND, EPS, INTERPRET))
    return run(*inputs, case.tokens[3], state, window, slot, fresh)


@pytest.mark.parametrize("blocks", [132, 1])
def test_decode_interpreted(blocks, make_case, float64_recurrence, close, monkeypatch):
    """With one block, it walks over all rows, the inert one included."""
    monkeypatch.setattr(mosaic_decode, "MULTIPROCESSORS", blocks)
    case = make_case(3, 1, 1, HEAD_DIM, jnp.bfloat16)
    slot, fresh = jnp.array([4, 0, 2], jnp.int32), jnp.array([False, False, True])
    state, window = pools(case, slot)
    state, window = state.at[2].set(jnp.nan), window.at[2].set(jnp.nan)
    output, new_state, new_window = decode(case, 0, state, window, slot, fresh)
    case.state, case.window = case.state.at[2].set(0), case.window.at[2].set(0)
    expected = float64_recurrence(case, [1, 0, 1])
    close(output, expected["output"][:, 0], 1e-2, "output")
    for row in (0, 2):
        close(new_state[slot[row]], expected["states"][row, -1], 1e-2, "state")
        close(new_window[slot[row]], expected["windows"][row, -1], 0, "window")
    for untouched in (0, 1, 3):
        assert np.array_equal(new_state[untouched], state[untouched])
        assert np.array_equal(new_window[untouched], window[untouched])


def test_verify_and_commit_interpreted(make_case):
    case = make_case(2, 3, 1, HEAD_DIM, jnp.bfloat16)
    slot, accepted = jnp.array([1, 3], jnp.int32), jnp.array([3, 2], jnp.int32)
    state, window = pools(case, slot)
    verify = jax.jit(lambda *args: mosaic_verify.verify(*args, BOUND, EPS, INTERPRET))
    result = verify(*case.tokens, state, window, slot, accepted)
    assert not np.any(result.output[1, 2])
    assert not any(np.any(x[1, 2]) for x in result.records)
    commit = jax.jit(lambda *args: mosaic_verify.commit(*args, INTERPRET))
    committed = commit(result.records, case.tokens[0], state, window, slot, accepted)
    for token in range(3):
        live = jnp.where(token < accepted, slot, 0)
        output, state, window = decode(case, token, state, window, live, jnp.zeros(2, bool))
        assert np.array_equal(output, result.output[:, token])
    assert np.array_equal(committed.window_pool, window)
    np.testing.assert_allclose(committed.state_pool, state, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("gates", "keys"), [("random", "random"), ("bound", "random"), ("slow", "collinear")])
@pytest.mark.slow
def test_prefill_interpreted_regimes(gates, keys, make_case, float64_recurrence, close):
    case = make_case(1, 64, 1, HEAD_DIM, jnp.bfloat16, gates=gates, keys=keys)
    check_prefill(case, [61], None, float64_recurrence, close)


def test_prefill_interpreted(make_case, float64_recurrence, close):
    case = make_case(1, 70, 1, HEAD_DIM, jnp.bfloat16, gates="mixed")
    case.tokens = (*(x.at[:, 67:].set(jnp.nan) for x in case.tokens[:3]), case.tokens[3])
    check_prefill(case, [67], jnp.array([[64, 33]], jnp.int32), float64_recurrence, close)


def last_state(result):
    return result["states"][:, -1]


def check_prefill(case, lengths, boundaries, float64_recurrence, close):
    run = jax.jit(lambda *args: mosaic_prefill.prefill(*args, BOUND, EPS, INTERPRET))
    actual = run(*case.args(), jnp.array(lengths, jnp.int32), boundaries)
    expected = float64_recurrence(case, lengths)
    least = float64_recurrence(case, lengths, operands=jnp.bfloat16)
    for name, value, of in (("output", actual.output, lambda x: x["output"]), ("state", actual.state, last_state)):
        # Twice what one rounding of the operands alone does to this input, or the usual bound if that is larger.
        error = np.linalg.norm(of(least) - of(expected)) / np.linalg.norm(of(expected))
        close(value, of(expected), max(1e-2, 2 * error), name)
    close(actual.window, expected["windows"][:, -1], 0, "window")
    if boundaries is not None:
        wanted = np.stack([expected["states"][row, boundaries[row]] for row in range(len(lengths))])
        close(actual.boundary_states, wanted, 1e-2, "boundary states")


@pytest.mark.slow
def test_segments_compose_interpreted(make_case, float64_recurrence, close, monkeypatch):
    """Two segments of a row, the second only half used, run from the states that the affine maps give them."""
    monkeypatch.setattr(mosaic_prefill, "segment_count", lambda sequences, tokens: 2)
    case = make_case(1, 128, 1, HEAD_DIM, jnp.bfloat16, gates="slow")
    check_prefill(case, [100], jnp.array([[32, 77]], jnp.int32), float64_recurrence, close)


@pytest.mark.slow
def test_affine_interpreted(make_case, float64_recurrence, close):
    case = make_case(1, 64, 1, HEAD_DIM, jnp.bfloat16, gates="slow")
    length = jnp.array([50], jnp.int32)
    run = jax.jit(lambda *args: mosaic_prefill.affine(*args, BOUND, INTERPRET))
    pair = run(*case.tokens, case.window, length)
    applied = jnp.matmul(pair.transition, case.state, precision="highest") + pair.local_state
    close(applied, float64_recurrence(case, [50])["states"][:, -1], 1e-2, "state")


@pytest.mark.parametrize(
    ("sequences", "tokens", "segments"),
    [(96, 8192, 1), (12, 8192, 6), (1, 8192, 16), (12, 1500, 1), (48, 8192, 1), (200, 64, 1)],
)
def test_segments_fill_the_chip(sequences, tokens, segments):
    assert mosaic_prefill.segment_count(sequences, tokens) == segments
    assert (segments - 1) * sequences * 2 <= 132


def test_start_states_compose_the_maps_interpreted(close):
    rng = np.random.default_rng(0)
    state, maps = rng.standard_normal((1, 1, HEAD_DIM, HEAD_DIM)), rng.standard_normal((1, 3, 2, 1, HEAD_DIM, HEAD_DIM))
    run = jax.jit(lambda *args: mosaic_affine.start_states(*args, INTERPRET))
    starts = run(jnp.asarray(state, jnp.float32), jnp.asarray(maps, jnp.float32))
    for segment in range(4):
        close(starts[:, segment], state, 5e-5, f"start of segment {segment}")
        if segment == 3:
            return
        state = state @ maps[:, segment, mosaic_affine.TRANSITION] + maps[:, segment, mosaic_affine.LOCAL]


@pytest.mark.slow
def test_gradients_are_the_portable_form_s(make_case):
    """The kernel itself has no derivative; here the portable form stands for it."""
    case = make_case(1, 20, 1, 32)
    length, boundaries = jnp.array([17], jnp.int32), jnp.array([[5, 17]], jnp.int32)
    wrapped = mosaic.differentiable(lambda *args: xla.prefill(*args))

    def gradients(op):
        def loss(*floats):
            return sum(jnp.sum(x**2) for x in jax.tree.leaves(op(*floats, length, boundaries, BOUND, EPS)))

        return jax.tree.leaves(jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4, 5)))(*case.args()))

    for a, b in zip(gradients(wrapped), gradients(xla.prefill)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def shapes(rows, tokens, slots=None):
    """Abstract arguments up to the pools (or state and window)."""
    array = jax.ShapeDtypeStruct
    lead = (rows,) if tokens is None else (rows, tokens)
    f32, bf16 = jnp.float32, jnp.bfloat16
    weights = kda.KdaWeights(
        array((4, HEADS, 3, HEAD_DIM), f32),
        array((HEADS,), f32),
        array((HEADS, HEAD_DIM), f32),
        array((HEAD_DIM,), f32),
    )
    first = slots or rows
    return (
        array((*lead, HEADS, 4, HEAD_DIM), bf16),
        array((*lead, HEADS, HEAD_DIM), bf16),
        array((*lead, HEADS), bf16),
        weights,
        array((first, HEADS, HEAD_DIM, HEAD_DIM), f32),
        array((first, 3, HEADS, 3, HEAD_DIM), bf16),
    )


def lowers(function, *args):
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(("rows", "slots"), [(1, 4), (64, 700)])
def test_decode_lowers_for_cuda(rows, slots):
    """700 slots of 96 heads are 4.1 GiB: offsets pass 2^31."""
    ids, flags = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), bool)
    lowers(lambda *args: mosaic_decode.decode(*args, BOUND, EPS), *shapes(rows, None, slots), ids, flags)


def test_verify_and_commit_lower_for_cuda():
    ids = jax.ShapeDtypeStruct((2,), jnp.int32)
    args = shapes(2, VERIFY_TOKENS, 8)
    lowers(lambda *args: mosaic_verify.verify(*args, BOUND, EPS), *args, ids, ids)
    record = jax.ShapeDtypeStruct((2, VERIFY_TOKENS, HEADS, HEAD_DIM), jnp.float32)
    lowers(mosaic_verify.commit, kda.Records(record, record, record), args[0], args[4], args[5], ids, ids)


def test_prefill_lowers_for_cuda():
    ids = jax.ShapeDtypeStruct((1,), jnp.int32)
    boundaries = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    args = shapes(1, PREFILL_TOKENS)
    kernel = mosaic.differentiable(mosaic_prefill.prefill)
    lowers(lambda *args: kernel(*args, BOUND, EPS), *args, ids, boundaries)


def test_affine_lowers_for_cuda():
    qkvz, decay, beta, weights, _, window = shapes(1, PREFILL_TOKENS)
    length = jax.ShapeDtypeStruct((1,), jnp.int32)
    lowers(lambda *args: mosaic_prefill.affine(*args, BOUND), qkvz, decay, beta, weights, window, length)


@pytest.mark.parametrize(
    ("channels", "dtype", "reason"), [(64, jnp.bfloat16, "64"), (HEAD_DIM, jnp.float32, "float32")]
)
def test_refusals_carry_their_reason(channels, dtype, reason, make_case):
    case = make_case(1, 2, 1, channels, dtype)
    with pytest.raises(NotImplementedError, match=reason):
        mosaic_prefill.prefill(*case.args(), jnp.array([2], jnp.int32), None, BOUND, EPS)


def test_named_implementation_never_falls_back(make_case):
    case = make_case(1, 2, 1, HEAD_DIM, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="GPU"):
        kda.prefill(*case.args(), jnp.array([2], jnp.int32), implementation="mosaic")
