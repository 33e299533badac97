"""Products of single warps against those of warpgroups on a Hopper GPU, which has both: what Blackwell will compute.

`JAX_PLATFORMS=cuda python -m pytest -m gpu tests/pallas/test_warps_gpu.py`, or as a script with a line for each kernel.
The multiplications are the same and so is their order, but for the experts of few tokens.
"""

import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas import dispatch
from tests.pallas.generations import CALLS

KERNELS = [name for name in CALLS if not name.startswith("gemv")]
BOUND = {"moe decode": 1e-3}
"""Relative RMS; others are equal bit for bit."""
COUNTS = {"mla decode": (np.arange(1, 9)[None], [500], [501]), "mla prefill": ([0], [136]), "kda prefill": ([121],)}
"""Page tables, starts and lengths, in the order of the arguments."""


def draw(name):
    """Random arguments; int8 and uint8 of any bits but for scales, which are near one."""
    rng, counts = np.random.default_rng(5), iter(COUNTS.get(name, ()))

    def one(path, spec):
        if spec.dtype == jnp.int32 and name.startswith("moe"):
            return jnp.asarray(np.stack([rng.permutation(4)[: spec.shape[1]] for _ in range(spec.shape[0])]), jnp.int32)
        if spec.dtype == jnp.int32:
            return jnp.asarray(next(counts), jnp.int32)
        if spec.dtype == jnp.uint8:
            low, high = (118, 124) if "scale" in jax.tree_util.keystr(path) else (0, 256)
            return jnp.asarray(rng.integers(low, high, spec.shape), jnp.uint8)
        return jnp.asarray(rng.standard_normal(spec.shape, np.float32) / 4, spec.dtype)

    return jax.tree_util.tree_map_with_path(one, CALLS[name][1])


def compiled(name, *, warps):
    with mock.patch.object(dispatch, "warps_multiply", return_value=warps):
        lowered = jax.jit(lambda *args: CALLS[name][0](*args)).lower(*CALLS[name][1])
    return lowered.compile()


def difference(name, programs):
    """Relative RMS of the results of single warps, the largest of all arrays."""
    arguments, errors = draw(name), []
    expected, found = (jax.tree.leaves(program(*arguments)) for program in programs)
    for left, right in zip(expected, found, strict=True):
        left, right = (np.asarray(x.astype(jnp.float32), np.float64) for x in (left, right))
        assert np.isfinite(left).all()
        errors.append(np.sqrt(np.mean((left - right) ** 2) / np.mean(left**2)))
    return max(errors)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_warps_give_what_warpgroups_give(name):
    if dispatch.capability()[0] != dispatch.HOPPER:
        pytest.skip("only Hopper has both")
    assert difference(name, [compiled(name, warps=warps) for warps in (False, True)]) <= BOUND.get(name, 0.0)


def main(*names):
    kernels = names or KERNELS
    low = [(name, [compiled(name, warps=warps) for warps in (False, True)]) for name in kernels]
    for name, programs in low:
        error, bound = difference(name, programs), BOUND.get(name, 0.0)
        print(f"{name}: {error:.2e} (bound {bound:.0e}) {'ok' if error <= bound else 'BREACH'}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
