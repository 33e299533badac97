"""What blocks do when they meet: the count that they meet by, and the join, whose program runs here lane by lane."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas.mla import mosaic_meet, mosaic_plan, mosaic_share
from tests.pallas.comparison import relative
from tests.pallas.ptx import Memory, Warp


@pytest.mark.parametrize("blocks", [1, 2, 33, 132])
def test_blocks_go_on_when_the_last_one_has_come(blocks):
    """Launch after launch, in any order, over the end of 32 bits."""
    rng, count = np.random.default_rng(0), 0
    first, other = mosaic_meet.steps(blocks)
    for _ in range(5):
        found = []
        for number in rng.permutation(blocks):
            assert not any(old >> 31 != count >> 31 for old in found)
            found.append(count)
            count = (count + (first if number == 0 else other)) % 2**32
        assert all(old >> 31 != count >> 31 for old in found)


def plan_for(parts, queries, narrow):
    return mosaic_plan.Plan(
        heads=queries,
        rank=512 if narrow else 256,
        width=576 if narrow else 320,
        own=0,
        scale=1.0,
        page=64,
        pages=parts,
        groups=1,
        most=-(-queries // 8) * 8,
        parts=parts,
        turns=1,
        least=1,
        narrow=narrow,
        meets=True,
        interpret=None,
    )


def channel_of(plan, side, block, warp, half, row):
    """Channel of a row of a warpgroup's sums."""
    inside = 64 * warp + 8 * row + 2 * block + half if plan.narrow else 64 * block + 16 * warp + 8 * half + row
    return side * plan.rank // 2 + inside


def laid_out(plan, sums):
    """Sums [parts, query, channel] in the order in which threads store them."""
    blocks, eights = plan.rank // 128, plan.most // 8
    order = list(itertools.product(range(eights), range(blocks), range(2)))
    found = np.zeros((plan.parts, 2, len(order) // 4, 4, 4, 8, 4, 2), np.float32)
    for side, warp, c, row in itertools.product(range(2), range(4), range(4), range(8)):
        for index, (eight, block, half) in enumerate(order):
            query, channel = 8 * eight + 2 * c, channel_of(plan, side, block, warp, half, row)
            found[:, side, index // 4, warp, c, row, index % 4] = sums[:, query : query + 2, channel]
    return np.asarray(jnp.asarray(found, jnp.bfloat16)).view(np.uint16)


@pytest.mark.parametrize(
    ("parts", "used", "queries", "narrow"), [(5, 3, 6, False), (37, 37, 8, False), (9, 9, 12, True), (2, 0, 8, False)]
)
def test_the_join_of_parts(parts, used, queries, narrow):
    """Against float64; parts that are not used hold what is not a number."""
    plan, rng = plan_for(parts, queries, narrow), np.random.default_rng(0)
    sums = rng.standard_normal((parts, plan.most, plan.rank))
    sums = np.asarray(jnp.asarray(sums, jnp.bfloat16), np.float32)
    tops, totals = rng.integers(-3, 3, (parts, plan.most)), rng.uniform(1, 2, (parts, plan.most))
    stats = np.stack([tops[:, 0::2], tops[:, 1::2], totals[:, 0::2], totals[:, 1::2]], axis=-1).astype(np.float32)
    stats = np.ascontiguousarray(stats.swapaxes(0, 1))
    sums[used:], stats[:, used:] = np.nan, np.nan
    output = np.full((queries, plan.rank), 0x7FC0, np.uint16)
    memory, workers = Memory(), 3
    places = [memory.place(array) for array in (laid_out(plan, sums), stats, output)]
    program = mosaic_share._Program(plan, queries, workers, 2, meets=True).text()
    for worker, warp in itertools.product(range(workers), range(2)):
        Warp(memory, [*places, worker, 0, used], 32 * warp).run(program)
    actual = output.view(jnp.bfloat16).astype(np.float64)
    weights = 2.0 ** tops[:used]
    expected = (
        np.einsum("pq,pqc->qc", weights, sums[:used].astype(np.float64))
        / np.maximum(1e-30, (weights * totals[:used]).sum(0))[:, None]
    )
    assert np.isfinite(actual).all()
    assert relative(actual, expected[:queries]) < 3e-3 if used else not actual.any()
