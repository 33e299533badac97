"""One read of the residual stream as one Mosaic GPU kernel: add, score, softmax, mix, RMSNorm.

A token's channels are spread over the blocks of a cluster, 1024 each, eight a thread. Every vector is loaded once and
stays in registers. Two exchanges join the blocks: the sums that the scores need (squares and products of every
vector), then the squares of the mix.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt32

from pallas import cluster, inline
from pallas.attn_res.types import Read
from pallas.cluster import LANES
from pallas.collectives import exchange

THREADS, WARPS, WIDTH = 128, 4, 8
SPAN = THREADS * WIDTH
"""Channels of a block."""
MOST = 16
"""Vectors that a read can mix: half a warp's lanes."""
MOST_BLOCKS = 8
THREAD = plgpu.Layout.TILED(
    plgpu.Tiling(((THREADS, WIDTH), (THREADS // 4, WIDTH))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
)
"""[128, 8]: the same channels, a row per thread, so that a sum over a row stays inside it."""
ROWS = plgpu.Layout.TILED(plgpu.Tiling(((4, THREADS), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
"""[rows, 128]: a row per warp and step, so that a sum over a row stays inside a warp."""


def require_supported(prefix: Float[Array, "*batch D"], sources: int) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernel does not serve."""
    if prefix.dtype != jnp.bfloat16:
        raise NotImplementedError(f"attn_res mosaic kernels serve bfloat16, got {prefix.dtype}")
    if (channels := prefix.shape[-1]) % SPAN or channels > MOST_BLOCKS * SPAN:
        raise NotImplementedError(
            f"attn_res mosaic read serves 1 to {MOST_BLOCKS} times {SPAN} channels, got {channels}"
        )
    if sources >= MOST:
        raise NotImplementedError(f"attn_res mosaic read serves at most {MOST - 1} sources, got {sources}")


def read(
    sources: tuple[Float[Array, "*batch D"], ...],
    prefix: Float[Array, "*batch D"],
    output: Float[Array, "*batch D"] | None,
    norm: Float[Array, " D"],
    query: Float[Array, " D"],
    out_norm: Float[Array, " D"],
    eps: float,
    norm_eps: float,
    interpret: Any = None,
    table: UInt32[Array, "1 W"] | None = None,
    devices: int = 1,
) -> Read:
    """`api.read`; interpretation knows no clusters, so there a token has as many channels as one block.

    With a `table` the output is a term in float32: the threads that take it sum it up over so many `devices`.
    """
    require_supported(prefix, len(sources))
    if table is not None and output is not None:
        exchange.require_supported(output)
    shape, channels = prefix.shape, prefix.shape[-1]
    tokens, blocks = prefix.size // channels, channels // SPAN
    count = len(sources) + 1
    rows = -(-count // 4) * 4
    vectors = [
        x.reshape(tokens, blocks, THREADS, WIDTH) for x in (*sources, prefix, *(() if output is None else (output,)))
    ]
    weights = [x.reshape(blocks, THREADS, WIDTH) for x in (norm, query, out_norm)]
    tables = () if table is None else (table,)
    loaded = count if tables else len(vectors)
    # Interpretation does not know the lighter one.
    synchronize = inline.synchronize if interpret is None else plgpu.commit_smem

    def body(*refs: Any):
        inputs, refs = refs[: len(vectors)], refs[len(vectors) :]
        norm, query, out_norm, *refs = refs
        if tables:
            addresses, *refs = refs
        if output is not None:
            prefix_out, *refs = refs
        normed_out, partials, inbox, alphas, squares, barriers = refs
        token = lax.axis_index("tokens")
        block = lax.axis_index("block") if blocks > 1 else 0
        if blocks > 1:
            cluster.open_exchange(barriers, (blocks * 2 * rows * 4, blocks * WARPS * 4))

        def load(ref: Any) -> jax.Array:
            return plgpu.load(ref, layout=THREAD, optimized=False)

        def sums(index: int, value: jax.Array) -> None:
            """A thread's own share of a vector's squares and products."""
            wide = value.astype(jnp.float32)
            partials[0, index] = (wide * wide).sum(axis=1)
            partials[1, index] = (wide * key).sum(axis=1)

        if tables:
            term = exchange.Site(addresses, inputs[count], inputs[count].at[token, block], devices, THREAD)
            term.send()
        key = load(norm.at[block]).astype(jnp.float32) * load(query.at[block]).astype(jnp.float32)
        gain = load(out_norm.at[block])
        values = [load(ref.at[token, block]) for ref in inputs[: count - 1]]
        live = [load(ref.at[token, block]) for ref in inputs[count - 1 : loaded]]
        for index, value in enumerate(values):
            sums(index, value)
        if tables:
            live.append(term.receive())
        if output is not None:
            live[0] = live[0] + live[1]
            prefix_out[token, block] = live[0]
        values.append(live[0])
        sums(count - 1, live[0])
        synchronize()
        totals = [
            plgpu.load(partials.at[kind, pl.ds(0, rows)], layout=ROWS, optimized=False).sum(axis=1) for kind in range(2)
        ]
        if blocks > 1:
            cluster.await_peers()
            for kind in range(2):
                here = inbox.at[block, pl.ds(MOST * kind, rows)]
                cluster.send_rows(barriers, here, totals[kind], ROWS.reduce(1), blocks)
            cluster.receive(barriers, 0)
        else:
            for kind in range(2):
                inbox[0, pl.ds(MOST * kind, rows)] = totals[kind]
            synchronize()

        def total(kind: int) -> jax.Array:
            lanes = pl.ds(MOST * kind, 32)
            parts = [plgpu.load(inbox.at[part, lanes], layout=LANES, optimized=False) for part in range(blocks)]
            return sum(parts[1:], parts[0])

        lane = plgpu.broadcasted_iota(jnp.int32, (32,), 0, layout=LANES)
        scores = total(1) * lax.rsqrt(total(0) * (1.0 / channels) + eps)
        scores = jnp.where(lane < count, scores, -jnp.inf)
        shares = jnp.exp(scores - jnp.max(scores))
        alphas[...] = shares / jnp.sum(shares)
        synchronize()
        mixed = sum((alphas[index] * value.astype(jnp.float32) for index, value in enumerate(values)), 0.0)
        mixed = mixed.astype(prefix.dtype)
        wide = mixed.astype(jnp.float32)
        if blocks > 1:
            here = squares.at[pl.ds(WARPS * block, WARPS)]
            cluster.send_warp_sums(barriers, here, (wide * wide).sum(axis=1), THREAD.reduce(1), blocks)
            cluster.receive(barriers, 1)
            parts = plgpu.load(squares, layout=LANES, optimized=False)
            square = jnp.sum(jnp.where(lane < WARPS * blocks, parts, 0.0))
        else:
            square = jnp.sum((wide * wide).sum(axis=1))
        normed = (wide * lax.rsqrt(square * (1.0 / channels) + norm_eps)).astype(prefix.dtype)
        normed_out[token, block] = gain * normed

    like = jax.ShapeDtypeStruct((tokens, blocks, THREADS, WIDTH), prefix.dtype)
    spread: dict[str, Any] = {} if blocks == 1 else {"cluster": (blocks,), "cluster_names": ("block",)}
    results = plgpu.kernel(
        body,
        out_type=(like,) * (1 if output is None else 2),
        grid=(tokens,),
        grid_names=("tokens",),
        **spread,
        scratch_types=(
            plgpu.SMEM((2, MOST, THREADS), jnp.float32),
            plgpu.SMEM((blocks, 32 + MOST), jnp.float32),
            plgpu.SMEM((32,), jnp.float32),
            plgpu.SMEM((32,), jnp.float32),
            plgpu.SMEM((cluster.WORDS,), jnp.int32),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="attn_res_read",
    )(*vectors, *weights, *tables)
    results = [x.reshape(shape) for x in results]
    return Read(prefix if output is None else results[0], results[-1])
