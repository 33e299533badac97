"""Public functions of the skinny product."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas.dispatch import Implementation, select
from pallas.gemv import mosaic, xla
from pallas.gemv.int8 import Int8Matrix
from pallas.precision import einsum

FEW_ROWS = mosaic.MOST_TOKENS
"""Up to this many rows a product is bound by reading the weights."""


@functools.partial(jax.jit, static_argnames=("dtypes", "implementation"))
def matmuls(
    x: Float[Array, "M K"],
    weights: tuple[Float[Array, "_ K"] | Int8Matrix, ...],
    *,
    dtypes: tuple[DTypeLike, ...] | None = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "M _"], ...]:
    """Products of x with the transpose of each matrix, in one pass: float32 sums rounded to `dtypes` (default x's).

    Matrices of int8 are [N, K] here, beside one another only, and have no gradient.
    """
    kinds = tuple(jnp.dtype(dtype) for dtype in dtypes or (x.dtype,) * len(weights))
    return select(implementation, mosaic=mosaic.on_gpu, xla=xla.matmuls)(x, weights, kinds)


def matmul(
    x: Float[Array, "M K"], weights: Float[Array, "N K"] | Int8Matrix, *, implementation: Implementation = None
) -> Float[Array, "M N"]:
    """`matmuls` for one matrix."""
    return matmuls(x, (weights,), implementation=implementation)[0]


def project(
    x: Float[Array, "..."],
    *weights: Float[Array, "..."] | Int8Matrix,
    contract: int = 1,
    dtypes: tuple[DTypeLike, ...] | None = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "..."], ...]:
    """[*batch, *inputs] times [*outputs, *inputs] -> [*batch, *outputs] for each of `weights`.

    The last `contract` axes are the inputs. Few rows of activations pass all weights in one launch where a kernel
    serves that; otherwise, and with `implementation` "xla", each is one ordinary product. float32 sums, rounded to
    `dtypes` (default x's). An `Int8Matrix` stands for the matrix that it was made of.
    """
    kinds = tuple(jnp.dtype(dtype) for dtype in dtypes or (x.dtype,) * len(weights))
    few = math.prod(x.shape[:-contract]) <= FEW_ROWS
    backends = {"mosaic": _flat, "xla": _ordinary} if few else {"xla": _ordinary}
    return select("xla" if implementation == "xla" else None, **backends)(x, weights, kinds, contract)


def _flat(
    x: Array, weights: tuple[Array | Int8Matrix, ...], dtypes: tuple[jnp.dtype, ...], contract: int
) -> tuple[Float[Array, "..."], ...]:
    batch, inputs = x.shape[:-contract], math.prod(x.shape[-contract:])
    matrices = [_matrix(matrix, contract) for matrix in weights]
    flat = tuple(matrix for matrix, _ in matrices)
    products = matmuls(x.reshape(math.prod(batch), inputs), flat, dtypes=dtypes, implementation="mosaic")
    return tuple(product.reshape(*batch, *shape) for product, (_, shape) in zip(products, matrices))


def _matrix(weights: Array | Int8Matrix, contract: int) -> tuple[Array | Int8Matrix, tuple[int, ...]]:
    """Weights as [outputs, inputs], and the shape of the outputs."""
    if isinstance(weights, Int8Matrix):
        shape = weights.scale.shape
        return Int8Matrix(weights.codes.reshape(math.prod(shape), -1), weights.scale.reshape(-1)), shape
    shape = weights.shape[:-contract]
    return weights.reshape(math.prod(shape), -1), shape


def _ordinary(
    x: Array, weights: tuple[Array | Int8Matrix, ...], dtypes: tuple[jnp.dtype, ...], contract: int
) -> tuple[Float[Array, "..."], ...]:
    def one(matrix: Array | Int8Matrix, dtype: jnp.dtype) -> Array:
        if isinstance(matrix, Int8Matrix):
            batch, (flat, shape) = x.shape[:-contract], _matrix(matrix, contract)
            return xla.matmuls(x.reshape(math.prod(batch), -1), (flat,), (dtype,))[0].reshape(*batch, *shape)
        letters = iter("abcdefghijklmnopqrstuvwxyz")
        sizes = x.ndim - contract, matrix.ndim - contract, contract
        rows, columns, summed = ("".join(next(letters) for _ in range(size)) for size in sizes)
        return einsum(f"{rows}{summed},{columns}{summed}->{rows}{columns}", x, matrix, out=dtype)

    return tuple(one(matrix, dtype) for matrix, dtype in zip(weights, dtypes, strict=True))
