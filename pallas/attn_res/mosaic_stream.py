"""Reads of many tokens: a warpgroup per token, its vectors passing by one after another in an online softmax.

Every block walks over tokens of its own and keeps the weights that score a vector in registers. Vectors come by bulk
copies into a ring that runs on into the next token, so memory is busy while a token is scored, mixed and normalised.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas.attn_res.types import Read

BLOCKS = 2 * 132
"""Two a multiprocessor of an H200, as many as registers allow."""
STAGES = 6
COLUMNS = 256
"""Channels of a warp, eight a lane; the widest row of a bulk copy."""
SPAN = 4 * COLUMNS
MOST_CHANNELS = 8 * SPAN
LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((4, COLUMNS), (8,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def require_supported(prefix: Float[Array, "*batch D"]) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernel does not serve."""
    channels = prefix.shape[-1]
    if prefix.dtype != jnp.bfloat16:
        raise NotImplementedError(f"attn_res mosaic kernels serve bfloat16, got {prefix.dtype}")
    if channels % SPAN or channels > MOST_CHANNELS:
        raise NotImplementedError(
            f"attn_res mosaic stream serves multiples of {SPAN} up to {MOST_CHANNELS} channels, got {channels}"
        )


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
) -> Read:
    """`api.read`."""
    require_supported(prefix)
    shape, channels = prefix.shape, prefix.shape[-1]
    tokens, rows = prefix.size // channels, channels // COLUMNS
    # The live vectors first: the sum of prefix and output opens the softmax.
    live = 1 if output is None else 2
    vectors = [x.reshape(tokens, rows, COLUMNS) for x in (prefix, *(() if output is None else (output,)), *sources)]
    weights = [x.reshape(rows, COLUMNS) for x in (norm, query, out_norm)]
    count, blocks = len(vectors), min(BLOCKS, tokens)
    pieces = [pl.ds(start, 4) for start in range(0, rows, 4)]

    def body(*refs: Any):
        inputs, refs = refs[:count], refs[count:]
        norm, query, out_norm, *refs = refs
        if output is not None:
            prefix_out, *refs = refs
        normed_out, ring, full = refs
        block = lax.axis_index("block")
        turns = (tokens - block + blocks - 1) // blocks

        def fetch(item: jax.Array) -> None:
            """Starts the copy of the vector number `item` of this block's tokens."""
            token, which, slot = block + item // count * blocks, item % count, item % STAGES
            for index, ref in enumerate(inputs):

                @pl.when((which == index) & (item < turns * count))
                def _copy() -> None:
                    plgpu.copy_gmem_to_smem(ref.at[token], ring.at[slot], full.at[slot])

        def load(ref: Any) -> list[jax.Array]:
            """A row in pieces of `SPAN` channels."""
            return [plgpu.load(ref.at[piece], layout=LAYOUT, optimized=False) for piece in pieces]

        def store(ref: Any, row: list[jax.Array]) -> None:
            for piece, value in zip(pieces, row):
                ref[piece] = value

        def widen(row: list[jax.Array]) -> list[jax.Array]:
            return [x.astype(jnp.float32) for x in row]

        def dot(a: list[jax.Array], b: list[jax.Array]) -> jax.Array:
            """Sum of products over all channels: inside a thread first, then a warp, then the block."""
            products = [x * y for x, y in zip(a, b)]
            return sum(products[1:], products[0]).sum(axis=1).sum()

        def take(item: jax.Array) -> list[jax.Array]:
            """Waits for a vector, moves it to registers and gives its place to a later one."""
            slot = item % STAGES
            plgpu.barrier_wait(full.at[slot])
            row = load(ring.at[slot])
            plgpu.commit_smem()
            fetch(item + STAGES)
            return row

        for item in range(STAGES):
            fetch(jnp.int32(item))
        key = [a * b for a, b in zip(widen(load(norm)), widen(load(query)))]

        def score(wide: list[jax.Array]) -> jax.Array:
            return dot(wide, key) * lax.rsqrt(dot(wide, wide) * (1.0 / channels) + eps)

        def step(turn: jax.Array, _: None) -> None:
            first, token = turn * count, block + turn * blocks
            row = take(first)
            if output is not None:
                row = [a + b for a, b in zip(row, take(first + 1))]
                store(prefix_out.at[token], row)

            def add(item: jax.Array, state: tuple) -> tuple:
                maximum, total, mixed = state
                wide = widen(take(item))
                own = score(wide)
                higher = jnp.maximum(maximum, own)
                old, new = jnp.exp(maximum - higher), jnp.exp(own - higher)
                return higher, total * old + new, [a * old + b * new for a, b in zip(mixed, wide)]

            start = (score(widen(row)), jnp.float32(1), widen(row))
            _, total, mixed = lax.fori_loop(first + live, first + count, add, start)
            rounded = [(x * (1.0 / total)).astype(prefix.dtype) for x in mixed]
            wide = widen(rounded)
            scale = lax.rsqrt(dot(wide, wide) * (1.0 / channels) + norm_eps)
            gain = load(out_norm)
            store(normed_out.at[token], [a * (x * scale).astype(prefix.dtype) for a, x in zip(gain, wide)])

        lax.fori_loop(0, turns, step, None)

    like = jax.ShapeDtypeStruct((tokens, rows, COLUMNS), prefix.dtype)
    results = plgpu.kernel(
        body,
        out_type=(like,) * (1 if output is None else 2),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=(plgpu.SMEM((STAGES, rows, COLUMNS), prefix.dtype), plgpu.Barrier(num_barriers=STAGES)),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="attn_res_stream",
    )(*vectors, *weights)
    results = [x.reshape(shape) for x in results]
    return Read(prefix if output is None else results[0], results[-1])
