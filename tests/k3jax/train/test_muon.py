import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from k3jax import params
from k3jax.config import K3Config
from k3jax.train import muon, optimizer, specs

FLOAT32 = jnp.dtype(jnp.float32)


def polar(matrix: np.ndarray) -> np.ndarray:
    left, _, right = np.linalg.svd(matrix, full_matrices=False)
    return left @ right


def quintic(matrix: np.ndarray, iterations: int = 5) -> np.ndarray:
    """Newton-Schulz on singular values alone, in float64."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.linalg.norm(matrix)
    for _ in range(iterations):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right


def test_newton_schulz_maps_singular_values_by_the_quintic() -> None:
    for shape in ((3, 8, 20), (2, 20, 8)):
        stack = np.random.default_rng(0).normal(size=shape)
        result = muon.newton_schulz(jnp.asarray(stack, jnp.float32), FLOAT32)
        expected = np.stack([quintic(matrix) for matrix in stack])
        np.testing.assert_allclose(result, expected, atol=2e-4)
        cosine = np.sum(np.asarray(result) * np.stack([polar(m) for m in stack])) / (
            np.linalg.norm(result) * np.sqrt(shape[0] * min(shape[1:]))
        )
        assert cosine > 0.97


def test_bfloat16_stays_close() -> None:
    stack = jnp.asarray(np.random.default_rng(1).normal(size=(4, 16, 24)), jnp.float32)
    exact, rounded = (muon.newton_schulz(stack, jnp.dtype(d)) for d in (jnp.float32, jnp.bfloat16))
    assert float(jnp.abs(exact - rounded.astype(jnp.float32)).max()) < 0.08


@pytest.fixture(scope="module")
def first_update(small_model: K3Config) -> tuple[dict, dict]:
    """Random gradients of the small model and Muon's first update, by path."""
    tree = specs.training_specs(small_model)
    generator = np.random.default_rng(2)
    gradients = params.map_tree(lambda spec: jnp.asarray(generator.normal(size=spec.shape), jnp.float32), tree)
    transformation = muon.scale_by_muon(specs.matrix_views(tree), momentum=0.9, dtype=FLOAT32)
    updates, _ = jax.jit(lambda g: transformation.update(g, transformation.init(g)))(gradients)
    return tuple(dict(params.flatten(jax.device_get(values))) for values in (gradients, updates))


def scaled(matrix: np.ndarray) -> np.ndarray:
    return 0.2 * max(matrix.shape) ** 0.5 * quintic(matrix)


def test_attention_projections_are_orthogonalised_head_by_head(first_update: tuple[dict, dict]) -> None:
    gradient, update = (values["layers", "0", "attention", "qkvz"] for values in first_update)
    for head in range(gradient.shape[0]):
        for stream in range(4):
            np.testing.assert_allclose(update[head, stream], scaled(gradient[head, stream]), atol=2e-3)
    gradient, update = (values["layers", "1", "attention", "q_up"] for values in first_update)
    for head in range(gradient.shape[0]):
        np.testing.assert_allclose(update[head], scaled(gradient[head]), atol=2e-3)


def test_scaling_one_head_changes_no_other() -> None:
    view = specs.Matrices(1)
    stack = jnp.asarray(np.random.default_rng(3).normal(size=(4, 8, 16)), jnp.float32)
    louder = stack.at[0].multiply(100.0)
    plain, loud = (muon.orthogonalize({("q",): array}, {("q",): view}, FLOAT32)[("q",)] for array in (stack, louder))
    np.testing.assert_allclose(plain, loud, atol=1e-4)


def test_experts_are_separate_and_output_projections_are_whole(
    small_model: K3Config, first_update: tuple[dict, dict]
) -> None:
    gradient, update = (values["layers", "1", "ffn", "experts", "gate_up"] for values in first_update)
    np.testing.assert_allclose(update[5, 1], scaled(gradient[5, 1]), atol=2e-3)
    gradient, update = (values["layers", "0", "attention", "out"] for values in first_update)
    flat = gradient.reshape(gradient.shape[0], -1)
    np.testing.assert_allclose(update.reshape(flat.shape), scaled(flat), atol=2e-3)
    gradient, update = (values["layers", "1", "attention", "in_proj"] for values in first_update)
    rank = small_model.mla.q_lora_rank
    for part in (slice(rank), slice(rank, None)):
        np.testing.assert_allclose(update[part], scaled(gradient[part]), atol=2e-3)


def test_every_parameter_has_the_intended_optimizer(small_model: K3Config) -> None:
    tree = specs.training_specs(small_model)
    groups = dict(params.flatten(specs.labels(tree)))
    by_name = {path[-1]: group for path, group in groups.items()}
    assert {by_name[name] for name in ("qkvz", "out", "gate_up", "down", "latent_up", "in_proj", "f_b")} == {"muon"}
    assert {by_name[name] for name in ("embedding", "head", "router", "beta")} == {"decayed_adam"}
    assert {by_name[name] for name in ("a_log", "dt_bias", "conv", "norm", "query", "kv_norm")} == {"adam"}
    assert by_name["correction_bias"] == "balanced"
    matrices = [
        path for path, spec in params.flatten(tree) if len(spec.shape) > 1 and path[-1] not in ("dt_bias", "conv")
    ]
    assert all(groups[path] != "adam" for path in matrices)


def test_adam_equals_optax() -> None:
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    try:
        ours, theirs = optimizer.scale_by_adam(eps=1e-8), optax.scale_by_adam(0.9, 0.95, eps=1e-8)
        values = jnp.asarray(np.random.default_rng(4).normal(size=(3, 5)), jnp.float32)
        states = [ours.init(values), theirs.init(values)]
        for step in range(4):
            gradient = values * (step + 1)
            mine, states[0] = ours.update(gradient, states[0])
            other, states[1] = theirs.update(gradient, states[1])
            np.testing.assert_allclose(mine, other, rtol=1e-5)
    finally:
        jax.config.update("jax_numpy_dtype_promotion", "strict")


def test_schedule_warms_up_over_one_percent_and_follows_a_cosine() -> None:
    rates = [optimizer.learning_rate(step, 1000, 2.0) for step in range(1000)]
    assert rates[0] == 0.2
    assert rates[9] == max(rates) == 2.0
    assert abs(rates[505] - (0.04 + 1.96 / 2)) < 1e-2
    assert 0.04 <= rates[-1] < 0.041
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))


def test_weight_decay_shrinks_matrices_only(small_model: K3Config) -> None:
    tree = specs.training_specs(small_model)
    masters = specs.initialize(small_model, jax.random.key(0))
    transformation = optimizer.optimizer(tree, muon_dtype=jnp.float32)
    zeros = jax.tree.map(jnp.zeros_like, masters)
    updates, _ = jax.jit(lambda g, m: transformation.update(g, transformation.init(m), m))(zeros, masters)
    flat, start = dict(params.flatten(updates)), dict(params.flatten(masters))
    np.testing.assert_allclose(flat["embedding",], 0.1 * start["embedding",], rtol=1e-6)
    qkvz = ("layers", "0", "attention", "qkvz")
    np.testing.assert_allclose(flat[qkvz], 0.1 * start[qkvz], rtol=1e-6)
    assert not np.any(flat["norm",])
