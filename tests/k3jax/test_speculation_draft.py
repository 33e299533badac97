"""The draft's attention over pages, and its draws."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import sampling
from k3jax.cache import Rows
from k3jax.config import k3
from k3jax.dspark.config import DraftMla
from k3jax.dspark.tensors import draft_specs
from k3jax.layers.draft_attention import draft_attention
from k3jax.speculation import bench, synthetic
from k3jax.speculation.randomness import admitted, draw, keys, law, pick
from pallas import mla

WIDTH, COLUMNS, PAGE = 3, 4, 4


@pytest.fixture(scope="module")
def config():
    sizes = DraftMla(num_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    small = {"hidden_size": 32, "intermediate_size": 16, "num_layers": 1, "vocab_size": 32, "draft_vocab_size": 32}
    return dataclasses.replace(bench.k3_draft(k3()), attention=sizes, target_hidden_size=32, **small)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_over_pages_is_attention_over_the_rows(config, causal):
    """Stale rows behind a sequence and the padding column are never seen; a row that is done writes nothing."""
    attention = draft_attention(config, synthetic.tree(draft_specs(config), jnp.float32)["layers"]["0"]["attention"])
    rng = np.random.default_rng(0)
    pool = jnp.asarray(rng.standard_normal((7, PAGE, 24)), jnp.float32)
    lengths, table = [5, 2, 6], [[3, 1], [4, 6], [2, 5]]
    for row, length in enumerate(lengths):
        for stale in range(length, 2 * PAGE):
            pool = pool.at[table[row][stale // PAGE], stale % PAGE].set(jnp.nan)
    numbers = ([1, 2, 3], table, lengths, [WIDTH, WIDTH, 0])
    block = Rows(*(jnp.asarray(number, jnp.int32) for number in numbers))
    x = jnp.asarray(rng.standard_normal((3, COLUMNS, 32)), jnp.float32)
    position = block.length[:, None] + jnp.arange(COLUMNS, dtype=jnp.int32)[None]
    output, after = attention.attend(x, position, pool, block, causal=causal)
    place = np.arange(COLUMNS)
    among = (place[None] <= place[:, None]) if causal else np.ones((COLUMNS, COLUMNS), bool)
    visible = np.stack(
        [
            np.concatenate([np.tile(np.arange(2 * PAGE) < length, (COLUMNS, 1)), among & (place < count)], axis=1)
            for length, count in zip(lengths, (WIDTH, WIDTH, 0), strict=True)
        ]
    )
    own = attention.rows(x, position)
    rows = jnp.concatenate([jnp.nan_to_num(mla.gather_pages(pool, block.page_table)), own], axis=1)
    expected = attention(x, position, rows, jnp.asarray(visible))
    np.testing.assert_allclose(output[:2, :WIDTH], expected[:2, :WIDTH], rtol=1e-4, atol=1e-5)
    for row, length in enumerate(lengths):
        kept, now = (np.asarray(p[jnp.asarray(table[row])]).reshape(8, -1) for p in (pool, after))
        written = WIDTH if row < 2 else 0
        np.testing.assert_array_equal(now[:length], kept[:length])
        np.testing.assert_allclose(now[length : length + written], own[row, :written], rtol=1e-6)
        assert np.isnan(now[length + written :]).all()


@pytest.mark.parametrize("settings", [{}, {"top_k": [4, 0], "temperature": [0.7, 1.0]}, {"temperature": [0.0, 1.3]}])
def test_a_pick_is_a_draw_of_its_law(settings):
    """The same noise decides, before and after the sum of the law is known."""
    logits = jnp.asarray(np.random.default_rng(2).standard_normal((2, 40)), jnp.float32)
    sampler = sampling.Sampling.of(2, seed=[3, 9], **settings)
    kept = admitted(logits, sampler)
    one = law(logits, kept, sampler)
    np.testing.assert_allclose(one.sum(-1), 1, rtol=1e-5)

    def tokens(choose, *args):
        return [np.asarray(choose(*args, keys(sampler.seed, jnp.full(2, at, jnp.int32)))) for at in range(30)]

    np.testing.assert_array_equal(tokens(pick, logits, kept, sampler), tokens(draw, one))
    greedy = np.asarray(sampler.temperature) == 0
    np.testing.assert_array_equal(jax.nn.one_hot(jnp.argmax(logits, -1), 40)[greedy], one[greedy])
