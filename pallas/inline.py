"""Pieces of inline code in Mosaic kernels: instructions, constants, addresses, and what a thread is and holds."""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector


def asm(
    kinds: Sequence[ir.Type], text: str, constraints: str, *operands: ir.Value, pure: bool = False
) -> list[ir.Value]:
    """Instructions as text, in a scope of their own; a value of each of `kinds`, `$0` on, then come the operands.

    `pure` ones touch no memory and no other thread: they may be moved, merged and left out.
    """
    kind = llvm.StructType.get_literal(list(kinds)) if len(kinds) > 1 else next(iter(kinds), None)
    made = llvm.inline_asm(kind, operands, "{" + text + "}", constraints, asm_dialect=0, has_side_effects=not pure)
    if len(kinds) > 1:
        return [llvm.extractvalue(one, made, [i]) for i, one in enumerate(kinds)]
    return [made] if kinds else []


def word() -> ir.Type:
    """The type of 32 bits."""
    return ir.IntegerType.get_signless(32)


def i32(value: int) -> ir.Value:
    """A 32-bit constant; from 2^31 on its bits count."""
    kind = ir.IntegerType.get_signless(32)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value if value < 1 << 31 else value - (1 << 32)))


def i64(value: int) -> ir.Value:
    """A 64-bit constant."""
    kind = ir.IntegerType.get_signless(64)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value))


def index(value: ir.Value) -> ir.Value:
    """An integer as an index into an array."""
    return arith.index_cast(ir.IndexType.get(), value)


def warp_and_lane() -> tuple[ir.Value, ir.Value]:
    """Number of a thread's warp in its warpgroup, 0 to 3, and of the thread in that warp, 0 to 31."""
    thread = arith.remui(mgpu.utils.thread_idx(), i32(128))
    return arith.divui(thread, i32(32)), arith.remui(thread, i32(32))


def synchronize() -> None:
    """Waits, from a kernel's body, for the warpgroup's warps, and makes their stores to shared memory visible to them.

    Lighter than `plgpu.commit_smem`, which also waits for their loads from memory and serves the copy engine.
    """

    @plgpu.inline_mgpu()
    def run(_: Any) -> None:
        mgpu.utils.warpgroup_barrier()

    run()


def shared_address(ref: Any) -> ir.Value:
    """The 32-bit address of shared memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))


def elements(registers: Any) -> Iterator[ir.Value]:
    """The numbers that a thread holds of an array, one by one."""
    for register in registers.flat:
        if not isinstance(register.type, ir.VectorType):
            yield register
            continue
        for place in range(ir.VectorType(register.type).shape[0]):
            yield vector.extract(register, dynamic_position=[], static_position=[place])
