"""`python -m serving` on the fake device: python -m tests.serving.service.fake_server [flags].

A prompt of the one token 13 crashes the engine; of the one token 14 it stands still. One that ends with 15 makes all
steps slow: its answers take 20 seconds.
"""

import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from serving.core import Core
from serving.costs import ModelCost
from serving.engine import Engine
from serving.plan import Shape
from serving.prefix_cache import CacheOptions, PrefixCache
from serving.scheduler import SchedulerOptions
from serving.service import lifecycle, program
from tests.serving.fake_runner import FakeRunner
from tests.serving.service.conftest import make_card


class TroubledRunner(FakeRunner):
    pace = 0.003

    def dispatch(self, plan):
        prompts = [row.sequence.request.tokens for row in plan.prefill]
        if [13] in prompts:
            raise RuntimeError("the device is on fire")
        if any(prompt[-1] == 15 for prompt in prompts):
            self.pace = 0.05
        time.sleep(1000 if [14] in prompts else self.pace)
        return super().dispatch(plan)


def load(loading, options, metrics):
    cost = ModelCost(flops_per_token=100.0, flops_per_pair=1.0, latent_bytes_per_token=1.0, state_bytes=50.0)
    cache = PrefixCache(CacheOptions(pages=6000, slots=200, page_size=4, unit=2), cost)
    sizes = SchedulerOptions(
        rows=options.rows, token_budget=32 + options.rows, shapes=(Shape(1, 4), Shape(2, 16)), max_length=400
    )
    engine = Engine(Core(sizes, cache, TroubledRunner(4)), on_step=metrics.step.observe)
    return engine, make_card()


if __name__ == "__main__":
    lifecycle.load = load
    sys.exit(program.main())
