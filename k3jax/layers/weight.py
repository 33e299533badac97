"""Weights of products: arrays as they are, or matrices in 8 bits."""

from types import EllipsisType

from flax import nnx
from jaxtyping import Array, Float, Shaped

from pallas import gemv

Weight = Float[Array, "..."] | gemv.Int8Matrix
"""What `gemv.project` multiplies with."""


class Int8Param(nnx.Module):
    """A matrix in 8 bits as a module's parameter; `[...]` reads it."""

    def __init__(self, matrix: gemv.Int8Matrix) -> None:
        self.codes, self.scale = nnx.Param(matrix.codes), nnx.Param(matrix.scale)

    def __getitem__(self, _: EllipsisType) -> gemv.Int8Matrix:
        return gemv.Int8Matrix(self.codes[...], self.scale[...])


def param(weight: Shaped[Array, "..."] | gemv.Int8Matrix) -> nnx.Param[Array] | Int8Param:
    """A module's parameter of the weight's kind; tables may be of other types than products take."""
    return Int8Param(weight) if isinstance(weight, gemv.Int8Matrix) else nnx.Param(weight)
