"""The kernels of the MoE on a GPU, at counts and sizes that interpretation cannot reach.

`JAX_PLATFORMS=cuda python -m pytest -m gpu tests/pallas/moe/test_gpu.py`, or as a script with a line per check, for all
parts or those named: experts, neighbours, routing, front.
Expected values are float64 definitions on the device, written here.
"""

import functools
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas import moe
from pallas.moe import mxfp4
from pallas.moe.gate import random_experts, random_tokens

EXPERTS, CHOSEN, LATENT, INNER, WIDTH = 64, 16, 3584, 384, 7168
COUNTS = (*range(1, 41), 100, 127, 128, 129, 1000, 8192)
BOUND = 4e-3
"""Relative RMS error of the experts against float64."""
BETA, LINEAR_BETA = 4.0, 25.0
K3_EXPERTS = 896


@functools.partial(jax.jit, static_argnames="implementation")
def run(x, ids, weights, packed, implementation="mosaic"):
    options = {"beta": BETA, "linear_beta": LINEAR_BETA, "dtype": jnp.float32, "implementation": implementation}
    return moe.experts(x, ids, weights, packed, **options)


def definition(x, ids, weights, packed):
    """The sum over experts in float64, whole tokens at a time."""
    with jax.enable_x64(True):
        dense = jnp.zeros((x.shape[0], packed[0].shape[0]), jnp.float64)
        dense = dense.at[jnp.arange(x.shape[0])[:, None], ids].add(weights.astype(jnp.float64))
        wide = x.astype(jnp.float64)

        @jax.jit
        def one(wide, gate_up, gate_up_scale, down, down_scale, weight):
            matrices = mxfp4.dequantize(gate_up, gate_up_scale).astype(jnp.float64)
            gate, up = wide @ matrices[0].T, wide @ matrices[1].T
            hidden = BETA * jnp.tanh(gate / BETA) / (1 + jnp.exp(-gate)) * LINEAR_BETA * jnp.tanh(up / LINEAR_BETA)
            return weight[:, None] * (hidden @ mxfp4.dequantize(down, down_scale).astype(jnp.float64).T)

        total = 0.0
        for expert in range(packed[0].shape[0]):
            total = total + one(wide, *(array[expert] for array in packed), dense[:, expert])
        return np.asarray(total)


def relative(actual, expected):
    actual = np.asarray(actual, np.float64)
    return float(np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2)))


def compiled(args):
    """`run` for each set of arguments, compiled side by side."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda one: run.lower(*one).compile(), args))


def experts():
    """Every number of tokens, each with results of its own tokens only."""
    packed = random_experts(EXPERTS, LATENT, INNER)
    x, ids, weights = random_tokens(max(COUNTS), EXPERTS, LATENT, CHOSEN)
    expected = definition(x, ids, weights, packed)
    calls = [(x[:count], ids[:count], weights[:count], packed) for count in COUNTS]
    for count, call, program in zip(COUNTS, calls, compiled(calls), strict=True):
        yield f"{count} tokens", relative(program(*call), expected[:count]), BOUND


def neighbours():
    """All tokens on one expert; a row of NaN; slots without an expert: whatever the others do, a row stays as it is."""
    packed = random_experts(EXPERTS, LATENT, INNER)
    for count in (1, 4, 5, 16, 40, 128, 1000):
        x, ids, weights = random_tokens(count, EXPERTS, LATENT, CHOSEN)
        one = jnp.full((count, 1), EXPERTS - 1, jnp.int32)
        yield f"{count} tokens on one expert", *_against(x, one, weights[:, :1], packed)
        row = count // 2
        few = ids.at[row].set(-1).at[:, 3].set(-1)
        program, other = compiled([(x, ids, weights, packed), (x, few, weights, packed)])
        plain = np.asarray(program(x, ids, weights, packed))
        spoilt = np.asarray(program(x.at[row].set(jnp.nan), ids, weights, packed))
        rest = np.delete(np.arange(count), row)
        yield f"{count} tokens: other rows beside a NaN", float((spoilt[rest] != plain[rest]).sum()), 0.0
        yield f"{count} tokens: the row itself", float((~np.isnan(spoilt[row])).sum()), 0.0
        thinned = np.asarray(other(x, few, weights, packed))
        yield f"{count} tokens: a row without experts", float(np.abs(thinned[row]).max()), 0.0
        nobody = np.asarray(other(x, jnp.full_like(ids, -1), weights, packed))
        yield f"{count} tokens: no expert at all", float(np.abs(nobody).max()), 0.0


def _against(x, ids, weights, packed):
    (program,) = compiled([(x, ids, weights, packed)])
    expected = definition(x, ids, weights, packed)
    return relative(program(x, ids, weights, packed), expected), BOUND


def _ranked(logits, bias):
    """Experts by biased score, lower ids first among equals, as float32 scores have it."""
    scores = np.asarray(jax.nn.sigmoid(jnp.asarray(logits)))
    return np.argsort(-(scores + bias).astype(np.float32), axis=1, kind="stable")[:, :CHOSEN]


def routing():
    """Forced ties go to the lower id; scores that do not tie may be in another order only where they are neighbours."""
    rng = np.random.default_rng(0)
    bias = (rng.standard_normal(K3_EXPERTS) / 8).astype(np.float32)
    none = np.zeros(K3_EXPERTS, np.float32)
    cases = {
        "few values": (rng.integers(-3, 4, (200, K3_EXPERTS)).astype(np.float32), none),
        "all equal": (np.zeros((3, K3_EXPERTS), np.float32), none),
        **{f"{n} random": (rng.standard_normal((n, K3_EXPERTS)).astype(np.float32), bias) for n in (1, 16, 8192)},
    }
    for name, (logits, bias) in cases.items():
        made = moe.choose(jnp.asarray(logits), jnp.asarray(bias), k=CHOSEN, scaling=2.5, implementation="mosaic")
        expected = _ranked(logits, bias)
        wrong = (np.asarray(made.ids) != expected).sum()
        # Two float32 sigmoids may differ in the last place, so one choice in a million may be its neighbour.
        yield (
            f"routing, {name}: share of other ids",
            float(wrong / expected.size),
            0.0 if "random" not in name else 1e-4,
        )
        scores = np.take_along_axis(1 / (1 + np.exp(-logits.astype(np.float64))), np.asarray(made.ids), 1)
        weights = 2.5 * scores / scores.sum(1, keepdims=True)
        yield f"routing, {name}: weights", float(np.abs(np.asarray(made.weights) / weights - 1).max()), 2e-6
    logits = cases["16 random"][0].copy()
    logits[3] = np.nan
    made = moe.choose(jnp.asarray(logits), jnp.asarray(bias), k=CHOSEN, implementation="mosaic")
    yield "routing, a row of NaN: distinct ids", float(CHOSEN - len(set(np.asarray(made.ids[3]).tolist()))), 0.0
    kept = np.delete(np.isfinite(np.asarray(made.weights)), 3, 0)
    yield "routing, rows beside it", float((~kept).sum()), 0.0


@functools.partial(jax.jit, static_argnames="implementation")
def _front(x, router, bias, matrices, implementation):
    return moe.front(x, router, bias, matrices, k=CHOSEN, scaling=2.5, implementation=implementation)


def front():
    """Products and routing in one launch against float64, and the same bits in every run."""
    rng = np.random.default_rng(1)
    bias = jnp.asarray(rng.standard_normal(K3_EXPERTS) / 8, jnp.float32)
    for tokens, shared in ((1, 1536), (3, 1536), (8, 1536), (16, 1536), (1, 12288)):
        draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)  # noqa: E731
        x, router, *matrices = draw(tokens, WIDTH), *(draw(rows, WIDTH) / 64 for rows in (K3_EXPERTS, LATENT, shared))
        call = x, router, bias, tuple(matrices)
        made = _front(*call, "mosaic")
        wide = np.asarray(x.astype(jnp.float32), np.float64)
        logits, *expected = (wide @ np.asarray(m.astype(jnp.float32), np.float64).T for m in (router, *matrices))
        name = f"front, {tokens} rows, {shared} shared"
        for product, wanted in zip(made.products, expected, strict=True):
            yield f"{name}: {wanted.shape[1]} columns", relative(product.astype(jnp.float32), wanted), 3e-3
        wrong = np.asarray(made.routing.ids) != _ranked(logits.astype(np.float32), np.asarray(bias))
        yield f"{name}: share of other ids", float(wrong.mean()), 0.0
        repeats = (jax.tree.leaves(_front(*call, "mosaic")) for _ in range(100))
        first = jax.tree.leaves(made)
        differing = sum(int((a != b).sum()) for leaves in repeats for a, b in zip(leaves, first, strict=True))
        yield f"{name}: other bits in 100 runs", float(differing), 0.0


PARTS = {part.__name__: part for part in (experts, neighbours, routing, front)}


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS)
def test_on_a_gpu(part):
    checks = list(PARTS[part]())
    assert checks
    assert not [(name, error) for name, error, bound in checks if not error <= bound]


if __name__ == "__main__":
    failed = 0
    for name in sys.argv[1:] or PARTS:
        for what, error, bound in PARTS[name]():
            failed += not error <= bound
            print("ok  " if error <= bound else "FAIL", f"{what}: {error:.2e} (bound {bound:.0e})", flush=True)
    sys.exit(failed > 0)
