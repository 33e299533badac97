"""Products of a few rows of activations with large matrices, bound by reading the matrix once."""

from pallas.gemv.api import FEW_ROWS, matmul, matmuls, project
from pallas.gemv.int8 import Int8Matrix, quantize

__all__ = ["FEW_ROWS", "Int8Matrix", "matmul", "matmuls", "project", "quantize"]
