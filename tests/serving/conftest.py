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
