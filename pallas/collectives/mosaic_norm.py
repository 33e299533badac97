"""RMSNorm of a sum over devices as one Mosaic GPU kernel.

A token's numbers are spread over the blocks of a cluster, 512 each, four a thread. Every thread sums its own over the
devices, see `exchange`; one exchange joins the blocks, of the squares.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt32

from pallas import cluster
from pallas.collectives import exchange
from pallas.dispatch import BLACKWELL, HOPPER, require_capability

THREADS, WARPS, WIDTH = 128, 4, 4
SPAN = THREADS * WIDTH
"""Numbers of a block."""
MOST_BLOCKS = 8
THREAD = plgpu.Layout.TILED(
    plgpu.Tiling(((THREADS, WIDTH), (THREADS // 4, WIDTH))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
)
"""[128, 4]: a row per thread."""


def on_gpu(
    term: Float[Array, "N D"],
    axis: str,
    table: UInt32[Array, "1 W"] | None,
    weight: Float[Array, " D"],
    dtype: jnp.dtype,
    eps: float,
) -> Float[Array, "N D"]:
    """See `pallas.collectives.normed_all_reduce`; refuses with `NotImplementedError` what it does not serve."""
    require_capability("norm of a one-shot sum", HOPPER, BLACKWELL)
    if table is None:
        raise NotImplementedError("the norm of a sum needs a table of inboxes (`collectives.connect`), there is none")
    return normed_sum(term, table, weight, dtype, eps, jax.lax.axis_size(axis))


def normed_sum(
    term: Float[Array, "N D"],
    table: UInt32[Array, "1 W"],
    weight: Float[Array, " D"],
    dtype: jnp.dtype,
    eps: float,
    devices: int,
) -> Float[Array, "N D"]:
    """The norm of the sum over so many devices, which is rounded to bfloat16 first.

    Raises `NotImplementedError` with the reason for types and sizes that the kernel does not serve.
    """
    exchange.require_supported(term)
    tokens, numbers = term.shape
    if jnp.dtype(dtype) != jnp.bfloat16 or weight.dtype != jnp.bfloat16:
        raise NotImplementedError(f"the norm of a sum serves bfloat16, got {jnp.dtype(dtype)}, weight {weight.dtype}")
    if numbers % SPAN or numbers > MOST_BLOCKS * SPAN:
        raise NotImplementedError(f"the norm of a sum serves 1 to {MOST_BLOCKS} times {SPAN} numbers, got {numbers}")
    blocks = numbers // SPAN

    def body(terms: Any, weight: Any, table: Any, out: Any, squares: Any, barriers: Any) -> None:
        token, block = lax.axis_index("tokens"), lax.axis_index("block")
        cluster.open_exchange(barriers, (0, blocks * WARPS * 4))
        site = exchange.Site(table, terms, terms.at[token, block], devices, THREAD)
        site.send()
        gain = plgpu.load(weight.at[block], layout=THREAD, optimized=False)
        cluster.await_peers()
        wide = site.receive().astype(jnp.float32)
        here = squares.at[pl.ds(WARPS * block, WARPS)]
        cluster.send_warp_sums(barriers, here, (wide * wide).sum(axis=1), THREAD.reduce(1), blocks)
        cluster.receive(barriers, 1)
        lane = plgpu.broadcasted_iota(jnp.int32, (32,), 0, layout=cluster.LANES)
        parts = plgpu.load(squares, layout=cluster.LANES, optimized=False)
        square = jnp.sum(jnp.where(lane < WARPS * blocks, parts, 0.0))
        out[token, block] = gain * (wide * lax.rsqrt(square * (1.0 / numbers) + eps)).astype(dtype)

    normed = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, blocks, THREADS, WIDTH), dtype),
        grid=(tokens,),
        grid_names=("tokens",),
        cluster=(blocks,),
        cluster_names=("block",),
        scratch_types=(plgpu.SMEM((32,), jnp.float32), plgpu.SMEM((cluster.WORDS,), jnp.int32)),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
        ),
        kernel_name="all_reduce_norm",
    )(term.reshape(tokens, blocks, THREADS, WIDTH), weight.reshape(blocks, THREADS, WIDTH), table)
    return normed.reshape(term.shape)
