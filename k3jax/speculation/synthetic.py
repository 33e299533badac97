"""Random weights made on the device: a benchmark's model needs widths and variety, not a checkpoint.

A value is a hash of its index, so that tensors of gigabytes need no room beside themselves.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped, UInt32

from k3jax import params
from pallas.benchmark import compiled


def tree(specs: params.Tree, dtype: Any, seed: int = 0) -> params.Tree:
    """Arrays for a tree of specs, with a spread that keeps activations near 1."""

    def kind(spec: params.ParamSpec) -> tuple[tuple[int, ...], str, params.Init]:
        return spec.shape, str(spec.array_dtype(dtype)), spec.init

    kinds = (kind(spec) for _, spec in params.flatten(specs))
    programs = compiled({str(each): (fill, (jnp.uint32(0), *each)) for each in kinds})
    salts = itertools.count(1000 * seed)
    return params.map_tree(lambda spec: programs[str(kind(spec))](jnp.uint32(next(salts))), specs)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def fill(salt: UInt32[Array, ""], shape: tuple[int, ...], dtype: str, init: params.Init) -> Shaped[Array, "..."]:
    """One tensor: random codes, scales and weights of size 1 / sqrt(inputs)."""
    inputs = math.prod(shape[1:]) if len(shape) == 3 else shape[-1]
    match init:
        case "ones":
            return jnp.ones(shape, dtype)
        case "zeros":
            return jnp.zeros(shape, dtype)
        case "packed":
            return _hash(salt, shape).astype(dtype)
        case "scale":  # a code is about 2.6 rms
            return jnp.full(shape, 127 + round(math.log2(1 / (2.6 * math.sqrt(32 * shape[-1])))), dtype)
        case "dt_bias":
            return (_uniform(salt, shape) - 4.0).astype(dtype)
        case "normal":
            return (_uniform(salt, shape) * (math.sqrt(3 / inputs))).astype(dtype)


def _uniform(salt: UInt32[Array, ""], shape: tuple[int, ...]) -> Shaped[Array, "..."]:
    """In [-1, 1)."""
    return (_hash(salt, shape) >> 8).astype(jnp.float32) * (2.0**-23) - 1.0


def _hash(salt: UInt32[Array, ""], shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """32 well mixed bits of each index (the finaliser of MurmurHash3)."""
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        index = index + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    bits = index + salt * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)
