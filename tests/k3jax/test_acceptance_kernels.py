"""`judge` by kernels, interpreted, gives what its portable form gives: blocks, and each row's numbers after them."""

import jax
import numpy as np
import pytest

from k3jax import sampling
from k3jax.speculation import acceptance_bench, parts

SIZE = acceptance_bench.SMALL


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["block", "standard"])
def test_kernels_agree_with_the_portable_form(rule):
    kernels, portable = acceptance_bench.interpreted(rule), acceptance_bench.program("xla", rule)
    for seed, (temperature, penalty) in enumerate([(1.0, 1.0), (0.7, 1.2), (0.0, 1.0)]):
        inputs = acceptance_bench.draw(SIZE, temperature, penalty, seed)
        ours, other = kernels(*inputs), portable(*inputs)
        assert all(check.passed for check in acceptance_bench.compare("", ours.block, other.block))
        for name in ("accepted", "finite", "verified"):
            np.testing.assert_array_equal(getattr(ours.block, name), getattr(other.block, name))
        expected = parts.After.of(inputs[2], other)
        jax.tree.map(np.testing.assert_array_equal, ours.after, expected)


def test_filters_and_unknown_scores_are_not_served():
    inputs = acceptance_bench.draw(SIZE, 1.0, 1.0, 0)
    with pytest.raises(NotImplementedError, match="without filters"):
        parts.by_kernels(*inputs, parts.Options(filters=sampling.Filters()), inputs[2].token)
    logits, proposal, *rest = inputs
    known = proposal._replace(probability=proposal.scores, scores=None)
    with pytest.raises(NotImplementedError, match="known scores"):
        parts.by_kernels(logits, known, *rest, parts.Options(filters=sampling.NO_FILTERS), rest[0].token)
