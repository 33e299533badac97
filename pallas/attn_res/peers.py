"""fla's fused AttnRes, timed on the same GPU: mix and norm, without the addition to the prefix."""

from collections.abc import Callable
from typing import Any

from pallas.attn_res.shapes import HIDDEN
from pallas.peers import serve

BEYOND_CACHE = 200e6
"""Bytes of vectors that the calls of one graph walk over, where a single call's would stay in the cache."""


def prepare(vectors: int, tokens: int) -> list[Callable[[], Any]]:
    """Calls that mix `vectors` rows of each of `tokens` tokens."""
    import torch
    from fla.ops.attnres import fused_attnres

    def normal(*shape: int) -> "torch.Tensor":
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    query, norm, out_norm = normal(HIDDEN) / 20, 1 + normal(HIDDEN) / 10, 1 + normal(HIDDEN) / 10
    many = max(2, min(20, round(BEYOND_CACHE / (2 * HIDDEN * vectors * tokens))))
    sets = [[normal(tokens, HIDDEN) for _ in range(vectors)] for _ in range(many)]
    return [lambda x=x: fused_attnres(query, x, norm, out_norm, rms_eps=1e-5) for x in sets]


if __name__ == "__main__":
    serve(prepare)
