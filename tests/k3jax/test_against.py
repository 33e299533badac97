"""A narrow model may be 1.5 times as far from float32 as the portable forms are, and no further."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import synthetic
from k3jax import params
from k3jax.runtime import Model
from k3jax.verification import against

EXACT = np.random.default_rng(0).standard_normal((40, 30)).astype(np.float32)
NOISE = np.random.default_rng(1).standard_normal((40, 30)).astype(np.float32)


@pytest.mark.parametrize(("ours", "passes"), [(1.0, True), (1.45, True), (1.55, False), (np.nan, False)])
def test_the_portable_error_is_the_measure(ours, passes):
    item = against.judge("logits", EXACT + ours * 1e-2 * NOISE, EXACT + 1e-2 * NOISE, EXACT)
    assert item.passed == passes
    assert passes is False or f"ratio {ours:.2f}" in item.detail


def test_one_token_far_off_decides_nothing_but_a_broken_one_does():
    least = EXACT + 1e-2 * NOISE
    ours = least.copy()
    ours[3] += 0.3
    assert against.judge("logits", ours, least, EXACT).passed
    ours[3, 5] = np.inf
    assert not against.judge("logits", ours, least, EXACT).passed


def test_a_broken_measure_fails():
    assert not against.judge("logits", EXACT, EXACT * np.nan, EXACT).passed


@pytest.mark.slow
def test_the_portable_forms_pass_and_a_changed_weight_fails(door_config, monkeypatch):
    monkeypatch.setattr(against, "PROMPTS", 2)
    tree = synthetic.random_tree(door_config)

    def model(dtype, tree=tree):
        cast = lambda spec, array: array.astype(spec.array_dtype(dtype))  # noqa: E731
        leaf = lambda x: isinstance(x, params.ParamSpec)  # noqa: E731
        return Model.of(door_config, jax.tree.map(cast, params.model_specs(door_config), tree, is_leaf=leaf))

    narrow, wide = model(jnp.bfloat16), model(jnp.float32)
    assert all(item.passed for item in against.run(narrow, narrow, wide))
    layer = tree["layers"]["0"]["attention"]
    changed = {**layer, "beta": layer["beta"] + 0.1}
    other = {**tree, "layers": {**tree["layers"], "0": {**tree["layers"]["0"], "attention": changed}}}
    failed = [item.name for item in against.run(model(jnp.bfloat16, other), narrow, wide) if not item.passed]
    assert "kda_state.0" in failed
