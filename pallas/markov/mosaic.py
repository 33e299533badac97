"""The Markov walk as one Mosaic GPU kernel: every multiprocessor keeps its rows of the head from token to token.

Warpgroups have tiles of 64 outputs of their own, in a ring of buffers of shared memory. A token's tiles are taken in
the order opposite to that of the token before, so what lies in the ring is not read again: of 42 MB of codes 17 stay.
After a token the blocks meet: each adds its best score to a maximum in device memory and counts itself. All blocks must
be resident at once, which one block a multiprocessor and nothing else that waits for it guarantees.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxtyping import Array, Float, Float32, Int8, Int32

from pallas import inline
from pallas.dispatch import MULTIPROCESSORS, multiprocessors, require_hopper
from pallas.gemv import widen
from pallas.gemv.int8 import BOX, Int8Matrix
from pallas.layouts import WIDE
from pallas.markov import meeting
from pallas.transposed_store import emulated_store, store

ROWS, COLUMNS = 64, 8
"""Of a product. The first column is the row's; the others are neighbours in the table of embeddings."""
LAYOUT = plgpu.Layout.WGMMA
RING_BYTES = 128 << 10
"""Of shared memory for tiles; more of them are kept longer, and are no quicker."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the kernel is cut."""

    groups: int = 4
    """Warpgroups of a thread block."""
    blocks: int = MULTIPROCESSORS
    """Thread blocks."""
    slots: int
    """Tiles that a warpgroup keeps."""

    @property
    def workers(self) -> int:
        """Takers of tiles."""
        return self.groups * self.blocks

    @classmethod
    def fitting(cls, rank: int) -> "Settings":
        """As many tiles as the ring holds."""
        return cls(slots=RING_BYTES // (4 * ROWS * rank))


class _Warpgroup:
    """The work of one warpgroup; built inside the kernel."""

    def __init__(self, cut: Settings, emulated: bool, refs: tuple[Any, ...], smem: dict[str, Any]) -> None:
        self.cut, self.emulated, self.smem = cut, emulated, smem
        self.logits, self.noise, self.scale, self.anchor, self.embedding, self.codes, self.factors = refs[:7]
        self.token, self.score = refs[7:]
        self.outputs, rank = self.codes.shape
        self.boxes = rank // BOX
        self.group, self.block = lax.axis_index("group"), lax.axis_index("block")
        self.worker = self.group * cut.blocks + self.block
        tiles = -(-self.outputs // ROWS)
        self.items = lax.div(jnp.int32(tiles - 1) - self.worker + cut.workers, jnp.int32(cut.workers))

    def first_row(self, step: jax.Array, visit: jax.Array) -> jax.Array:
        """First output of the tile that is visited in a step; the last tile may overlap the one before."""
        position = jnp.where(lax.rem(step, jnp.int32(2)) == 0, visit, self.items - 1 - visit)
        return jnp.minimum((self.worker + position * self.cut.workers) * ROWS, self.outputs - ROWS)

    def slot(self, step: jax.Array, visit: jax.Array) -> jax.Array:
        """Where that tile lies; the same place for the last visits of a step and the first ones of the next."""
        slots = jnp.int32(self.cut.slots)
        forth = lax.rem(visit, slots)
        back = lax.rem(self.items - 1 - forth + slots, slots)
        return self.group * slots + jnp.where(lax.rem(step, jnp.int32(2)) == 0, forth, back)

    def fetch(self, step: jax.Array, visit: jax.Array) -> None:
        """Starts the copies of a tile, if there is one."""

        @pl.when(visit < self.items)
        def _start() -> None:
            slot, row = self.slot(step, visit), self.first_row(step, visit)
            for box in range(self.boxes):
                source = self.codes.at[pl.ds(row, ROWS), pl.ds(box * BOX, BOX)]
                plgpu.copy_gmem_to_smem(
                    source, self.smem["left"].at[slot * self.boxes + box], self.smem["full"].at[slot]
                )

    def look_up(self, previous: jax.Array) -> None:
        """The embedding of the token before, and its neighbours' in the table."""
        seen = self.smem["seen"].at[self.group]
        for box in range(self.boxes):
            source = self.embedding.at[pl.ds(previous, COLUMNS), pl.ds(box * BOX, BOX)]
            plgpu.copy_gmem_to_smem(source, self.smem["right"].at[self.group * self.boxes + box], seen)
        plgpu.barrier_wait(seen)
        if not self.emulated:
            _to_half(self.smem["right"].at[self.group * self.boxes], self.boxes)
            plgpu.commit_smem()

    def products(self, slot: jax.Array) -> jax.Array:
        """The tile's products."""
        left, right = self.smem["left"], self.smem["right"]
        turn = widen.emulated_widen if self.emulated else widen.widen
        pairs = [(box, half) for box in range(self.boxes) for half in range(2)]

        def operands(box: int, half: int) -> tuple[Any, Any]:
            inputs = right.at[self.group * self.boxes + box, :, pl.ds(half * widen.HALF, widen.HALF)]
            return turn(left.at[slot * self.boxes + box], half), inputs

        if self.emulated:
            parts = [
                jnp.dot(w[...], x[...].T, preferred_element_type=jnp.float32) for w, x in (operands(*p) for p in pairs)
            ]
            return sum(parts[1:], parts[0])

        def scope(total: Any) -> jax.Array:
            for pair in pairs:
                weights, inputs = operands(*pair)
                plgpu.wgmma(total, weights, inputs.transpose((1, 0)))
                plgpu.wgmma_wait(1)
            plgpu.wgmma_wait(0)
            return total[...]

        return pl.run_scoped(scope, plgpu.ACC((ROWS, COLUMNS), jnp.float32))

    def visit(self, step: jax.Array, scale: jax.Array, visit: jax.Array, best: tuple) -> tuple:
        """A tile of a step: its scores, and the best with noise so far with its token, in the first column."""
        row, slot = self.first_row(step, visit), self.slot(step, visit)
        by_row = widen.emulated_by_row if self.emulated else widen.by_row
        factor = by_row(self.factors, row, (ROWS, COLUMNS), LAYOUT)  # long before they are needed
        logits, noise = (by_row(x.at[step], row, (ROWS, COLUMNS), LAYOUT) for x in (self.logits, self.noise))
        arrives = (step == 0) | (visit >= self.cut.slots)
        pl.when(arrives)(partial(plgpu.barrier_wait, self.smem["full"].at[slot]))
        bias = self.products(slot) * (factor * widen.HALF_SCALE)
        if not self.emulated:
            inline.synchronize()  # every warp has read the tile
        self.fetch(step, visit + self.cut.slots)
        score = (logits + bias) * scale
        target = self.score.at[pl.ds(step, 1), pl.ds(row, ROWS)]
        (emulated_store if self.emulated else store)(target, None, 0, score, LAYOUT)
        iota = lax.broadcasted_iota if self.emulated else partial(plgpu.broadcasted_iota, layout=LAYOUT)
        return _better(best, (score + noise, iota(jnp.int32, (ROWS, COLUMNS), 0) + row))

    def start(self) -> tuple:
        """A score below all."""
        low = jnp.full((ROWS, COLUMNS), -jnp.inf, jnp.float32), jnp.full((ROWS, COLUMNS), 0, jnp.int32)
        return low if self.emulated else tuple(plgpu.layout_cast(x, LAYOUT) for x in low)

    def run(self, steps: int) -> None:
        """All tokens."""
        for slot in range(self.cut.slots):
            self.fetch(jnp.int32(0), jnp.int32(slot))
        scale = self.scale[0]
        meet = meeting.Meeting(
            self.cut, steps, self.smem, None if self.emulated else pl.get_global(meeting.words(steps))
        )
        meet.prepare()

        def one(step: jax.Array, previous: jax.Array) -> jax.Array:
            self.look_up(previous)
            visit = lambda visit, best: self.visit(step, scale, visit, best)  # noqa: E731
            best = lax.fori_loop(0, self.items, visit, self.start())
            token = meet.best(step, *best)

            @pl.when(self.worker == 0)
            def _tell() -> None:
                self.token[step] = token

            return token

        lax.fori_loop(0, steps, one, self.anchor[0])


def _to_half(boxes: Any, count: int) -> None:
    """`widen.to_half` in place, wherever each number lies: bits of bfloat16 in, float16 out."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(WIDE),))
    def run(_: Any, boxes: ir.Value) -> None:
        lines = ["{ .reg .b32 at, a, b, c, d; .reg .f32 low, high; mov.u32 at, %tid.x; and.b32 at, at, 127;"]
        lines += [f"mad.lo.u32 at, at, {16 * count}, $0;"]
        for part in range(count):
            place = f"[at+{16 * part}]"
            lines.append(f"ld.shared.v4.b32 {{a, b, c, d}}, {place};")
            for word in "abcd":
                lines.append(f"shl.b32 low, {word}, 16; and.b32 high, {word}, 0xffff0000;")
                lines.append(f"mul.f32 low, low, 0f{0x3D800000:08X}; mul.f32 high, high, 0f{0x3D800000:08X};")
                lines.append(f"cvt.rn.f16x2.f32 {word}, high, low;")
            lines.append(f"st.shared.v4.b32 {place}, {{a, b, c, d}};")
        mgpu.utils.inline_ptx(" ".join([*lines, "}"]), inline.shared_address(boxes), has_side_effects=True)

    run(boxes)


def _better(one: tuple, other: tuple) -> tuple:
    """The pair of score and token with the higher score, then the lower token."""
    (score, token), (new, candidate) = one, other
    wins = (new > score) | ((new == score) & (candidate < token))
    return jnp.where(wins, new, score), jnp.where(wins, candidate, token)


def walk(
    logits: Float32[Array, "P V"],
    noise: Float32[Array, "G V"],
    scale: Float32[Array, ""],
    anchor: Int32[Array, ""],
    embedding: Float[Array, "V r"],
    codes: Int8[Array, "V r"],
    factors: Float32[Array, " V"],
    interpret: Any = None,
    settings: Settings | None = None,
) -> tuple[Int32[Array, " G"], Float32[Array, "G V"]]:
    """`api.walk` with the head's codes and scales."""
    steps, (outputs, rank) = noise.shape[0], codes.shape
    require_supported(embedding, codes)
    cut, smem = settings or Settings.fitting(rank), plgpu.SMEM
    boxes = rank // BOX
    tiles = cut.groups * cut.slots
    if interpret is None:
        embedding = lax.bitcast_convert_type(embedding, jnp.float16)  # becomes float16 in shared memory
    else:
        # The copy engine reads zeros behind the table.
        embedding = jnp.pad(widen.to_half(embedding), ((0, COLUMNS), (0, 0)))
    kernel = plgpu.kernel(
        lambda *refs, **scratch: _Warpgroup(cut, interpret is not None, refs, scratch).run(steps),
        out_type=[jax.ShapeDtypeStruct((steps,), jnp.int32), jax.ShapeDtypeStruct((steps, outputs), jnp.float32)],
        grid=(cut.blocks,),
        grid_names=("block",),
        num_threads=cut.groups,
        thread_name="group",
        scratch_types={
            "left": smem((tiles * boxes, ROWS, BOX), jnp.int8, transforms=widen.SWIZZLED),
            "right": smem((cut.groups * boxes, COLUMNS, BOX), jnp.float16, transforms=WIDE),
            "full": plgpu.Barrier(num_arrivals=boxes, num_barriers=tiles),
            "seen": plgpu.Barrier(num_arrivals=boxes, num_barriers=cut.groups),
            **meeting.scratch(cut.groups, steps, emulated=interpret is not None),
        },
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="markov_walk",
    )
    return tuple(kernel(logits, noise, scale[None], anchor[None], embedding, codes, factors))


def require_supported(embedding: jax.Array, codes: jax.Array) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernel does not serve."""
    if embedding.dtype != jnp.bfloat16:
        raise NotImplementedError(f"markov mosaic serves embeddings of bfloat16, got {embedding.dtype}")
    outputs, rank = codes.shape
    if rank % BOX or rank > 2 * BOX or outputs < ROWS or outputs % 8:
        raise NotImplementedError(
            f"markov mosaic serves ranks of {BOX} and {2 * BOX} and at least {ROWS} outputs in multiples of 8, "
            f"got {rank} and {outputs}"
        )


def on_gpu(
    logits: Float32[Array, "P V"],
    noise: Float32[Array, "G V"],
    scale: Float32[Array, ""],
    anchor: Int32[Array, ""],
    embedding: Float[Array, "V r"],
    head: Int8Matrix,
) -> tuple[Int32[Array, " G"], Float32[Array, "G V"]]:
    """`walk`, refusing where there is no Hopper GPU that holds all blocks at once."""
    require_hopper("markov mosaic")
    if (there := multiprocessors()) < MULTIPROCESSORS:
        raise NotImplementedError(f"markov mosaic needs {MULTIPROCESSORS} multiprocessors, this GPU has {there}")
    return walk(logits, noise, scale, anchor, embedding, head.codes, head.scale)
