"""Pieces of inline code in Mosaic kernels: instructions, constants, addresses, and what a thread is and holds."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector


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


def numbers(values: Sequence[ir.Value], like: Any) -> Any:
    """An array of float32, laid out as `like`, of single numbers by thread."""
    registers = np.empty(like.registers.shape, dtype=object)
    kind = ir.VectorType.get((1,), ir.F32Type.get())
    registers.flat[:] = [vector.broadcast(kind, value) for value in values]
    return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=None)


def gather(source: Any, places: tuple[jax.Array, ...], layout: Any) -> jax.Array:
    """`source` in device memory at these places, in float32, from a kernel's body; a thread holds single numbers."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *(layout,) * len(places)),
        return_type=plgpu.ShapeDtypeStruct(places[0].shape, jnp.float32, layout=layout),
    )
    def run(_: Any, source: ir.Value, *places: Any) -> Any:
        f32, found = ir.F32Type.get(), []
        for at in zip(*(elements(place.registers) for place in places), strict=True):
            value = memref.load(source, [index(place) for place in at])
            found.append(value if value.type == f32 else arith.extf(f32, value))
        return numbers(found, places[0])

    return run(source, *places)


def scatter(target: Any, places: jax.Array, values: jax.Array, layout: Any) -> None:
    """target[places] = values in device memory, from a kernel's body; equal places have equal values."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))
    def run(_: Any, target: ir.Value, places: Any, values: Any) -> None:
        for place, value in zip(elements(places.registers), elements(values.registers), strict=True):
            memref.store(value, target, [index(place)])

    run(target, places, values)
