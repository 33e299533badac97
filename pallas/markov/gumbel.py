"""Gumbel noise of a block's tokens as one Mosaic GPU kernel, keys included: that of `jax.random` for the same keys."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Int32, UInt32

from pallas.dispatch import BLACKWELL, HOPPER, require_capability
from pallas.random_bits import GREEDY_BELOW, exponential, fold

LENGTH = 1280
"""Tokens of a block at most."""
THREADS = 128


def length(vocabulary: int) -> int:
    """Tokens of a block: few blocks share the vocabulary, whose last one may overlap the one before."""
    return min(LENGTH, vocabulary // THREADS * THREADS)


def noise(
    seed: UInt32[Array, " 1"],
    position: Int32[Array, " 1"],
    temperature: Float32[Array, " 1"],
    stream: int,
    shape: tuple[int, int],
    *,
    interpret: Any = None,
) -> tuple[Float32[Array, "G V"], Float32[Array, " 1"]]:
    """Noise of each place of a block, keyed by seed, position, stream and place, and what logits are multiplied by.

    Greedy rows have none, and logits as they are. Raises `NotImplementedError` with the reason for what is not served.
    """
    if interpret is None:
        require_capability("markov noise", HOPPER, BLACKWELL)
    if shape[1] < THREADS:
        raise NotImplementedError(f"markov noise serves at least {THREADS} tokens, got {shape[1]}")
    size = length(shape[1])
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=1)
    blocks = -(-shape[1] // size)

    def body(seeds: Any, positions: Any, temperatures: Any, drawn: Any, scale: Any) -> None:
        block, step = lax.axis_index("block"), lax.axis_index("step")
        random = temperatures[0] >= GREEDY_BELOW
        first = jnp.minimum(block * size, shape[1] - size)
        own = partial(plgpu.broadcasted_iota, jnp.int32, (size,), 0, layout=layout)
        key = fold(seeds[0], positions[0].astype(jnp.uint32), stream, step.astype(jnp.uint32))
        place = ((own() if interpret is None else lax.iota(jnp.int32, size)) + first).astype(jnp.uint32)
        drawn[step, pl.ds(first, size)] = jnp.where(random, -jnp.log(exponential(key, place)), 0.0)

        @pl.when((block == 0) & (step == 0))
        def _tell() -> None:
            scale[0] = jnp.where(random, 1.0 / jnp.maximum(temperatures[0], GREEDY_BELOW), 1.0)

    kernel = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((1,), jnp.float32)],
        grid=(blocks, shape[0]),
        grid_names=("block", "step"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="markov_noise",
    )
    return tuple(kernel(seed, position, temperature))
