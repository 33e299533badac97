"""The Mosaic GPU backend of KDA: the kernels behind one check that there is a GPU to run them."""

from functools import wraps
from typing import Any

from collections.abc import Callable

from pallas.dispatch import require_gpu
from pallas.kda import mosaic_decode, mosaic_prefill, mosaic_verify


def on_gpu(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, refusing with `NotImplementedError` where the default backend is not a GPU."""

    @wraps(kernel)
    def run(*args: Any) -> Any:
        require_gpu(name)
        return kernel(*args)

    return run


prefill = on_gpu("kda mosaic prefill", mosaic_prefill.prefill)
decode = on_gpu("kda mosaic decode", mosaic_decode.decode)
verify = on_gpu("kda mosaic verify", mosaic_verify.verify)
commit = on_gpu("kda mosaic commit", mosaic_verify.commit)
affine = on_gpu("kda mosaic affine", mosaic_prefill.affine)
