"""The Mosaic GPU backend of KDA: the kernels behind one check that there is a GPU to run them."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax

from pallas.dispatch import require_hopper
from pallas.kda import mosaic_decode, mosaic_prefill, mosaic_verify, xla
from pallas.kda.types import Prefill


def on_gpu(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, refusing with `WrongDevice` where the default device is not a Hopper GPU."""

    @wraps(kernel)
    def run(*args: Any) -> Any:
        require_hopper(name)
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
decode = on_gpu("kda mosaic decode", mosaic_decode.decode)
verify = on_gpu("kda mosaic verify", mosaic_verify.verify)
commit = on_gpu("kda mosaic commit", mosaic_verify.commit)
affine = on_gpu("kda mosaic affine", mosaic_prefill.affine)
