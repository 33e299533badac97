"""Products of a few rows of activations with large matrices, bound by reading the matrix once."""

from pallas.gemv.api import matmul, project

__all__ = ["matmul", "project"]
