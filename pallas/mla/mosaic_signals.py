"""Barriers of a decode block, and copies that arrive at them.

Of a warpgroup a lane of each warp arrives, and of a copy the one thread that asks for it. Pallas' own barriers want
every thread of a warpgroup each time, and one thread initialises them one by one, at 73 cycles each; they stand here
for interpretation only.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas import inline
from pallas.layouts import WHOLE
from pallas.mla.mosaic_plan import WARPS

BLOCK_WARPS = 16
WORD = 8
"""Bytes of a barrier."""


class Kind(NamedTuple):
    """Barriers of one meaning."""

    count: int
    copies: int = 0
    """Copies that arrive at each."""
    chunks: int = 0
    """Chunks of these copies together."""
    groups: int = 0
    """Warpgroups that arrive at each."""


def scratch(kinds: Mapping[str, Kind], *, emulated: bool) -> dict[str, Any]:
    """Shared memory, by name."""
    if emulated:
        barriers = {name: (kind.chunks + kind.groups, kind.count) for name, kind in kinds.items()}
        return {name: plgpu.Barrier(num_arrivals=all_, num_barriers=n) for name, (all_, n) in barriers.items()}
    return {"words": plgpu.SMEM((2 * sum(kind.count for kind in kinds.values()),), jnp.int32)}


def prepare(kinds: Mapping[str, Kind], buffers: dict[str, Any]) -> dict[str, "Signals | EmulatedSignals"]:
    """The barriers by name, ready; every thread of the block comes here."""
    if "words" not in buffers:
        return {name: EmulatedSignals(buffers[name]) for name in kinds}
    counts = [kind.copies + WARPS * kind.groups for kind in kinds.values() for _ in range(kind.count)]
    firsts = itertools.accumulate((kind.count for kind in kinds.values()), initial=0)
    _initialise(buffers["words"], counts)
    return {name: Signals(buffers["words"], first) for name, first in zip(kinds, firsts)}


def _initialise(words: Any, counts: list[int]) -> None:
    """Barriers in turn by the first lanes of all warps."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_: Any, words: ir.Value) -> None:
        lines = [
            "{ .reg .pred p, q; .reg .b32 i, a, n; mov.u32 i, %tid.x; and.b32 n, i, 31; setp.eq.u32 q, n, 0;",
            f"shr.u32 i, i, 5; mad.lo.u32 a, i, {WORD}, $0;",
        ]
        for first in range(0, len(counts), BLOCK_WARPS):
            mine = counts[first : first + BLOCK_WARPS]
            lines.append(f"mov.b32 n, {mine[0]};")
            for place, (before, count) in enumerate(itertools.pairwise(mine), 1):
                if count != before:
                    lines.append(f"setp.ge.u32 p, i, {place}; selp.b32 n, {count}, n, p;")
            there = f"[a+{WORD * first}]"
            lines.append(f"setp.lt.and.u32 p, i, {len(mine)}, q; @p mbarrier.init.shared::cta.b64 {there}, n;")
        lines.append("fence.mbarrier_init.release.cluster; barrier.cta.sync 0; }")
        utils.inline_ptx(" ".join(lines), inline.shared_address(words), has_side_effects=True, convergent=True)

    run(words)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How a copy lies in shared memory."""

    transforms: tuple
    """Of the shared memory."""
    swizzle: int
    source: tuple = ()
    """What turns a slice of the source into the shape of the shared memory."""
    fold: tuple[int, int] | None = None
    """First dimension and number of those that are one to the copy."""
    chunks: int = 1
    chunked: bool = False
    """Whether the shared memory has a dimension of chunks."""


@dataclasses.dataclass(frozen=True)
class Signals:
    """Barriers of a block in a row, from number `first`."""

    words: Any
    first: int

    def wait(self, index: Any, turn: Any) -> None:
        """Until barrier `index` has been arrived at by all for the time number `turn`, counted from 0."""
        text = f"""{{ .reg .pred p; .reg .b32 a, odd; and.b32 odd, $2, 1; mad.lo.u32 a, $1, {WORD}, $0;
            AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [a], odd; @!p bra AGAIN; }}"""
        self._run(text, index, turn)

    def arrive(self, index: Any) -> None:
        """By a warpgroup, each of whose warps has done what it says."""
        text = f"""{{ .reg .pred p; .reg .b32 a; mov.u32 a, %laneid; setp.eq.u32 p, a, 0; mad.lo.u32 a, $1, {WORD}, $0;
            @p mbarrier.arrive.release.cta.shared::cta.b64 _, [a]; }}"""
        self._run(text, index)

    def copy(self, index: Any, source: Any, where: Sequence[Any], target: Any, form: "Form") -> None:
        """Starts a copy of source[where], of numbers and (start, size) pairs, to shared memory of this form."""
        starts = [jnp.int32(part[0] if isinstance(part, tuple) else part) for part in where]
        sizes = [part[1] if isinstance(part, tuple) else None for part in where]
        types = (plgpu.RefType(), plgpu.RefType(), plgpu.RefType(form.transforms), WHOLE, [WHOLE] * len(starts))

        @plgpu.inline_mgpu(arg_types=types)
        def run(ctx: Any, words: ir.Value, source: ir.Value, target: ir.Value, index: Any, starts: Any) -> None:
            places = [inline.index(start.registers.item()) for start in starts]
            slices = tuple(p if size is None else mgpu.ds(p, size) for p, size in zip(places, sizes))
            number = arith.addi(index.registers.item(), inline.i32(self.first))
            place = utils.getelementptr(utils.memref_ptr(words), [number], ir.IntegerType.get_signless(64))
            ctx.async_copy(
                src_ref=source,
                dst_ref=utils.memref_fold(target, *form.fold) if form.fold else target,
                gmem_slice=slices,
                gmem_transform=form.source,
                swizzle=form.swizzle,
                barrier=utils.BarrierRef(place, inline.i32(0), None, 1),  # waited for elsewhere, hence without phases
            )

        run(self.words, source, target, jnp.int32(index), starts)

    def _run(self, text: str, *numbers: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), [WHOLE] * len(numbers)))
        def run(_: Any, words: ir.Value, numbers: Any) -> None:
            i32 = inline.i32(WORD * self.first)
            base = arith.addi(inline.shared_address(words), i32)
            operands = [number.registers.item() for number in numbers]
            utils.inline_ptx(text, base, *operands, has_side_effects=True, convergent=True)

        run(self.words, [jnp.int32(number) for number in numbers])


@dataclasses.dataclass(frozen=True)
class EmulatedSignals:
    """The same by Pallas' barriers."""

    barriers: Any

    def wait(self, index: Any, turn: Any) -> None:
        """`Signals.wait`; turns are counted by the barrier itself."""
        plgpu.barrier_wait(self.barriers.at[index])

    def arrive(self, index: Any) -> None:
        """`Signals.arrive`."""
        plgpu.barrier_arrive(self.barriers.at[index])

    def copy(self, index: Any, source: Any, where: Sequence[Any], target: Any, form: "Form") -> None:
        """`Signals.copy`, chunk by chunk."""
        *front, (first, size) = where
        there = tuple(pl.ds(*part) if isinstance(part, tuple) else part for part in front)
        for chunk in range(form.chunks):
            columns = pl.ds(first + chunk * (size // form.chunks), size // form.chunks)
            here = target.at[chunk] if form.chunked else target
            plgpu.copy_gmem_to_smem(source.at[(*there, columns)], here, self.barriers.at[index])
