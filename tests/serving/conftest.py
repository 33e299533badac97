import dataclasses
import logging

import pytest

from serving.costs import ModelCost
from serving.prefix_cache import CacheOptions, PrefixCache


@pytest.fixture(scope="session")
def cost():
    return ModelCost(flops_per_token=100.0, flops_per_pair=1.0, latent_bytes_per_token=1.0, state_bytes=50.0)


@pytest.fixture(scope="session")
def make_cache(cost):
    def make(pages=32, slots=8, page_size=4, unit=2, **options):
        sizes = CacheOptions(pages=pages, slots=slots, page_size=page_size, unit=unit)
        return PrefixCache(sizes, cost, **options)

    return make


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture(scope="session")
def make_core(make_cache):
    from serving.core import Core
    from serving.plan import Shape
    from serving.scheduler import SchedulerOptions
    from tests.serving.fake_runner import FakeRunner

    def make(bad=(), ahead=1, cache=None, **options):
        cache = make_cache(**(cache or {}))
        defaults = {"rows": 3, "token_budget": 20, "shapes": (Shape(1, 4), Shape(2, 8)), "max_length": 64}
        runner = FakeRunner(cache.options.page_size, bad)
        return Core(SchedulerOptions(**defaults | options), cache, runner, clock=Clock(), ahead=ahead)

    return make


@pytest.fixture(scope="session")
def model(tiny_config, random_tree):
    from tests.serving.model_fixtures import build_model

    return build_model(tiny_config, random_tree)


@pytest.fixture(scope="session")
def runner(model):
    from tests.serving.model_fixtures import build_runner

    return build_runner(model)


@pytest.fixture(scope="session")
def drafting(model):
    """A runner whose rows get up to four tokens a step."""
    from tests.serving.model_fixtures import CHUNK, build_draft, build_runner

    return build_runner(dataclasses.replace(model, draft=build_draft(model.config)), shapes=(CHUNK,))


@pytest.fixture(scope="session")
def alone(runner):
    """Answers of requests that have the engine to themselves, without a prefix cache."""
    from tests.serving.model_fixtures import build_core, request, serve

    answers, memory = {}, {"spare": runner.new_state()}

    def ask(tokens, max_tokens=6, **sampling):
        key = (tuple(tokens), max_tokens, tuple(sampling.items()))
        if key not in answers:
            # Device memory of its own: the engine under test keeps what it has cached.
            runner.state, memory["kept"] = memory["spare"], runner.state
            item = request(tokens, max_tokens, **sampling)
            answers[key] = serve(build_core(runner, prefix_caching=False), item).said[0]
            runner.state, memory["spare"] = memory["kept"], runner.state
        return answers[key]

    return ask


@pytest.fixture(autouse=True)
def _service_log():
    """Leaves the service's log as it was: a program that a test runs sends it to the test's own standard error."""
    log = logging.getLogger("k3jax.serving")
    before = log.handlers[:], log.level, log.propagate
    yield
    log.handlers[:], log.propagate = before[0], before[2]
    log.setLevel(before[1])
