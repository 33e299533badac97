"""What is compiled ahead is what later calls run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.generation.compilations import Compilations
from serving.warm_up import Call, compile_all


def test_calls_are_compiled_once_and_reported_by_name():
    step = jax.jit(lambda state, *, factor: (state * factor, state.sum()), static_argnames="factor", donate_argnums=0)
    state, said = jnp.arange(3.0), {}
    calls = {f"times {factor}": Call(step, (state,), {"factor": factor}) for factor in (2, 3)}
    compile_all(calls, said.__setitem__)
    assert {name.partition(" (")[0] for name in said} == calls.keys()
    assert [name.partition(" (")[2] for name in said] == ["1 of 2)", "2 of 2)"]
    assert min(said.values()) > 0
    with Compilations() as compilations:
        state, _ = calls["times 2"].run()
        state, total = Call(step, (state,), {"factor": 3}).run()
    assert compilations.count == 0
    np.testing.assert_array_equal(state, [0, 6, 12])
    assert total == 6


def test_a_program_that_cannot_be_compiled_is_an_error():
    with pytest.raises(ZeroDivisionError):
        compile_all({"bad": Call(jax.jit(lambda: 1 // 0), (), {})}, lambda name, seconds: None)
