"""Per-head Muon: momentum orthogonalised matrix by matrix, attention projections head by head (report 2.5).

A matrix parameter moves along the orthogonal factor of its Nesterov momentum, which Newton-Schulz
iterations approximate on the device. Matrices of one shape, whatever layer they come from, are stacked
and iterated together. The factor 0.2 sqrt(max(rows, columns)) gives the update the size of AdamW's
(arXiv 2502.16982), so both share one learning rate.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from k3jax.params import Tree, flatten
from k3jax.train.specs import Matrices, nest

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Quintic a x + b x^3 + c x^5 with the steepest slope at 0 that keeps singular values near 1."""
ITERATIONS = 5
UPDATE_RMS = 0.2

Path = tuple[str, ...]


class MuonState(NamedTuple):
    """Momentum of every Muon parameter."""

    momentum: Tree


def newton_schulz(matrices: Float32[Array, "n rows columns"], dtype: jnp.dtype) -> Float[Array, "n rows columns"]:
    """Approximate orthogonal factors; products in `dtype` (bfloat16 on GPUs)."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = jnp.swapaxes(matrices, 1, 2) if tall else matrices
    x = (x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-7)).astype(dtype)
    a, b, c = COEFFICIENTS

    def product(left: Array, right: Array, equation: str) -> Array:
        precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
        return jnp.einsum(equation, left, right, precision=precision, preferred_element_type=dtype)

    def iterate(_: Array | int, x: Array) -> Array:
        gram = product(x, x, "nij,nkj->nik")
        polynomial = b * gram + c * product(gram, gram, "nij,njk->nik")
        return a * x + product(polynomial, x, "nij,njk->nik")

    x = jax.lax.fori_loop(0, ITERATIONS, iterate, x)
    return jnp.swapaxes(x, 1, 2) if tall else x


def to_matrices(array: Array, view: Matrices) -> list[Float32[Array, "n rows columns"]]:
    """A parameter as stacks of matrices, one stack per stored projection."""
    count = 1
    for size in array.shape[: view.stack]:
        count *= size
    stack = array.reshape(count, array.shape[view.stack], -1)
    if not view.rows:
        return [stack]
    bounds = [sum(view.rows[:i]) for i in range(1, len(view.rows))]
    return list(jnp.split(stack, bounds, axis=1))


def from_matrices(stacks: list[Array], shape: tuple[int, ...]) -> Array:
    """The inverse of `to_matrices`."""
    return jnp.concatenate(stacks, axis=1).reshape(shape)


def orthogonalize(momenta: Mapping[Path, Array], views: Mapping[Path, Matrices], dtype: jnp.dtype) -> dict[Path, Array]:
    """Orthogonal factors of all momenta, scaled to the update size; equal shapes are iterated together."""
    stacks = {path: to_matrices(array, views[path]) for path, array in momenta.items()}
    places: dict[tuple[int, ...], list[tuple[Path, int]]] = defaultdict(list)
    for path, parts in stacks.items():
        for i, part in enumerate(parts):
            places[part.shape[1:]].append((path, i))
    for shape, members in places.items():
        joined = jnp.concatenate([stacks[path][i] for path, i in members])
        factors = newton_schulz(joined, dtype).astype(jnp.float32) * (UPDATE_RMS * max(shape) ** 0.5)
        bounds, total = [], 0
        for path, i in members[:-1]:
            bounds.append(total := total + stacks[path][i].shape[0])
        for (path, i), part in zip(members, jnp.split(factors, bounds), strict=True):
            stacks[path][i] = part
    return {path: from_matrices(parts, momenta[path].shape) for path, parts in stacks.items()}


def scale_by_muon(
    views: Mapping[Path, Matrices], *, momentum: float = 0.95, dtype: DTypeLike = jnp.bfloat16
) -> optax.GradientTransformation:
    """Nesterov momentum, then orthogonalisation per matrix; other leaves must be masked out (`optax.partition`)."""

    def arrays(tree: Tree) -> dict[Path, Array]:
        return {path: leaf for path, leaf in flatten(tree) if path in views and isinstance(leaf, jax.Array)}

    def init(params: Tree) -> MuonState:
        return MuonState(nest({path: jnp.zeros_like(leaf) for path, leaf in arrays(params).items()}))

    def update(gradients: Tree, state: MuonState, params: Tree | None = None) -> tuple[Tree, MuonState]:
        found = arrays(gradients)
        old = dict(flatten(state.momentum))
        new = {path: momentum * old[path] + gradient for path, gradient in found.items()}
        ahead = {path: gradient + momentum * new[path] for path, gradient in found.items()}
        steps = orthogonalize(ahead, views, jnp.dtype(dtype))
        updates = nest({path: steps.get(path, leaf) for path, leaf in flatten(gradients)})
        return updates, MuonState(nest(new))

    return optax.GradientTransformation(init, update)
