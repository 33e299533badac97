"""Decode, verify and commit on pools of slots."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas import kda

SLOT = jnp.array([4, 0, 2], jnp.int32)
STALE = jnp.zeros(3, bool)


def pools(case, slots=6, seed=1):
    """Slots filled with noise, except that rows' slots hold the states and windows of the case."""
    rng = np.random.default_rng(seed)
    state = jnp.asarray(rng.standard_normal((slots, *case.state.shape[1:])), jnp.float32)
    window = jnp.asarray(rng.standard_normal((slots, *case.window.shape[1:])), case.window.dtype)
    return state.at[SLOT].set(case.state), window.at[SLOT].set(case.window)


def at(case, token):
    return [x[:, token] for x in case.tokens[:3]] + [case.tokens[3]]


def decode_steps(case, state, window, accepted):
    """Row r decodes its first accepted[r] tokens, then rests on slot 0."""
    outputs = []
    for token in range(case.tokens[0].shape[1]):
        slot = jnp.where(token < accepted, SLOT, 0)
        output, state, window = kda.decode(*at(case, token), state, window, slot, STALE, implementation="xla")
        outputs.append(output)
    return jnp.stack(outputs, axis=1), state, window


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 5e-6), (jnp.bfloat16, 1e-2)])
def test_decode_is_the_recurrence(dtype, tolerance, make_case, float64_recurrence, close):
    case = make_case(3, 6, 2, 32, dtype)
    state, window = pools(case)
    output, new_state, new_window = decode_steps(case, state, window, jnp.array([6, 6, 6]))
    expected = float64_recurrence(case, [6, 0, 6])
    close(output, expected["output"], tolerance, "output")
    for row in (0, 2):
        close(new_state[SLOT[row]], expected["states"][row, -1], tolerance, "state")
        close(new_window[SLOT[row]], expected["windows"][row, -1], 0, "window")
    untouched = jnp.array([0, 1, 3, 5])
    assert np.array_equal(new_state[untouched], state[untouched]), "other slots must not change"
    assert np.array_equal(new_window[untouched], window[untouched])


def test_fresh_rows_ignore_the_slot(make_case, float64_recurrence, close):
    case = make_case(3, 1, 2, 32)
    state, window = pools(case)
    state, window = state.at[4].set(jnp.nan), window.at[4].set(jnp.nan)
    fresh = jnp.array([True, False, False])
    output, new_state, _ = kda.decode(*at(case, 0), state, window, SLOT, fresh, implementation="xla")
    case.state, case.window = case.state.at[0].set(0), case.window.at[0].set(0)
    expected = float64_recurrence(case, [1, 0, 1])
    close(output, expected["output"][:, 0], 5e-6, "output")
    close(new_state[4], expected["states"][0, -1], 5e-6, "state")


def test_verify_equals_decode_and_writes_nothing(make_case, close):
    case = make_case(3, 5, 2, 32, jnp.bfloat16)
    state, window = pools(case)
    length = jnp.array([5, 5, 3], jnp.int32)
    result = kda.verify(*case.tokens, state, window, SLOT, length, implementation="xla")
    output, _, _ = decode_steps(case, state, window, length)
    assert np.array_equal(result.output, output)
    for name, record in zip(result.records._fields, result.records):
        assert np.isfinite(record).all(), name
        assert not np.any(record[1]), name
        assert not np.any(record[2, 3:]), name


@pytest.mark.parametrize("accepted", [[0, 0, 0], [3, 2, 5], [1, 0, 4]])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_commit_is_bit_identical_to_decode(dtype, accepted, make_case):
    case = make_case(3, 5, 2, 128, dtype)
    state, window = pools(case)
    accepted = jnp.array(accepted, jnp.int32)
    result = kda.verify(*case.tokens, state, window, SLOT, jnp.array([5, 5, 5], jnp.int32), implementation="xla")
    committed = kda.commit(result.records, case.tokens[0], state, window, SLOT, accepted, implementation="xla")
    _, stepped_state, stepped_window = decode_steps(case, state, window, accepted)
    assert np.array_equal(committed.state_pool, stepped_state)
    assert np.array_equal(committed.window_pool, stepped_window)
