"""The Mosaic GPU backend of AttnRes: the kernels behind one check that there is a GPU to run them."""

from functools import partial
from typing import Any

import jax

from pallas.attn_res import mosaic_read, mosaic_stream, mosaic_summary, xla
from pallas.attn_res.types import Read, Summary
from pallas.dispatch import BLACKWELL, HOPPER, require_capability


def read(*args: Any) -> Read:
    """`api.read`; refuses with `NotImplementedError` where the default device is no GPU that it was compiled for."""
    require_capability("attn_res mosaic read", HOPPER, BLACKWELL)
    return differentiable_read(*args)


def read_term(*args: Any) -> Read:
    """`api.read` of a term, for few tokens: the sum over devices is a part of the kernel. Refuses as `read` does."""
    require_capability("attn_res mosaic read of a term", HOPPER, BLACKWELL)
    *given, table, axis = args
    return mosaic_read.read(*given, table=table, devices=jax.lax.axis_size(axis))


def summarize(*args: Any, eps: float) -> Summary:
    """`api.summarize`; refuses as `read` does."""
    require_capability("attn_res mosaic summary", HOPPER, BLACKWELL)
    return mosaic_summary.summarize(*args, eps)


FEW_TOKENS = 64
"""Up to this many tokens a cluster of blocks reads each token; beyond, every block walks over tokens of its own."""


def kernel(*args: Any) -> Read:
    """The faster kernel for the number of tokens."""
    prefix = args[1]
    few = prefix.size <= FEW_TOKENS * prefix.shape[-1]
    return mosaic_read.read(*args) if few else mosaic_stream.read(*args)


@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def differentiable_read(*args: Any) -> Read:
    """The kernel's values, with the gradients of the portable form, recomputed."""
    return kernel(*args)


def _forward(*args: Any) -> tuple[Read, tuple]:
    return kernel(*args), args[:6]


def _backward(eps: float, norm_eps: float, saved: tuple, cotangent: Read) -> tuple:
    _, pull_back = jax.vjp(lambda *inputs: xla.read(*inputs, eps, norm_eps), *saved)
    return pull_back(cotangent)


differentiable_read.defvjp(_forward, _backward)
