"""The shipped draft on real text: one place off in taps, positions or the Markov token costs acceptance."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import api, step
from k3jax.cache import Rows
from k3jax.speculation.drafters import taps
from pallas import mla

TOKENS, PAGE = 224, 64
ANCHORS = np.arange(40, TOKENS - 12, 4)


@pytest.fixture(scope="module")
def case():
    """Text that the draft was not trained on, the target's laws after each token of it, and its taps."""
    root = api.shipped_checkpoint()
    if not root.with_name(f"{root.name}-dspark").is_dir():
        pytest.skip("checkpoints/nano-dspark is absent")
    model = api.load(dtype=jnp.float32, draft="auto")
    ids = model.tokenizer.encode(Path(api.__file__).with_name("cache.py").read_text())[:TOKENS]
    rows = Rows(*(jnp.asarray(value, jnp.int32) for value in ([0], [[0]], [0], [TOKENS])))
    output = step.forward(model.graph, model.leaves, rows, jnp.asarray([ids], jnp.int32), trace=True)
    laws = jax.nn.softmax(output.logits[0])
    draft = model.draft.drafter.merge(model.draft.leaves)
    tables = model.graph.merge(model.leaves)
    return draft, jnp.asarray(ids, jnp.int32), laws, taps(output.trace, draft.config), tables


@pytest.fixture(scope="module")
def acceptance(case):
    """Mean acceptance length over the anchors: 1 + sum of the products of overlaps, the text being accepted."""
    draft, ids, laws, features, tables = case
    count, pages = len(ANCHORS), TOKENS // PAGE + 1
    anchors = jnp.asarray(ANCHORS, jnp.int32)

    @jax.jit
    def measure(shift_taps, shift_context, shift_block, shift_previous):
        moved = jnp.roll(features, shift_taps, axis=1)
        table = jnp.arange(1, pages + 1, dtype=jnp.int32)[None]
        at = jnp.arange(TOKENS, dtype=jnp.int32)[None] + shift_context
        context, zero, valid = draft.context(moved), jnp.zeros(1, jnp.int32), jnp.ones((1, TOKENS), bool)
        empty = jnp.zeros((pages + 1, PAGE, draft.config.attention.row_width))
        pools = tuple(
            mla.write_pages(empty, layer.attention.rows(context, at), table, zero, valid) for layer in draft.layers
        )
        number = jnp.ones(count, jnp.int32)
        # Pages of its own for every anchor: drafting writes behind the context.
        pools = tuple(jnp.concatenate([pool[:1], *[pool[1:]] * count]) for pool in pools)
        table = table + pages * jnp.arange(count, dtype=jnp.int32)[:, None]
        rows = Rows(number, table, anchors + shift_block, number)
        block = draft.draft(pools, ids[anchors], rows, tables.embedding[...], tables.head[...])
        overlaps = []

        def choose(k, logits):
            overlaps.append(jnp.sum(jnp.minimum(jax.nn.softmax(logits), laws[anchors + k]), axis=-1))
            return ids[anchors + k + 1 + shift_previous]

        draft.sample(block, ids[anchors + shift_previous], choose)
        return 1 + jnp.mean(jnp.sum(jnp.cumprod(jnp.stack(overlaps, axis=1), axis=1), axis=1))

    def run(**shifts):
        names = ("taps", "context", "block", "previous")
        return float(measure(*(jnp.int32(shifts.get(name, 0)) for name in names)))

    return run


@pytest.mark.slow
@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("name", ["taps", "context", "block", "previous"])
def test_a_shift_costs_acceptance(acceptance, name, by):
    right = acceptance()
    assert right > 1.5
    assert acceptance(**{name: by}) < right - 0.05
