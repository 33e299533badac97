"""How values lie in shared memory and in registers, where several kernels agree."""

from jax.experimental.pallas import mosaic_gpu as plgpu

WIDE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""Operands of tensor-core products of 16 bits: tiles of 8 rows of 64 numbers, a line of 128 bytes each."""
WHOLE = plgpu.Layout.WG_SPLAT(())
"""A number that every thread of a warpgroup holds."""
