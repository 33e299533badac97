"""Exchange of a few numbers between the blocks of a cluster, in one hop.

Every block sends with `st.async`: the store completes at a barrier of the receiving block, so that neither a fence nor
a separate arrival has to follow it. The receiver knows from the start how many bytes it will get.
"""

from typing import Any

import jax
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas.inline import shared_address

LANES = plgpu.Layout.TILED(plgpu.Tiling(((4, 32), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1).reduce(0)
"""[32]: a value per lane, the same in every warp."""
BARRIERS = 2
WORDS = 2 * BARRIERS
"""32-bit words of shared memory that the barriers take."""


def _values(array: Any) -> list[ir.Value]:
    """The registers of a thread."""
    zero = mgpu.c(0, ir.IntegerType.get_signless(32))
    return [llvm.extractelement(register, zero) for register in array.registers.flat]


def open_exchange(barriers: Any, expected: tuple[int, int]) -> None:
    """Prepares both barriers for so many bytes each; `await_peers` must follow before anything is sent."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def prepare(_: Any, barriers: ir.Value) -> None:
        lines = ["{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"]
        for index in range(BARRIERS):
            lines.append(f"@p mbarrier.init.shared::cta.b64 [$0+{8 * index}], 1;")
        lines.append("@p fence.mbarrier_init.release.cluster;")
        for index, size in enumerate(expected):
            lines.append(f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0+{8 * index}], {size};")
        lines.append("barrier.cluster.arrive.relaxed.aligned; }")
        mgpu.inline_ptx(" ".join(lines), shared_address(barriers), has_side_effects=True, convergent=True)

    prepare(barriers)


def await_peers() -> None:
    """Waits until every block of the cluster has opened its exchange."""

    @plgpu.inline_mgpu()
    def wait(_: Any) -> None:
        mgpu.inline_ptx("barrier.cluster.wait.acquire.aligned;", has_side_effects=True, convergent=True)

    wait()


def send_rows(barriers: Any, target: Any, values: jax.Array, layout: Any, blocks: int) -> None:
    """Stores values, number 4 i + w in register i of warp w, at `target` of every block; barrier 0 counts them."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), layout))
    def emit(_: Any, barriers: ir.Value, target: ir.Value, values: Any) -> None:
        registers = _values(values)
        lines = ["{ .reg .pred p; .reg .u32 t, w, l, d, a, b; mov.u32 t, %tid.x; shr.u32 w, t, 5; and.b32 l, t, 31;"]
        lines.append(f"mad.lo.u32 d, w, 4, $1; setp.lt.u32 p, l, {blocks};")
        lines.append("@p mapa.shared::cluster.u32 a, d, l; @p mapa.shared::cluster.u32 b, $0, l;")
        for index in range(len(registers)):
            store = "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32"
            lines.append(f"@p {store} [a+{16 * index}], ${2 + index}, [b];")
        asm = " ".join([*lines, "}"])
        operands = (shared_address(barriers), shared_address(target), *registers)
        mgpu.inline_ptx(asm, *operands, has_side_effects=True, convergent=True)

    emit(barriers, target, values)


def send_warp_sums(barriers: Any, row: Any, values: jax.Array, layout: Any, blocks: int) -> None:
    """Sums a value of every thread within each warp and stores the sums at `row` of every block; barrier 1 counts."""
    lines = ["{ .reg .pred p; .reg .u32 t, w, l, d, a, b; .reg .f32 s, o; mov.u32 t, %tid.x; mov.f32 s, $2;"]
    for step in (16, 8, 4, 2, 1):
        lines.append(f"shfl.sync.bfly.b32 o, s, {step}, 31, 0xffffffff; add.f32 s, s, o;")
    lines.append(f"shr.u32 w, t, 5; and.b32 l, t, 31; mad.lo.u32 d, w, 4, $1; setp.lt.u32 p, l, {blocks};")
    lines.append("add.u32 b, $0, 8; @p mapa.shared::cluster.u32 a, d, l; @p mapa.shared::cluster.u32 b, b, l;")
    lines.append("@p st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [a], s, [b]; }")

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), layout))
    def emit(_: Any, barriers: ir.Value, row: ir.Value, values: Any) -> None:
        asm = " ".join(lines)
        operands = (shared_address(barriers), shared_address(row), *_values(values))
        mgpu.inline_ptx(asm, *operands, has_side_effects=True, convergent=True)

    emit(barriers, row, values)


def receive(barriers: Any, index: int) -> None:
    """Waits until all bytes that barrier `index` expects are there."""
    asm = f"""{{ .reg .pred p;
        AGAIN_${{:uid}}: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$0+{8 * index}], 0;
        @!p bra AGAIN_${{:uid}}; }}"""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(_: Any, barriers: ir.Value) -> None:
        mgpu.inline_ptx(asm, shared_address(barriers), has_side_effects=True, convergent=True)

    wait(barriers)
