"""The Mosaic GPU backend of KDA: the kernels behind one check that there is a GPU to run them."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax

from pallas.dispatch import BLACKWELL, HOPPER, require_capability
from pallas.kda import (
    mosaic_commit,
    mosaic_decode,
    mosaic_decode_cluster,
    mosaic_prefill,
    mosaic_verify,
    mosaic_verify_cluster,
    xla,
)
from pallas.kda.mosaic_cluster import pays
from pallas.kda.mosaic_token import ROWS
from pallas.kda.types import Decode, Prefill, Verify


def on_gpu(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, refusing as `dispatch.require_capability` does."""

    @wraps(kernel)
    def run(*args: Any) -> Any:
        require_capability(name, HOPPER, BLACKWELL)
        return kernel(*args)

    return run


def differentiable(kernel: Callable[..., Prefill]) -> Callable[..., Prefill]:
    """A prefill whose values are the kernel's and whose gradients are those of the portable form, recomputed."""

    @partial(jax.custom_vjp, nondiff_argnums=(8, 9))
    def run(*args: Any) -> Prefill:
        return kernel(*args)

    def forward(*args: Any) -> tuple[Prefill, tuple]:
        return kernel(*args), args[:8]

    def backward(lower_bound: float, norm_eps: float, saved: tuple, cotangent: Prefill) -> tuple:
        floats, integers = saved[:6], saved[6:]
        _, pull_back = jax.vjp(lambda *floats: xla.prefill(*floats, *integers, lower_bound, norm_eps), *floats)
        return (*pull_back(cotangent), None, None)

    run.defvjp(forward, backward)
    return run


prefill = on_gpu("kda mosaic prefill", differentiable(mosaic_prefill.prefill))
prefill_packed = on_gpu("kda mosaic prefill", mosaic_prefill.prefill_packed)


def decode_by_size(*args: Any) -> Decode:
    """Few heads as clusters of blocks, many as a walk of one block a multiprocessor over them."""
    items = args[0].shape[0] * args[0].shape[1]
    return (mosaic_decode_cluster if pays(items) else mosaic_decode).decode(*args)


def verify_by_size(*args: Any) -> Verify:
    """Few heads as clusters of blocks, many as a block each; a cluster wants four tokens."""
    rows, tokens, heads = args[0].shape[:3]
    return (mosaic_verify_cluster if tokens >= ROWS and pays(rows * heads) else mosaic_verify).verify(*args)


decode = on_gpu("kda mosaic decode", decode_by_size)
verify = on_gpu("kda mosaic verify", verify_by_size)
commit = on_gpu("kda mosaic commit", mosaic_commit.commit)
commit_layers = on_gpu("kda mosaic commit", mosaic_commit.commit_layers)
affine = on_gpu("kda mosaic affine", mosaic_prefill.affine)
