"""A small random K3 for the engine: two KDA layers around an MLA layer, dense and MoE, AttnRes blocks."""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from k3jax.logit_rules import mask_words
from k3jax.runtime import Model
from k3jax.speculation.drafters import Draft
from serving.core import Core
from serving.costs import ModelCost
from serving.plan import Shape
from serving.prefix_cache import CacheOptions, PrefixCache
from serving.request import Request
from serving.runner import JaxRunner, RunnerOptions, tokens_per_step
from serving.scheduler import SchedulerOptions
from tests import small_draft

ROWS, PAGES, SLOTS, PAGE, UNIT = 4, 49, 14, 8, 4
CHUNK, WIDE = Shape(2, 16), Shape(1, 40)
SHAPES = (CHUNK,)


def build_model(tiny_config, random_tree):
    config = dataclasses.replace(tiny_config, num_layers=4, mla_layers=(2, 3), attn_res_block_size=2)
    return Model.of(config, random_tree(config), max_length=96)


def build_runner(model, shapes=(CHUNK, WIDE)):
    options = RunnerOptions(rows=ROWS, shapes=shapes, captures=2, widths=(12,))
    runner = JaxRunner(model, CacheOptions(pages=PAGES, slots=SLOTS, page_size=PAGE, unit=UNIT), options)
    runner.warm_up()
    return runner


def build_core(runner, pages=PAGES, slots=SLOTS, **options):
    """An engine on the runner's device memory, or on the first part of it."""
    cache = PrefixCache(
        CacheOptions(pages=pages, slots=slots, page_size=PAGE, unit=UNIT), ModelCost.of(runner.model.config)
    )
    block = tokens_per_step(runner.model)
    defaults = {
        "rows": runner.options.rows,
        "token_budget": 44 + 12,
        "block": block,
        "shapes": SHAPES,
        "max_length": 96,
    }
    words = mask_words(runner.model.config.vocab_size)
    return Core(SchedulerOptions(**defaults | options), cache, runner, mask_words=words)


_ids = itertools.count()


def request(tokens, max_tokens=6, *, fields=None, **sampling):
    return Request(
        id=f"r{next(_ids)}",
        tokens=[int(token) for token in tokens],
        max_tokens=max_tokens,
        sampling={"temperature": 0.0} | sampling,
        **fields or {},
    )


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, 250, length).tolist()


class Served(NamedTuple):
    said: list
    logprobs: list
    final: list


def collect(outputs, items):
    def joined(item, name):
        return [value for output in outputs[item.id] for value in getattr(output, name)]

    return Served(
        [joined(item, "tokens") for item in items],
        [joined(item, "logprobs") for item in items],
        [outputs[item.id][-1].final for item in items],
    )


def serve(core, *items):
    for item in items:
        core.submit(item)
    outputs = core.run(5000)
    core.check_books()
    return collect(outputs, items)


def build_draft(config, **options):
    """A draft of three tokens without a confidence head."""
    return Draft(*small_draft.build(small_draft.settings(config, taps=(0, 2), mask=252, confidence=False), **options))
