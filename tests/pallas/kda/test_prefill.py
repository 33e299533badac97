"""Prefill, chunked and token by token, against the float64 recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas import kda

TOLERANCE = 5e-6
LENGTHS = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129, 130, 0]


def test_recurrent_is_the_definition(make_case, float64_recurrence, close):
    case = make_case(2, 20, 3, 32)
    lengths = [20, 13]
    expected = float64_recurrence(case, lengths)
    boundaries = jnp.array([[0, 7, 20], [3, 13, 99]], jnp.int32)
    actual = kda.recurrent(*case.args(), jnp.array(lengths, jnp.int32), boundaries=boundaries)
    close(actual.output, expected["output"], TOLERANCE, "output")
    close(actual.state, expected["states"][:, -1], TOLERANCE, "state")
    close(actual.window, expected["windows"][:, -1], 0, "window")
    at = np.minimum(boundaries, np.array(lengths)[:, None])
    for name in ("states", "windows"):
        wanted = np.stack([expected[name][row, at[row]] for row in range(2)])
        close(getattr(actual, f"boundary_{name}"), wanted, TOLERANCE, name)


@pytest.mark.parametrize("gates", ["random", "slow", "bound", "mixed"])
@pytest.mark.parametrize("keys", ["random", "identical", "collinear"])
def test_all_lengths_in_one_call(gates, keys, make_case, float64_recurrence, close):
    case = make_case(len(LENGTHS), 130, 1, 32, gates=gates, keys=keys)
    expected = float64_recurrence(case, LENGTHS)
    actual = kda.prefill(*case.args(), jnp.array(LENGTHS, jnp.int32), implementation="xla")
    close(actual.output, expected["output"], 2e-5, "output")
    close(actual.state, expected["states"][:, -1], 2e-5, "state")
    close(actual.window, expected["windows"][:, -1], 0, "window")
    assert not np.any(np.asarray(actual.output)[-1]), "a row without tokens gives output 0"


@pytest.mark.parametrize(("tokens", "channels"), [(1, 32), (16, 64), (17, 128), (64, 64), (65, 32)])
def test_shapes(tokens, channels, make_case, float64_recurrence, close):
    case = make_case(1, tokens, 3, channels, seed=tokens)
    expected = float64_recurrence(case, [tokens])
    actual = kda.prefill(*case.args(), jnp.array([tokens], jnp.int32), implementation="xla")
    close(actual.output, expected["output"], TOLERANCE, "output")
    close(actual.state, expected["states"][:, -1], TOLERANCE, "state")


def test_bfloat16(make_case, float64_recurrence, close):
    case = make_case(2, 70, 2, 64, dtype=jnp.bfloat16)
    expected = float64_recurrence(case, [70, 41])
    actual = kda.prefill(*case.args(), jnp.array([70, 41], jnp.int32), implementation="xla")
    assert actual.output.dtype == jnp.bfloat16
    assert actual.window.dtype == jnp.bfloat16
    close(actual.output, expected["output"], 1e-2, "output")
    close(actual.state, expected["states"][:, -1], 1e-2, "state")


def test_boundaries(make_case, float64_recurrence, close):
    case = make_case(3, 130, 1, 32)
    lengths = [130, 128, 70]
    boundaries = jnp.array([[0, 1, 63, 64, 65, 130], [16, 127, 128, 129, 5, 0], [70, 71, 69, 17, 1000, 64]], jnp.int32)
    expected = float64_recurrence(case, lengths)
    actual = kda.prefill(*case.args(), jnp.array(lengths, jnp.int32), boundaries=boundaries, implementation="xla")
    at = np.minimum(boundaries, np.array(lengths)[:, None])
    for name in ("states", "windows"):
        wanted = np.stack([expected[name][row, at[row]] for row in range(3)])
        close(getattr(actual, f"boundary_{name}"), wanted, TOLERANCE, name)


def test_padding_is_inert(make_case):
    case = make_case(2, 40, 2, 32)
    length = jnp.array([40, 9], jnp.int32)
    clean = kda.prefill(*case.args(), length, implementation="xla")
    poison = [x.at[1, 9:].set(jnp.nan) for x in case.tokens[:3]]
    dirty = kda.prefill(*poison, case.tokens[3], case.state, case.window, length, implementation="xla")
    for name, a, b in zip(clean._fields, clean, dirty):
        assert a is None or np.array_equal(a, b), f"NaN in padding changed {name}"


@pytest.mark.parametrize("cut", [1, 23, 64])
def test_continuing_equals_one_call(cut, make_case, close):
    case = make_case(1, 100, 2, 32)
    whole = kda.prefill(*case.args(), jnp.array([100], jnp.int32), implementation="xla")
    head, tail = ([x[:, part] for x in case.tokens[:3]] for part in (slice(None, cut), slice(cut, None)))
    weights = case.tokens[3]
    first = kda.prefill(*head, weights, case.state, case.window, jnp.array([cut], jnp.int32), implementation="xla")
    second = kda.prefill(
        *tail, weights, first.state, first.window, jnp.array([100 - cut], jnp.int32), implementation="xla"
    )
    close(jnp.concatenate([first.output, second.output], axis=1), whole.output, TOLERANCE, "output")
    close(second.state, whole.state, TOLERANCE, "state")
    assert np.array_equal(second.window, whole.window)


def test_rows_are_independent(make_case):
    case = make_case(4, 33, 2, 32)
    length, order = jnp.array([33, 5, 20, 33], jnp.int32), jnp.array([2, 0, 3, 1])
    straight = kda.prefill(*case.args(), length, implementation="xla")
    permuted = kda.prefill(
        *(x[order] for x in case.tokens[:3]),
        case.tokens[3],
        case.state[order],
        case.window[order],
        length[order],
        implementation="xla",
    )
    for a, b in zip(straight[:3], permuted[:3]):
        assert np.array_equal(a[order], b)


@pytest.mark.parametrize("gates", ["random", "bound"])
def test_gradients_match_the_recurrence(gates, make_case, close):
    case = make_case(2, 40, 1, 32, gates=gates)
    length = jnp.array([40, 22], jnp.int32)

    def loss(op, qkvz, decay, beta, weights, state):
        result = op(qkvz, decay, beta, weights, state, case.window, length)
        return jnp.sum(result.output**2) + jnp.sum(result.state**2)

    def gradients(op):
        return jax.tree.leaves(
            jax.grad(lambda *args: loss(op, *args), argnums=(0, 1, 2, 3, 4))(*case.tokens, case.state)
        )

    for index, (a, b) in enumerate(zip(gradients(kda.prefill), gradients(kda.recurrent))):
        assert np.isfinite(a).all()
        if np.abs(b).max() > 1e-8:
            close(a, b, 1e-3 if gates == "bound" else 2e-5, f"gradient {index}")


@pytest.mark.parametrize("lower_bound", [0.0, -20.0, 1.0])
def test_refuses_a_bound_it_cannot_represent(lower_bound, make_case):
    case = make_case(1, 2, 1, 32)
    with pytest.raises(ValueError, match=str(lower_bound)):
        kda.prefill(*case.args(), jnp.array([2], jnp.int32), lower_bound=lower_bound)


def test_packed_rows_are_the_rows_apart(make_case, float64_recurrence, close):
    lengths, start = [5, 0, 66], jnp.array([0, 64, 64], jnp.int32)
    case = make_case(3, 66, 1, 16)
    line = [jnp.full((192, *x.shape[2:]), jnp.nan, x.dtype) for x in case.tokens[:3]]
    for row, count in enumerate(lengths):
        line = [x.at[start[row] : start[row] + count].set(y[row, :count]) for x, y in zip(line, case.tokens)]
    rest = (case.tokens[3], case.state, case.window, start, jnp.array(lengths, jnp.int32))
    packed, expected = kda.prefill_packed(*line, *rest, implementation="xla"), float64_recurrence(case, lengths)
    close(packed.state, expected["states"][:, -1], TOLERANCE, "state")
    close(packed.window, expected["windows"][:, -1], 0, "window")
    output = np.zeros(packed.output.shape)
    for row, count in enumerate(lengths):
        output[start[row] : start[row] + count] = expected["output"][row, :count]
    close(packed.output, output, TOLERANCE, "output")
