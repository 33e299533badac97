"""Products of a few rows of activations with large matrices, bound by reading the matrix once."""

from pallas.gemv.api import FEW_ROWS, matmul, matmuls, project

__all__ = ["FEW_ROWS", "matmul", "matmuls", "project"]
