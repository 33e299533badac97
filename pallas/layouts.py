"""How values lie in shared memory, where kernels of several ops agree."""

from jax.experimental.pallas import mosaic_gpu as plgpu

WIDE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""Operands of tensor-core products of 16 bits: tiles of 8 rows of 64 numbers, a line of 128 bytes each."""
