"""The model inside `jax.shard_map` on eight fake devices against the model of one device."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from k3jax import cache as caches
from k3jax import params, sharding, step
from k3jax.cache import Rows
from k3jax.config import KdaConfig, k3
from k3jax.model import K3
from k3jax.verification.forced_routing import extend_forced
from pallas import dispatch
from pallas.collectives import inboxes

TOLERANCE = 2e-4
"""Relative RMS allowed between two float32 evaluation orders: the bound of the whole project."""
TOKENS = 128
"""Enough for eight devices to split a chunk by token."""
KERNELS = {"attn_res", "gemv", "kda", "mla", "moe"}
"""What the names of each op's kernels begin with."""


def relative(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.isfinite(actual).all()
    return np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))


def rows_of(query_length, length):
    values = ([1, 2], [[1, 2, 3], [4, 5, 6]], length, query_length)
    return Rows(*(jnp.asarray(value, jnp.int32) for value in values))


@pytest.fixture(scope="module")
def config(tiny_config):
    """A dense KDA layer and an MLA layer with MoE, a block each; eight divides everything that tp8 splits."""
    return dataclasses.replace(
        tiny_config,
        vocab_size=264,
        num_layers=2,
        mla_layers=(1,),
        attn_res_block_size=1,
        kda=KdaConfig(num_heads=8, head_dim=32),
        mla=dataclasses.replace(tiny_config.mla, num_heads=8),
        moe=dataclasses.replace(tiny_config.moe, num_experts=16, intermediate_size=256),
    )


@pytest.fixture(scope="module")
def tree(config, random_tree):
    return random_tree(config)


@pytest.fixture(scope="module")
def ids(config):
    return jnp.asarray(np.random.default_rng(1).integers(0, config.vocab_size, (2, TOKENS)), jnp.int32)


def model_on(preset, config, tree, layout=None):
    if preset is None:
        return None, step.split(K3(config, tree))
    layout = layout or sharding.layout(preset)
    placed = jax.tree.map(jax.device_put, tree, layout.parameters(params.model_specs(config)))
    return layout, step.split(K3(config, placed, None, layout), layout)


def with_inboxes(preset):
    """The preset with inboxes at addresses that only a GPU could use."""
    layout = sharding.layout(preset)
    split = NamedSharding(layout.mesh, PartitionSpec(layout.axis))
    table = jax.device_put(inboxes.rows(range(layout.mesh.size)), split)
    return dataclasses.replace(layout, inboxes=inboxes.Inboxes(table, ()))


def pools(config, layout):
    cache = caches.create(config, slots=3, pages=7, page_size=64, dtype=jnp.float32)
    return cache if layout is None else jax.tree.map(jax.device_put, cache, layout.cache(cache))


def run(preset, config, tree, ids):
    """A prefill with traces, then one token more, with a table of inboxes that is not used here."""
    layout, split = model_on(preset, config, tree, preset and with_inboxes(preset))
    first = step.extend(*split, pools(config, layout), rows_of([TOKENS, 100], [0, 0]), ids, trace=True)
    kept = jax.tree.map(np.asarray, first)
    second = step.extend(*split, first.cache, rows_of([1, 1], [TOKENS, 100]), ids[:, :1])
    return layout, kept, second


@pytest.fixture(scope="module")
def alone(config, tree, ids):
    return run(None, config, tree, ids)[1:]


@pytest.mark.parametrize(
    "preset", ["tp8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dep8", "tp2", "tp4"))]
)
def test_prefill_and_decode_equal_one_device(preset, config, tree, ids, alone):
    layout, *ours = run(preset, config, tree, ids)
    assert layout.mesh.size == int(preset[-1])
    for row, length in enumerate((TOKENS, 100)):
        assert relative(ours[0].logits[row, :length], alone[0].logits[row, :length]) < TOLERANCE
        for mine, theirs in zip(ours[0].trace, alone[0].trace, strict=True):
            assert relative(mine.prefix[row, :length], theirs.prefix[row, :length]) < TOLERANCE
            assert relative(mine.mixed[row, :length], theirs.mixed[row, :length]) < TOLERANCE
    for mine, theirs in zip(ours[0].trace[1:], alone[0].trace[1:], strict=True):
        np.testing.assert_array_equal(mine.routing.ids[:TOKENS], theirs.routing.ids[:TOKENS])
    assert relative(ours[1].logits, alone[1].logits) < TOLERANCE
    for mine, theirs in zip(jax.tree.leaves(ours[1].cache), jax.tree.leaves(alone[1].cache), strict=True):
        assert relative(mine[1:], theirs[1:]) < TOLERANCE


def collectives(preset, config, tree, tokens):
    """Names of the exchanges in the program of a step with so many tokens."""
    layout, split = model_on(preset, config, tree)
    ids = jnp.zeros((2, tokens), jnp.int32)
    text = step.extend.lower(*split, pools(config, layout), rows_of([tokens] * 2, [0, 0]), ids).as_text()
    names = ("reduce_scatter", "all_gather", "all_to_all")
    return {"all_reduce": sums(text), **{name: text.count(f'stablehlo.{name}"') for name in names}}


def sums(text):
    """Sums over all devices in a program; those of one shape share a function."""
    return len(re.findall(r"call @all_reduce\w*\(", text))


@pytest.mark.parametrize("preset", ["tp8", "dep8"])
def test_what_devices_exchange(preset, config, tree):
    """A long chunk is read by token: the sums are scattered, and only the latents of experts are added up whole."""
    few, many = (collectives(preset, config, tree, tokens) for tokens in (1, TOKENS))
    layers, moe_layers = config.num_layers, config.num_layers - 1
    if preset == "tp8":  # embedding, attention, MLP; a MoE layer adds up its latents before their norm
        assert few == {"all_reduce": 1 + 2 * layers + moe_layers, "reduce_scatter": 0, "all_gather": 0, "all_to_all": 0}
        assert many["reduce_scatter"] == 1 + 2 * layers
        assert many["all_reduce"] == moe_layers
        assert many["all_gather"] == 2 * layers + 1
    else:
        assert few == {"all_reduce": moe_layers, "reduce_scatter": 0, "all_gather": 0, "all_to_all": 0}
        assert many["all_to_all"] == 4 * moe_layers
        assert many["reduce_scatter"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tp8", "dep8"])
def test_forced_experts_on_a_mesh(preset, config, tree, ids):
    chosen = np.random.default_rng(3).permuted(np.tile(np.arange(16, dtype=np.int32), (2 * TOKENS, 1)), axis=1)[:, :3]
    experts = (jnp.asarray(chosen),)
    results = []
    for name in (preset, None):
        layout, split = model_on(name, config, tree)
        rows = rows_of([TOKENS, TOKENS], [0, 0])
        results.append(extend_forced(*split, pools(config, layout), rows, ids, experts))
    assert relative(results[0].forward.logits, results[1].forward.logits) < TOLERANCE
    for mine, theirs in zip(results[0].scores, results[1].scores, strict=True):
        assert relative(mine, theirs) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tp8", "dep8"])
def test_a_speculative_step_commits_on_every_device(preset, config, tree, ids):
    results = []
    for name in (preset, None):
        layout, (graph, leaves) = model_on(name, config, tree)
        rows = rows_of([8, 8], [0, 0])

        def verify(leaves, cache, graph=graph, rows=rows):
            output = graph.merge(leaves)(ids[:, :8], rows, cache.speculative())
            return output.hidden, graph.commit(output.cache, rows, jnp.asarray([3, 8], jnp.int32))

        results.append(jax.jit(verify)(leaves, pools(config, layout)))
    for mine, theirs in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        assert relative(mine, theirs) < TOLERANCE


@pytest.mark.parametrize(
    ("preset", "tokens"),
    [
        ("tp8", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("tp8", 2048), ("dep8", 1), ("dep8", 2048))),
    ],
)
def test_k3_on_eight_gpus_runs_the_kernels(monkeypatch, preset, tokens):
    """Lowered for CUDA, without a GPU: a dense KDA layer and an MLA layer with all experts, at full width."""
    monkeypatch.setattr(dispatch, "require_gpu", lambda name: None)
    config = dataclasses.replace(k3(), num_layers=2, mla_layers=(1,), attn_res_block_size=1)
    layout, graphs = with_inboxes(preset), []

    def build(tree):
        graph, leaves = step.split(K3(config, tree, None, layout), layout)
        graphs.append(graph)
        return leaves

    leaves = jax.eval_shape(build, params.abstract(config))
    cache = jax.eval_shape(lambda: caches.create(config, slots=2, pages=33, page_size=64))
    number = jax.ShapeDtypeStruct((1,), jnp.int32)
    rows = Rows(number, jax.ShapeDtypeStruct((1, 32), jnp.int32), number, number)
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    text = step.prefill.trace(graphs[0], leaves, cache, rows, ids).lower(lowering_platforms=("cuda",)).as_text()
    kernels = set(re.findall(r"00([a-z_]+?)_mosaic_gpu", text))
    one_hop = tokens == 1 and preset == "tp8"
    expected = KERNELS | {"all_reduce"} if one_hop else KERNELS
    assert {name for name in {*KERNELS, "all_reduce"} if any(kernel.startswith(name) for kernel in kernels)} == expected
    if (
        one_hop
    ):  # the embedding alone is summed by the runtime; both layers start a block, so a read sums each MLP's terms
        assert text.count('"stablehlo.all_reduce"') == 1
        assert sums(text) == 1 + config.num_layers
        assert len(re.findall(r"call @normed_all_reduce\w*\(", text)) == config.num_layers - 1
