"""A draft in 8 bits: what becomes 8 bits, that it drafts nearly the same, and that the model says the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import api, capacity, params
from k3jax.cache import Rows
from k3jax.dspark import files, quantized
from k3jax.dspark.model import DSpark, empty_pools
from k3jax.dspark.tensors import draft_specs
from k3jax.runtime import Model
from k3jax.train.draft_program import draft_config
from pallas import gemv
from tests import small_draft

PROMPTS = [[5, 9, 33, 2, 7], [1, 4]]


@pytest.fixture(scope="module")
def target(tiny_config, random_tree):
    config = dataclasses.replace(tiny_config, num_layers=2, mla_layers=(1,), attn_res_block_size=1)
    return Model.of(config, random_tree(config))


@pytest.fixture(scope="module")
def tree():
    rng = np.random.default_rng(5)

    def fill(spec):
        return jnp.asarray(rng.standard_normal(spec.shape) / np.sqrt(spec.shape[-1]), jnp.float32)

    return lambda config: params.map_tree(fill, draft_specs(config))


def test_matrices_become_int8_and_nothing_else(target, tree):
    config = small_draft.published(target.config, layers=2)
    head = jnp.ones((config.vocab_size, config.hidden_size), jnp.float32)
    before = tree(config)
    after = quantized.quantize(before, head)
    layer = after["layers"]["1"]
    narrow = [after["context_proj"], after["head"], after["markov"]["head"], layer["gate_up"], layer["down"]]
    narrow += [layer["attention"][name] for name in ("q_down", "q_up", "kv_down", "out")]
    assert all(isinstance(matrix, gemv.Int8Matrix) for matrix in narrow)
    assert layer["attention"]["out"].codes.shape == (config.hidden_size, 16)  # heads and channels are the inputs
    kept = [after["markov"]["embedding"], after["norm"], after["confidence"], layer["attention"]["key_up_turned"]]
    assert all(isinstance(array, jax.Array) and array.dtype == jnp.float32 for array in kept)
    assert "head" not in quantized.quantize(before)


@functools.partial(jax.jit, static_argnums=0)
def drafted(config, parameters, table):
    """Logits of a block behind 6 tokens of context."""
    draft = DSpark(config, parameters)
    rows = Rows(*(jnp.asarray(v, jnp.int32) for v in ([1], [[1, 2]], [0], [6])))
    pools = empty_pools(config, pages=3, page_size=8, dtype=jnp.float32)
    taps = jax.random.normal(jax.random.key(2), (1, 6, config.features), jnp.float32)
    pools = draft.extend(pools, taps, rows)
    return draft.draft(pools, jnp.asarray([4], jnp.int32), rows.advance(), table, table).logits


@pytest.mark.parametrize("kind", ["mla", pytest.param("gqa", marks=pytest.mark.slow)])
def test_it_drafts_nearly_the_same(target, tree, kind):
    config = (
        small_draft.published(target.config, layers=2)
        if kind == "mla"
        else draft_config(target.config, block_size=3, markov_rank=8)
    )
    parameters = tree(config)
    table = jax.random.normal(jax.random.key(1), (config.vocab_size, config.hidden_size), jnp.float32) / 8
    exact = drafted(config, parameters, table)
    rounded = drafted(config, quantized.quantize(parameters, table), table)
    difference = float(jnp.sqrt(jnp.mean((exact - rounded) ** 2) / jnp.mean(exact**2)))
    assert 1e-4 < difference < 0.03  # a code is within 0.4 % of the largest weight of its row


@pytest.fixture(scope="module")
def draft(target, tree, tmp_path_factory):
    config, path = draft_config(target.config, block_size=3, num_layers=1, markov_rank=8), tmp_path_factory.mktemp("d")
    files.save(path, config, tree(config))
    return api.load_draft(path, target, weights="int8")


def test_a_draft_is_loaded_in_int8_with_a_copy_of_the_head(target, draft):
    leaves = [leaf.dtype for leaf in draft.leaves]
    assert leaves.count(jnp.dtype(jnp.int8)) == 1 + 6 + 2  # context; q, k, v, out, gate and up, down; two heads
    assert not draft.drafter.merge(draft.leaves).borrows[1:]  # the embedding alone


@pytest.mark.slow
def test_the_model_says_the_same(target, draft):
    def said(model):
        stream = api.generate(model, PROMPTS, max_tokens=24, temperature=0.0, ignore_eos=True, as_ids=True)
        list(stream)
        return [result.ids for result in stream.results]

    assert said(dataclasses.replace(target, draft=draft)) == said(target)


def test_auto_is_int8_for_bfloat16_on_a_gpu(monkeypatch):
    assert quantized.chosen("auto", jnp.bfloat16) == "model"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert quantized.chosen("auto", jnp.bfloat16) == "int8"
    assert quantized.chosen("auto", jnp.float32) == "model"
    with pytest.raises(ValueError, match="draft_weights is 'fp4', expected auto, model, int8"):
        quantized.chosen("fp4", jnp.bfloat16)


@pytest.mark.parametrize("kind", ["model", "int8"])
def test_a_footprint_counts_what_the_draft_holds(target, tree, kind):
    config, head = (
        small_draft.published(target.config, layers=2),
        jnp.ones((target.config.vocab_size, target.config.hidden_size), jnp.float32),
    )
    held = quantized.quantize(tree(config), head) if kind == "int8" else tree(config)
    sizes = [
        capacity.footprint(target.config, dtype=jnp.float32, draft=draft, draft_weights=kind)
        for draft in (config, None)
    ]
    assert sizes[0].weights - sizes[1].weights == sum(leaf.nbytes for leaf in jax.tree.leaves(held))
