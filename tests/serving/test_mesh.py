"""The engine on two fake devices: heads split, caches placed, every rank the same tokens (D.1 16, D.3 50).

Slow: programs for a mesh take half a minute to compile.
"""

import dataclasses

import jax
import numpy as np
import pytest

from k3jax import params, sharding
from k3jax.cache import KdaCache
from k3jax.dspark import quantized
from k3jax.runtime import Model
from k3jax.speculation.drafters import Draft, NgramDrafter
from serving.retention import Retention
from tests.serving.model_fixtures import CHUNK, build_core, build_draft, build_runner, prompt, request, serve

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(tiny_config):
    """As the engine's other tests, with heads that two devices can share."""
    kda = dataclasses.replace(tiny_config.kda, num_heads=4)
    mla = dataclasses.replace(tiny_config.mla, num_heads=4)
    sizes = {"vocab_size": 258, "num_layers": 3, "mla_layers": (1,), "attn_res_block_size": 2}
    return dataclasses.replace(tiny_config, **sizes, kda=kda, mla=mla)


@pytest.fixture(scope="module")
def whole(config, random_tree):
    """The model on one device."""
    return Model.of(config, random_tree(config), max_length=96)


@pytest.fixture(scope="module")
def divided(config, random_tree):
    layout = sharding.layout("tp2")
    places = layout.parameters(params.model_specs(config))
    return Model.of(config, jax.tree.map(jax.device_put, random_tree(config), places), layout=layout, max_length=96)


@pytest.fixture(scope="module")
def spread(divided):
    return build_runner(divided, shapes=(CHUNK,))


@pytest.fixture(scope="module")
def said_by(whole):
    """Greedy tokens of one device: each is the argmax after all tokens before it."""

    def check(tokens, said):
        logits = whole.logits([*tokens, *said[:-1]])[len(tokens) - 1 :]
        return logits.argmax(-1).tolist()

    return check


def shards(array):
    return {str(shard.index) for shard in array.addressable_shards}


def test_tokens_hits_and_preemption_are_those_of_one_device(spread, said_by):
    """D.1 16: a hit counts tokens, not ranks' shares of them; the state is split by head and found again."""
    core = build_core(spread, retention=Retention(decode_end=False))
    prompts = [prompt(seed, 9 + 6 * seed) for seed in range(4)]
    cold = serve(core, *map(request, prompts))
    warm = serve(core, *map(request, prompts))
    assert cold.said == warm.said == list(map(said_by, prompts, cold.said))
    assert [final.cached_tokens for final in warm.final] == [(len(p) - 1) // 4 * 4 for p in prompts]
    tight = build_core(spread, pages=12, output_reserve=0.0)
    long = [prompt(seed, 17) for seed in (10, 11, 12)]
    served = serve(tight, *(request(tokens, 20) for tokens in long))
    assert tight.counters.preemptions > 0
    assert served.said == list(map(said_by, long, served.said))


def test_pools_stay_where_they_are(spread):
    """Donation needs it: states by head, everything that decides alike on both devices."""
    serve(build_core(spread), request(prompt(1, 20), temperature=1.0))
    states = [entry.state for entry in spread.state.cache.layers if isinstance(entry, KdaCache)]
    assert all(len(shards(state)) == 2 for state in states)
    for array in (spread.state.token, spread.state.alive, spread.state.length, spread.state.rules.allowed):
        first, second = (np.asarray(shard.data) for shard in array.addressable_shards)
        np.testing.assert_array_equal(first, second)


def test_nothing_is_compiled_after_warm_up(spread):
    tokens = prompt(13, 20)
    before = spread.compilations
    fields = {"logprobs": 2, "prompt_logprobs": 1, "logit_bias": {3: 1.0}, "min_tokens": 2}
    serve(
        build_core(spread), request(tokens), request(tokens, 5, temperature=1.0, frequency_penalty=0.5, fields=fields)
    )
    assert spread.compilations == before


@pytest.mark.parametrize("kind", ["dspark", "ngram", pytest.param("int8", marks=pytest.mark.slow)])
def test_drafts_on_a_mesh(divided, said_by, kind):
    """D.3 50: what is accepted is decided alike on both devices, for requests of different lengths."""
    change = quantized.quantize if kind == "int8" else dict
    draft = Draft(NgramDrafter(3), ()) if kind == "ngram" else build_draft(divided.config, change=change)
    draft = draft._replace(leaves=divided.place(draft.leaves))
    runner = build_runner(dataclasses.replace(divided, draft=draft), shapes=(CHUNK,))
    prompts = [prompt(seed, 3 + 5 * seed) for seed in range(7)]
    lengths = [4 + 3 * (seed % 4) for seed in range(7)]
    served = serve(build_core(runner), *map(request, prompts, lengths))
    assert [len(said) for said in served.said] == lengths
    assert served.said == list(map(said_by, prompts, served.said))
