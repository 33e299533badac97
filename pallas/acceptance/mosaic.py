"""Acceptance as three Mosaic GPU kernels, whose blocks share the vocabulary.

The first takes each row's maximum and sum, and makes the noise. The second knows the distributions p and q, so also the
prefixes' masses m, and sums the residuals max(m p - q, 0) of all rows. Whichever row is drawn from in the end, its
token is at hand: that of the largest residual / E, E exponentially spread: argmax(log residual + Gumbel noise).
The third decides. Nothing is written but what blocks tell each other, some kilobytes, and the noise.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Int32

from pallas.acceptance import decision
from pallas.acceptance.decision import LOWEST
from pallas.acceptance.scores import Arguments, Scores
from pallas.acceptance.tile import LAST, PARTS, ROWS, TALL, TILE, Tiles
from pallas.acceptance.types import Requests, Rule, Seen, Stands
from pallas.dispatch import BLACKWELL, HOPPER, require_capability
from pallas.random_bits import exponential, fold, unit

SUMS = ("target", "score", "draft")
"""What the first kernel tells the maximum and the sum of."""
FAINT = 1e-20
"""Of the target beside its residual: less than any rounding."""
GROUP = 8
"""Partial results of a row are padded to a multiple of this for each part of a tile."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How the vocabulary is shared."""

    columns: int
    """Of a warpgroup's tile."""
    groups: int
    """Warpgroups of a block."""
    blocks: int
    """Blocks of a row."""

    @classmethod
    def of(cls, vocabulary: int, columns: int = 40, groups: int = 4) -> "Settings":
        """Raises `NotImplementedError` unless tiles fill the vocabulary."""
        unit = PARTS * columns * groups
        if vocabulary % unit:
            raise NotImplementedError(f"acceptance mosaic serves multiples of {unit} tokens, got {vocabulary}")
        return cls(columns, groups, vocabulary // unit)

    @property
    def told(self) -> int:
        """Room for a partial result of each block."""
        return -(-self.blocks // (PARTS * GROUP)) * PARTS * GROUP


def require_supported(target: tuple[int, ...], draft: tuple[int, ...]) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernels do not serve."""
    require_capability("acceptance mosaic", HOPPER, BLACKWELL)
    if not 1 < target[1] <= ROWS or draft[1] != target[1] - 1:
        raise NotImplementedError(f"acceptance mosaic serves up to {ROWS - 1} drafts, got {draft[1]} for {target[1]}")
    if (size := math.prod(target)) >= 2**31:
        raise NotImplementedError(f"acceptance mosaic serves fewer than 2^31 logits, got {size}")
    Settings.of(target[2])


class Block(Scores):
    """What the kernels share; built inside one."""

    def __init__(self, cut: Settings, emulated: bool, arguments: Arguments) -> None:
        super().__init__(Tiles(emulated), arguments)
        self.cut = cut
        self.block = lax.axis_index("block")
        self.group = lax.axis_index("group")
        self.worker = self.block * cut.groups + self.group

    def tile(self) -> tuple[jax.Array, jax.Array]:
        """Row and token of each place of the warpgroup's tile."""
        columns = self.cut.columns
        return self.tiles.row(columns), self.tiles.place(self.worker * (columns * PARTS), columns)

    def share(self, kept: Any, values: list[jax.Array], met: Any) -> None:
        """Stores what a warpgroup found and waits for the others; `kept` is shared memory [groups, values, 64]."""
        for number, value in enumerate(values):
            kept[self.group, number] = value
        self.meet(met)

    def meet(self, met: Any) -> None:
        """Tells the other warpgroups that this one has stored what it knows."""
        if not self.tiles.emulated:
            plgpu.commit_smem()
        plgpu.barrier_arrive(met)

    def shared(self, kept: Any, number: int) -> list[jax.Array]:
        """What all warpgroups found."""
        return [_load_tall(kept.at[group, number], self.tiles) for group in range(self.cut.groups)]

    def tell(self, partials: Any, number: int, of: int, value: jax.Array) -> None:
        """Stores the block's value of each row, number `number` of `of`."""
        row = (self.row * of + number) * ROWS + self.tiles.row()
        self.tiles.store(partials, row, self.block, value)


def _load_tall(ref: Any, tiles: Tiles) -> jax.Array:
    return ref[...] if tiles.emulated else plgpu.load(ref, layout=TALL, optimized=False)


def measure(
    cut: Settings, emulated: bool, follow: int, arguments: Arguments, partials: Any, noise: Any, kept: Any, met: Any
) -> None:
    """The first kernel: maximum and sum of each row for target, score and draft; noise of the token that follows.

    A sum is NaN where a row's target is not finite.
    """
    here = Block(cut, emulated, arguments)
    tiles, (row, place) = here.tiles, here.tile()
    target, draft = here.target(row, place), here.draft(row, place)
    score = here.score(target, row, place)
    _make_noise(here, follow, noise)
    found = []
    for x, extra in ((target, target * 0.0), (score, None), (draft, None)):
        top = jnp.maximum(jnp.max(x, axis=1), LOWEST)
        mass = tiles.exp(x - tiles.spread(top, cut.columns))
        found += [top, jnp.sum(mass if extra is None else mass + extra, axis=1)]
    here.share(kept, found, met)

    @pl.when(here.group == 0)
    def _join() -> None:
        plgpu.barrier_wait(met)
        for number in range(len(SUMS)):
            tops, sums = here.shared(kept, 2 * number), here.shared(kept, 2 * number + 1)
            top, total = join(tiles, tops, sums)
            here.tell(partials, 2 * number, 2 * len(SUMS), top)
            here.tell(partials, 2 * number + 1, 2 * len(SUMS), total)


def join(tiles: Tiles, tops: list[jax.Array], sums: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Maximum and sum of whole rows from those of their pieces, each [64]."""
    top = tops[0]
    for other in tops[1:]:
        top = jnp.maximum(top, other)
    top = tiles.over_parts(jnp.maximum, top)
    total = sum(mass * jnp.exp(one - top) for one, mass in zip(tops, sums, strict=True))
    return top, tiles.over_parts(jnp.add, total)


def _make_noise(here: Block, follow: int, noise: Any) -> None:
    """1 / E of the worker's share of the vocabulary; shares may overlap."""
    cut, size = here.cut, here.vocabulary
    workers = cut.groups * cut.blocks
    share = -(-size // workers)
    length = -(-share // 128) * 128
    first = jnp.minimum(here.worker * share, size - length)
    if here.tiles.emulated:
        place = lax.iota(jnp.int32, length)
    else:
        layout = plgpu.Layout.WG_STRIDED((length,), vec_size=1)
        place = plgpu.broadcasted_iota(jnp.int32, (length,), 0, layout=layout)
    value = exponential(fold(here.seed, here.position, follow), (place + first).astype(jnp.uint32))
    noise[here.row, pl.ds(first, length)] = 1.0 / value


def weigh(
    cut: Settings,
    emulated: bool,
    rule: Rule,
    accept: int,
    arguments: Arguments,
    partials: Any,
    noise: Any,
    sums: Any,
    tokens: Any,
    uniforms: Any,
    kept: Any,
    kept_tokens: Any,
    ratios: Any,
    known: Any,
    knowing: Any,
    met: Any,
) -> None:
    """The second kernel: of each row the residual's sum and its token, or a greedy row's token; uniforms."""
    here = Block(cut, emulated, arguments)
    tiles, (row, place) = here.tiles, here.tile()
    target, draft = here.target(row, place), here.draft(row, place)
    drawn = tiles.load(noise, jnp.zeros_like(row) + here.row, place)
    pl.when(here.worker == 0)(partial(_make_uniforms, here, accept, uniforms))  # while loads are on their way
    score = here.score(target, row, place)
    laws = decision.Laws.of(here, _know(here, partials, known, knowing))
    weight, taken = laws.weights(rule, ratios.at[here.group])
    wide = partial(tiles.spread, columns=cut.columns)
    mass = tiles.exp(score - wide(laws.score_top))
    residual = mass * wide(weight) - tiles.exp(draft - wide(laws.draft_top)) * wide(taken)
    residual = jnp.where(residual > 0.0, residual, 0.0)  # also where the draft is not a number
    total = jnp.sum(residual, axis=1)
    # Of a residual of nothing but zeros, the target itself.
    value = jnp.where(here.random, (residual + FAINT * mass) * drawn, score)
    best = jnp.max(value, axis=1)
    kept_tokens[here.group, 0] = jnp.min(jnp.where(value == wide(best), place, LAST), axis=1)
    here.share(kept, [total, best], met)

    @pl.when(here.group == 0)
    def _join() -> None:
        plgpu.barrier_wait(met)
        whole = here.shared(kept, 0)
        here.tell(sums, 0, 2, tiles.over_parts(jnp.add, sum(whole[1:], whole[0])))
        value, token = join_best(tiles, here.shared(kept, 1), here.shared(kept_tokens, 0))
        here.tell(sums, 1, 2, value)
        here.tell(tokens, 0, 1, token)


def _know(here: Block, partials: Any, known: Any, knowing: Any) -> list[jax.Array]:
    """Maximum and sum of whole rows, of scores and of the draft; each pair by one warpgroup, for all of them."""
    told = decision.Told(here, partials, 2 * len(SUMS), here.cut.blocks)

    def pair(number: int) -> None:
        found = decision.whole(here.tiles, told.read(number, LOWEST), told.read(number + 1, 0.0))
        for place, value in enumerate(found, number - 2):
            known[place] = value

    for number in (2, 4):
        pl.when(here.group == (number // 2 - 1) % here.cut.groups)(partial(pair, number))
    here.meet(knowing)
    plgpu.barrier_wait(knowing)
    return [_load_tall(known.at[place], here.tiles) for place in range(4)]


def _make_uniforms(here: Block, accept: int, uniforms: Any) -> None:
    """What each row's draft is accepted by."""
    row = here.tiles.row()
    value = unit(fold(here.seed, here.position, accept), row.astype(jnp.uint32))
    here.tiles.store(uniforms, jnp.zeros_like(row) + here.row, row, value)


def join_best(tiles: Tiles, values: list[jax.Array], tokens: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The largest value of whole rows and the first token that has it, from those of their pieces."""
    best = values[0]
    for other in values[1:]:
        best = jnp.maximum(best, other)
    best = tiles.over_parts(jnp.maximum, best)
    first = jnp.full_like(tokens[0], LAST)
    for value, token in zip(values, tokens, strict=True):
        first = jnp.minimum(first, jnp.where(value == best, token, LAST))
    return best, tiles.over_parts(jnp.minimum, first)


def judge(
    rule: Rule,
    target: Float32[Array, "B W V"],
    draft: Float32[Array, "B G V"],
    token: Int32[Array, "B G"],
    requests: Requests,
    seen: Seen,
    streams: tuple[int, int],
    *,
    interpret: Any = None,
    settings: Settings | None = None,
) -> Stands:
    """See `api.judge`."""
    batch, width, size = target.shape
    cut, emulated = settings or Settings.of(size), interpret is not None
    arrays = (target.reshape(-1, size), draft.reshape(-1, size), token, *requests, *seen)
    accept, follow = streams
    rows, sides = batch * ROWS, partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    shared = lambda values, kind=jnp.float32: plgpu.SMEM((cut.groups, values, TILE), kind)  # noqa: E731
    run = partial(_kernel, interpret=interpret, width=width)
    grid = {"grid": (cut.blocks, batch), "grid_names": ("block", "row"), "num_threads": cut.groups}
    partials, noise = run(
        partial(measure, cut, emulated, follow),
        out_type=[sides((2 * len(SUMS) * rows, cut.told)), sides((batch, size))],
        scratch_types=[shared(2 * len(SUMS)), plgpu.Barrier(num_arrivals=cut.groups)],
        kernel_name="acceptance_measure",
        **grid,
    )(*arrays)
    sums, tokens, uniforms = run(
        partial(weigh, cut, emulated, rule, accept),
        out_type=[
            sides((2 * rows, cut.told)),
            jax.ShapeDtypeStruct((rows, cut.told), jnp.int32),
            sides((batch, ROWS)),
        ],
        scratch_types=[
            shared(2),
            shared(1, jnp.int32),
            plgpu.SMEM((cut.groups, TILE), jnp.float32),
            plgpu.SMEM((4, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=cut.groups),
            plgpu.Barrier(num_arrivals=cut.groups),
        ],
        kernel_name="acceptance_weigh",
        **grid,
    )(*arrays, partials, noise)
    return Stands(
        *run(
            partial(decision.decide, cut, emulated, rule),
            out_type=decision.outputs(batch, width),
            scratch_types=[plgpu.SMEM((decision.FLOATS, TILE), jnp.float32), plgpu.SMEM((TILE,), jnp.int32)],
            kernel_name="acceptance_decide",
            grid=(1, batch),
            grid_names=("block", "row"),
            num_threads=1,
        )(*arrays, partials, sums, tokens, uniforms)
    )


def _kernel(body: Any, *, interpret: Any, width: int, **options: Any) -> Any:
    """A kernel whose first references are `Arguments`."""

    def unpack(*refs: Any) -> None:
        count = len(Arguments._fields) - 1
        body(Arguments(width, *refs[:count]), *refs[count:])

    return plgpu.kernel(
        unpack,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        **options,
    )
