import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from k3jax.train import balance

TOKENS, EXPERTS, K = 4096, 32, 4
TARGET = TOKENS * K / EXPERTS


def skewed_scores(seed: int = 0, tokens: int = TOKENS) -> np.ndarray:
    """Router scores whose top-4 loads run from about 4 to about 1607 around a target of 512."""
    generator = np.random.default_rng(seed)
    preference = np.linspace(-1.6, 1.1, EXPERTS)
    logits = generator.normal(size=(tokens, EXPERTS)) + generator.permutation(preference)
    return (1 / (1 + np.exp(-logits))).astype(np.float32)


def loads(scores: np.ndarray, bias: np.ndarray) -> np.ndarray:
    chosen = np.argsort(-(scores + bias), axis=1)[:, :K]
    return np.bincount(chosen.reshape(-1), minlength=EXPERTS)


def numpy_exact(scores: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Equation (14) as written: minus the (q+1)-th largest margin, then centred."""
    biased = -np.sort(-(scores + bias), axis=1)
    margins = scores - biased[:, K, None]
    threshold = -np.sort(-margins, axis=0)[int(scores.shape[0] * K / EXPERTS)]
    return -threshold - np.mean(-threshold)


def test_skewed_loads_come_within_six_percent_of_the_target_in_ten_steps() -> None:
    scores = skewed_scores()
    start = loads(scores, np.zeros(EXPERTS))
    assert start.max() > 3 * TARGET
    assert start.min() < 0.05 * TARGET
    bias = jnp.zeros(EXPERTS)
    valid = jnp.ones(TOKENS, bool)
    for _ in range(10):
        bias = balance.next_bias(balance.count(jnp.asarray(scores), bias, K, valid), bias)
    final = loads(scores, np.asarray(bias))
    assert np.abs(final / TARGET - 1).max() < 0.06
    assert abs(float(bias.mean())) < 1e-6


def test_exact_form_is_equation_fourteen() -> None:
    scores, bias = skewed_scores(1), np.random.default_rng(2).normal(0, 0.2, EXPERTS).astype(np.float32)
    required = balance.required_bias(jnp.asarray(scores), jnp.asarray(bias), K)
    np.testing.assert_allclose(balance.exact(required, K), numpy_exact(scores, bias), atol=1e-6)


@pytest.mark.parametrize("bins", [100, 1000])
def test_histogram_agrees_with_the_exact_quantile_within_a_bin(bins: int) -> None:
    scores, bias = (
        jnp.asarray(skewed_scores(3)),
        jnp.asarray(np.random.default_rng(4).normal(0, 0.3, EXPERTS), jnp.float32),
    )
    routed = balance.count(scores, bias, K, jnp.ones(TOKENS, bool), bins)
    approximate = balance.next_bias(routed, bias)
    exact = numpy_exact(np.asarray(scores), np.asarray(bias))
    width = float(bias.max() - bias.min() + 2) / bins
    # Each quantile is off by a bin at most, and so is their mean, which both forms subtract.
    assert np.abs(np.asarray(approximate) - exact).max() <= 2 * width
    uncentred = np.asarray(approximate) - exact
    assert np.ptp(uncentred) <= width * (1 + 1e-3) + 1e-6


def test_padding_is_not_counted() -> None:
    scores = jnp.asarray(skewed_scores(5, 512))
    bias, valid = jnp.zeros(EXPERTS), jnp.arange(512) < 300
    padded = balance.count(scores, bias, K, valid)
    alone = balance.count(scores[:300], bias, K, jnp.ones(300, bool))
    jax.tree.map(np.testing.assert_array_equal, padded, alone)
    required = balance.required_bias(scores, bias, K)
    np.testing.assert_array_equal(balance.exact(required, K, valid), balance.exact(required[:300], K))


def test_counts_over_eight_devices_and_micro_batches_give_the_same_bias() -> None:
    scores, bias = jnp.asarray(skewed_scores(6)), jnp.linspace(-0.2, 0.2, EXPERTS)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = PartitionSpec("data"), PartitionSpec()

    @jax.jit
    @lambda body: jax.shard_map(body, mesh=mesh, in_specs=(rows, whole), out_specs=whole, check_vma=False)
    def sharded(scores: jax.Array, bias: jax.Array) -> balance.Routed:
        halves = [balance.count(half, bias, K, jnp.ones(len(half), bool)) for half in jnp.split(scores, 2)]
        return jax.lax.psum(jax.tree.map(jnp.add, *halves), "data")

    # Compiled like the other: a fused division may move a score that sits on a bin's edge.
    one = jax.jit(lambda scores, bias: balance.count(scores, bias, K, jnp.ones(TOKENS, bool)))(scores, bias)
    many = sharded(scores, bias)
    jax.tree.map(np.testing.assert_array_equal, many, one)
    np.testing.assert_array_equal(balance.next_bias(many, bias), balance.next_bias(one, bias))
    np.testing.assert_array_equal(one.load, loads(np.asarray(scores), np.asarray(bias)))


def test_no_tokens_leave_the_bias_alone() -> None:
    bias = jnp.linspace(-0.2, 0.2, EXPERTS)
    routed = balance.count(jnp.asarray(skewed_scores(7, 64)), bias, K, jnp.zeros(64, bool))
    np.testing.assert_array_equal(balance.next_bias(routed, bias), bias)


def test_all_experts_per_token_leave_no_cutoff() -> None:
    with pytest.raises(ValueError, match="k is 32 with 32 experts"):
        balance.required_bias(jnp.zeros((4, EXPERTS)), jnp.zeros(EXPERTS), EXPERTS)
