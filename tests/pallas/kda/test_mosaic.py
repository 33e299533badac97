"""The Mosaic GPU kernels: interpreted on the CPU on small shapes, and lowered for CUDA at Kimi K3's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas import kda
from pallas.kda import (
    mosaic,
    mosaic_affine,
    mosaic_commit,
    mosaic_decode,
    mosaic_decode_cluster,
    mosaic_prefill,
    mosaic_verify,
    mosaic_verify_cluster,
    xla,
)
from pallas.kda.shapes import HEAD_DIM, HEADS, LAYERS, PREFILL_TOKENS, VERIFY_TOKENS

BOUND, EPS = -5.0, 1e-5
INTERPRET = plgpu.InterpretGPUParams()


def pools(case, slot, slots=5):
    rng = np.random.default_rng(1)
    state = jnp.asarray(rng.standard_normal((slots, *case.state.shape[1:])), jnp.float32)
    window = jnp.asarray(rng.standard_normal((slots, *case.window.shape[1:])), case.window.dtype)
    return state.at[slot].set(case.state), window.at[slot].set(case.window)


def decode(case, token, state, window, slot, fresh, module=mosaic_decode):
    inputs = [x[:, token] for x in case.tokens[:3]]
    run = jax.jit(lambda *args: module.decode(*args, BOUND, EPS, INTERPRET))
    return run(*inputs, case.tokens[3], state, window, slot, fresh)


@pytest.mark.parametrize("module", [mosaic_decode, mosaic_decode_cluster])
def test_decode_interpreted(module, make_case, float64_recurrence, close, monkeypatch):
    """The kernel for many heads has one block here, which walks over all rows, the inert one included."""
    monkeypatch.setattr(mosaic_decode, "MULTIPROCESSORS", 1)
    case = make_case(3, 1, 1, HEAD_DIM, jnp.bfloat16)
    slot, fresh = jnp.array([4, 0, 2], jnp.int32), jnp.array([False, False, True])
    state, window = pools(case, slot)
    state, window = state.at[2].set(jnp.nan), window.at[2].set(jnp.nan)
    output, new_state, new_window = decode(case, 0, state, window, slot, fresh, module)
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
    case = make_case(2, 4, 1, HEAD_DIM, jnp.bfloat16)
    slot, accepted = jnp.array([1, 3], jnp.int32), jnp.array([4, 2], jnp.int32)
    state, window = pools(case, slot)
    results = []
    for module in (mosaic_verify, mosaic_verify_cluster):
        verify = jax.jit(lambda *args, module=module: module.verify(*args, BOUND, EPS, INTERPRET))
        results.append(verify(*case.tokens, state, window, slot, accepted))
    result = results[0]
    assert all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, results)))
    assert not np.any(result.output[1, 2:])
    assert not any(np.any(x[1, 2:]) for x in result.records)
    commit = jax.jit(lambda *args: mosaic_commit.commit(*args, INTERPRET))
    committed = commit(result.records, case.tokens[0], state, window, slot, accepted)
    for token in range(4):
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


@pytest.mark.slow
def test_packed_rows_interpreted(make_case):
    """Rows of 3, 0, 65 and 64 tokens in one line equal the same rows of a [B, T] call; NaN between them stays there."""
    lengths = [3, 0, 65, 64]
    start = jnp.array([0, 64, 64, 192], jnp.int32)
    case = make_case(4, 65, 1, HEAD_DIM, jnp.bfloat16, gates="mixed")
    length = jnp.array(lengths, jnp.int32)
    line = [jnp.full((256, *x.shape[2:]), jnp.nan, x.dtype) for x in case.tokens[:3]]
    for row, count in enumerate(lengths):
        line = [x.at[start[row] : start[row] + count].set(y[row, :count]) for x, y in zip(line, case.tokens)]
    run = jax.jit(lambda *args: mosaic_prefill.prefill_packed(*args, BOUND, EPS, INTERPRET))
    packed = run(*line, case.tokens[3], case.state, case.window, start, length)
    apart = jax.jit(lambda *args: mosaic_prefill.prefill(*args, None, BOUND, EPS, INTERPRET))(*case.args(), length)
    assert np.array_equal(packed.state, apart.state)
    assert np.array_equal(packed.window, apart.window)
    expected = np.zeros((256, 1, HEAD_DIM), np.float32)
    for row, count in enumerate(lengths):
        expected[start[row] : start[row] + count] = apart.output[row, :count]
    assert np.array_equal(packed.output.astype(jnp.float32), expected)


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
    rng, shape = np.random.default_rng(0), (1, 4, 1, HEAD_DIM, HEAD_DIM)
    state, local, transition = rng.standard_normal((1, 1, HEAD_DIM, HEAD_DIM)), *rng.standard_normal((2, *shape))
    transition = transition / np.sqrt(HEAD_DIM)
    high = jnp.asarray(transition, jnp.bfloat16)
    low = jnp.asarray(transition - np.asarray(high, np.float64), jnp.bfloat16)
    maps = mosaic_affine.Maps(jnp.asarray(local, jnp.float32), jnp.stack([high, low], axis=2))
    run = jax.jit(lambda *args: mosaic_affine.start_states(*args, INTERPRET))
    starts = run(jnp.asarray(state, jnp.float32), maps)
    for segment in range(5):
        close(starts[:, segment], state, 5e-5, f"start of segment {segment}")
        if segment < 4:
            state = state @ transition[:, segment] + local[:, segment]


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
    for module in (mosaic_decode, mosaic_decode_cluster):
        lowers(lambda *args, module=module: module.decode(*args, BOUND, EPS), *shapes(rows, None, slots), ids, flags)


def test_verify_lowers_for_cuda():
    ids = jax.ShapeDtypeStruct((2,), jnp.int32)
    for module in (mosaic_verify, mosaic_verify_cluster):
        lowers(lambda *args, module=module: module.verify(*args, BOUND, EPS), *shapes(2, VERIFY_TOKENS, 8), ids, ids)


def test_commit_of_all_layers_lowers_for_cuda():
    """One launch for all layers: its parameters, an address for each array, stay below 4 KB."""
    ids, (qkvz, *_, states, windows) = jax.ShapeDtypeStruct((2,), jnp.int32), shapes(2, VERIFY_TOKENS, 8)
    record = jax.ShapeDtypeStruct((2, VERIFY_TOKENS, HEADS, HEAD_DIM), jnp.float32)
    each = (kda.Records(record, record, record), qkvz, kda.Pools(states, windows))
    lowers(mosaic_commit.commit_layers, *([x] * LAYERS for x in each), ids, ids)
    assert LAYERS <= mosaic_commit.MOST_LAYERS
    assert 8 * (mosaic_commit.OPERANDS * mosaic_commit.MOST_LAYERS + 2) <= 4096


def test_commit_in_two_launches_interpreted(make_case, monkeypatch):
    """Three layers, two a launch; slot 0 stays, and so does what nothing is accepted for."""
    monkeypatch.setattr(mosaic_commit, "MOST_LAYERS", 2)
    rng, slot, accepted = np.random.default_rng(0), jnp.array([3, 0, 1], jnp.int32), jnp.array([2, 2, 0], jnp.int32)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    shape = (3, 2, 1, HEAD_DIM)
    records = [kda.Records(normal(*shape), normal(*shape), -jnp.abs(normal(*shape))) for _ in range(3)]
    qkvz = [normal(3, 2, 1, 4, HEAD_DIM).astype(jnp.bfloat16) for _ in range(3)]
    pool = lambda: kda.Pools(normal(4, 1, HEAD_DIM, HEAD_DIM), normal(4, 3, 1, 3, HEAD_DIM).astype(jnp.bfloat16))  # noqa: E731
    held = [pool() for _ in range(3)]
    run = jax.jit(lambda *args: mosaic_commit.commit_layers(*args, INTERPRET))
    for new, old, *layer in zip(run(records, qkvz, held, slot, accepted), held, records, qkvz):
        wanted = xla.commit(*layer, *old, slot, accepted)
        np.testing.assert_allclose(new.state_pool, wanted.state_pool, rtol=0, atol=1e-5)
        assert np.array_equal(new.window_pool, wanted.window_pool)
        for slot_kept in (0, 1, 2):
            assert np.array_equal(new.state_pool[slot_kept], old.state_pool[slot_kept])


def test_prefill_lowers_for_cuda():
    ids = jax.ShapeDtypeStruct((1,), jnp.int32)
    boundaries = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    args = shapes(1, PREFILL_TOKENS)
    kernel = mosaic.differentiable(mosaic_prefill.prefill)
    lowers(lambda *args: kernel(*args, BOUND, EPS), *args, ids, boundaries)


def test_packed_prefill_lowers_for_cuda():
    qkvz, decay, beta, weights, state, window = shapes(1, 256)
    rows = jax.ShapeDtypeStruct((1,), jnp.int32)
    line = (jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (qkvz, decay, beta))
    lowers(lambda *args: mosaic_prefill.prefill_packed(*args, BOUND, EPS), *line, weights, state, window, rows, rows)


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
