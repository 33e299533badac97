"""Public functions of latent attention (report section 2.1.2).

A cached row is `[latent | shared key]`: R compressed values that give every head's keys and values,
and C key values that all heads share. Nothing is rotated.
"""

import functools

import jax
from jaxtyping import Array, Float, Float32, Int32

from pallas.dispatch import Implementation, select
from pallas.mla import mosaic, pages, xla

gather_pages = pages.gather
write_pages = pages.write
quantize_pages = pages.quantize


@functools.partial(jax.jit, static_argnames=("scale", "implementation"))
def prefill(
    query: Float[Array, "B T H Q"],
    latents: Float[Array, "B S L"],
    key_up: Float[Array, "H K R"],
    value_up: Float[Array, "H V R"],
    start: Int32[Array, " B"],
    length: Int32[Array, " B"],
    *,
    scale: float,
    implementation: Implementation = None,
) -> Float[Array, "B T H V"]:
    """Causal attention in expanded form; query `t` of row `b` sees latents 0 .. start[b] + t.

    Latents from row length[b] on may hold anything, NaN included; queries that stand there are padding.
    Softmax in float32.
    """
    run = select(implementation, mosaic=mosaic.prefill, xla=xla.prefill)
    return run(query, latents, key_up, value_up, start, length, scale=scale)


@functools.partial(jax.jit, static_argnames=("scale", "implementation"))
def decode(
    query: Float[Array, "B W H Q"],
    pool: Float[Array, "pages page L"],
    page_table: Int32[Array, "B P"],
    key_up: Float[Array, "H K R"],
    value_up: Float[Array, "H V R"],
    start: Int32[Array, " B"],
    length: Int32[Array, " B"],
    page_scale: Float32[Array, " pages"] | None = None,
    *,
    scale: float,
    implementation: Implementation = None,
) -> Float[Array, "B W H V"]:
    """Causal attention in absorbed form for a few queries per row over paged latents.

    Query `w` of row `b` sits at position start[b] + w, whose latent is already in the pool, or at the last one where
    that is less: start[b] = length[b] - 1 shows every query everything. Rows from length[b] on may hold anything.
    A pool of float8_e4m3fn comes with a scale for each page: see `quantize_pages`.
    """
    run = select(implementation, mosaic=mosaic.decode, xla=xla.decode)
    return run(query, pool, page_table, key_up, value_up, start, length, page_scale, scale=scale)
