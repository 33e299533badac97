"""Pieces of inline code in Mosaic kernels: constants, addresses and the numbers that a thread holds."""

from collections.abc import Iterator
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, vector
from jax.experimental.mosaic import gpu as mgpu


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
