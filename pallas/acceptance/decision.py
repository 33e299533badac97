"""How many drafts stand, from what all blocks told, and what is emitted."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas.acceptance.scores import Arguments, Scores
from pallas.acceptance.tile import LAST, PARTS, ROWS, Tiles
from pallas.acceptance.types import Rule, Stands, shapes

FLOATS = 4
"""Ratios, sums of residuals, uniforms and sums of the target's rows, by row, in shared memory."""
LOWEST = -3e38
"""A finite number below all scores: what has no weight keeps none."""


def outputs(batch: int, width: int) -> list[Any]:
    """Shapes of what is emitted."""
    return list(shapes(batch, width))


class Told:
    """Partial results of all blocks: `read(number)` [64, columns]."""

    def __init__(self, here: Scores, partials: Any, of: int, blocks: int) -> None:
        self.here, self.partials, self.of = here, partials, of
        columns = partials.shape[-1] // PARTS
        tiles = here.tiles
        self.row, self.place = tiles.row(columns), tiles.place(0, columns)
        self.there = self.place < blocks

    def read(self, number: int, missing: Any) -> jax.Array:
        """One kind, `missing` where no block is."""
        row = (self.here.row * self.of + number) * ROWS + self.row
        return jnp.where(self.there, self.here.tiles.load(self.partials, row, self.place), missing)


def whole(tiles: Tiles, tops: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Maximum and sum of each row, from those of all blocks."""
    top = tiles.over_parts(jnp.maximum, jnp.max(tops, axis=1))
    weighed = sums * jnp.exp(tops - tiles.spread(top, tops.shape[1]))
    return top, tiles.over_parts(jnp.add, jnp.sum(weighed, axis=1))


class Laws(NamedTuple):
    """What is known of each row's distributions, [64] each."""

    here: Scores
    score_top: jax.Array
    score_sum: jax.Array
    draft_top: jax.Array
    draft_sum: jax.Array
    ratio: jax.Array
    """p / q of each row's draft."""

    @classmethod
    def of(cls, here: Scores, known: list[jax.Array]) -> "Laws":
        """From maxima and sums, of scores and then of the draft."""
        row, drafted = here.tiles.row(), here.drafted()
        score = here.score(here.target(row, drafted), row, drafted)
        draft = here.draft(row, drafted)
        top, total, draft_top, draft_sum = known
        p, q = jnp.exp(score - top) / total, jnp.exp(draft - draft_top) / draft_sum
        return cls(here, top, total, draft_top, draft_sum, p / jnp.where(q > 0, q, 1.0))

    def weights(self, rule: Rule, ratios: Any) -> tuple[jax.Array, jax.Array]:
        """What exp(score - top) and exp(draft - top) are multiplied by in a row's residual.

        `ratios`: shared memory [64]. At the limit the target itself is drawn from.
        """
        here, row = self.here, self.here.tiles.row()
        limit = here.arguments.limit[here.row]
        mass = jnp.ones_like(self.ratio)
        if rule == "block":
            ratios[...] = self.ratio
            here.tiles.synchronize()
            prefix = jnp.float32(1)
            for k in range(here.drafts):
                prefix = jnp.minimum(prefix * ratios[k * PARTS], 1.0)
                mass = jnp.where(row == k + 1, prefix, mass)
        ends = row == limit
        weight = jnp.where(ends, 1.0, mass) / self.score_sum
        taken = jnp.where(ends | (row >= here.drafts), 0.0, 1.0 / self.draft_sum)
        return weight, taken


def decide(
    cut: Any,
    emulated: bool,
    rule: Rule,
    arguments: Arguments,
    partials: Any,
    sums: Any,
    tokens: Any,
    uniforms: Any,
    *rest: Any,
) -> None:
    """The third kernel, one warpgroup for each row of the batch."""
    (*results, floats, integers) = rest
    here = Scores(Tiles(emulated), arguments)
    tiles, row = here.tiles, here.tiles.row()
    measured, weighed, best = (Told(here, ref, of, cut.blocks) for ref, of in ((partials, 6), (sums, 2), (tokens, 1)))
    tops = [measured.read(number, 0.0 if number % 2 else LOWEST) for number in range(6)]
    values, firsts = weighed.read(1, -jnp.inf), best.read(0, LAST)
    residuals, chance = weighed.read(0, 0.0), tiles.load(uniforms, jnp.zeros_like(row) + here.row, row)
    drafted = here.drafted()
    plain = here.target(row, drafted)
    follows = jnp.clip(tiles.largest(values, firsts), 0, here.vocabulary - 1)
    drawn = here.target(row, follows)
    top, total, *known = (x for k in (0, 2, 4) for x in whole(tiles, *tops[k : k + 2]))
    laws = Laws.of(here, known)
    ratio = jnp.where(here.random, laws.ratio, (drafted == follows).astype(jnp.float32))
    excess = tiles.over_parts(jnp.add, jnp.sum(residuals, axis=1))
    for place, value in enumerate((ratio, excess, chance, total)):
        floats[place] = value
    integers[...] = follows
    tiles.synchronize()
    columns = [[floats[place, k * PARTS] for k in range(here.width)] for place in range(FLOATS)]
    count = _standing(here, rule, *columns[:3])
    finite = functools.reduce(operator.and_, (column < jnp.inf for column in columns[3]))
    after = [integers[k * PARTS] for k in range(here.width)]
    block = [arguments.token[here.row, k] for k in range(here.drafts)] + [jnp.int32(0)]
    block = [jnp.where(count == k, *pair) for k, pair in enumerate(zip(after, block, strict=True))]
    _emit(here, results, block, count, finite)
    logprob = jnp.where(row == count, drawn, plain) - top - jnp.log(total)
    tiles.store(results[1], jnp.zeros_like(row) + here.row, row, logprob, here.width)


def _standing(
    here: Scores,
    rule: Rule,
    ratios: list[jax.Array],
    excess: list[jax.Array],
    uniforms: list[jax.Array],
) -> jax.Array:
    """How many drafts stand."""
    ratios = ratios[: here.drafts]
    limit, count = here.arguments.limit[here.row], jnp.int32(0)
    if rule == "standard":
        run = jnp.bool_(True)
        for k, ratio in enumerate(ratios):
            run = run & (uniforms[k] < ratio) & (k < limit)
            count = jnp.where(run, k + 1, count)
        return count
    mass = jnp.float32(1)
    for k, ratio in enumerate(ratios):
        mass = jnp.minimum(mass * ratio, 1.0)
        left = excess[k + 1] if k + 1 < len(ratios) else jnp.float32(0)
        left = jnp.where(here.random, left, 0.0)
        inner = jnp.where(mass >= 1, 1.0, left / jnp.maximum(left + 1.0 - mass, 1e-30))
        chance = jnp.where(k + 1 < limit, inner, mass)
        count = jnp.where((uniforms[k] < chance) & (k < limit), k + 1, count)
    return count


def _emit(here: Scores, results: list[Any], block: list[jax.Array], stood: jax.Array, finite: jax.Array) -> None:
    """Stores tokens and how many of them count: up to the first stop token, and what remains."""
    arguments, row = here.arguments, here.row
    running, remaining = arguments.running[row] > 0, arguments.remaining[row]
    limit = jnp.minimum(stood + 1, remaining)
    stopped, count = jnp.bool_(False), limit
    for k in reversed(range(len(block))):
        hit = jnp.bool_(False)
        for place in range(arguments.stop_ids.shape[1]):
            hit = hit | (block[k] == arguments.stop_ids[row, place])
        hit = hit & (k < limit)
        stopped, count = stopped | hit, jnp.where(hit, k + 1, count)
    count = jnp.where(running, count, 0)
    goes_on = running & ~stopped & (count < remaining) & finite
    good = finite | ~running
    count = jnp.where(good, count, 1)
    told = Stands(*results)
    for k, value in enumerate(block):
        told.token[row, k] = value
    told.count[row] = count
    told.accepted[row] = jnp.where(running, stood, 0)
    told.finite[row] = good
    told.verified[row] = jnp.where(running, arguments.limit[row], 0)
    told.goes_on[row] = goes_on
    told.running[row] = goes_on.astype(jnp.int32)
    told.position[row] = arguments.positions[row] + count
    told.remaining[row] = remaining - count
    anchor = block[0]
    for k, value in enumerate(block):
        anchor = jnp.where(count == k + 1, value, anchor)
    told.anchor[row] = anchor
