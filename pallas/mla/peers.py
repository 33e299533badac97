"""Attention of other houses on expanded heads: torch's SDPA in a child process, the Mosaic GPU example of JAX here."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas.mla.shapes import LATENT, OWN, RANK, SHARED, VALUE
from pallas.peers import serve

WIDTH = OWN + SHARED


def jax_example(heads: int, tokens: int) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """`jax.experimental.pallas.ops.gpu.attention_mgpu`, causal, float16, values padded to the width of the keys."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(block_q=64, block_kv=64, max_concurrent_steps=3, causal=True)

    @jax.jit
    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention_mgpu.attention(query, key, value, config)

    return run, (jax.ShapeDtypeStruct((1, tokens, heads, WIDTH), jnp.float16),) * 3


def prepare(backend: str, kind: str, heads: int, tokens: int) -> list[Callable[[], Any]]:
    """Causal prefill, or decode of one query, of one row.

    `CUDNN_ATTENTION` and `FLASH_ATTENTION` (values padded to the width of the keys) are torch's SDPA on the keys and
    values of every head; `MATMUL` is decode in absorbed form, two products and a softmax over the latents.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    if backend == "MATMUL":
        absorbed, latents = normal(heads, LATENT), normal(tokens, LATENT)

        def multiply() -> Any:
            return torch.softmax(absorbed @ latents.T, dim=-1) @ latents[:, :RANK]

        return [multiply] * 4
    width = WIDTH if backend == "FLASH_ATTENTION" else VALUE
    query = normal(1, heads, tokens if kind == "prefill" else 1, WIDTH)
    key, value = (normal(1, heads, tokens, columns) for columns in (WIDTH, width))

    def run() -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=kind == "prefill")

    return [run] * 2


if __name__ == "__main__":
    serve(prepare)
