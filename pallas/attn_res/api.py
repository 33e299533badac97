"""Public functions of Block Attention Residuals (report section 2.2, equations 8 to 10)."""

import functools

import jax
from jaxtyping import Array, Float, Int

from pallas.attn_res import mosaic, xla
from pallas.attn_res.types import Read, Summary
from pallas.dispatch import Implementation, select


@functools.partial(jax.jit, static_argnames=("eps", "implementation"))
def mix(
    sources: tuple[Float[Array, "*batch D"], ...],
    prefix: Float[Array, "*batch D"],
    norm: Float[Array, " D"],
    query: Float[Array, " D"],
    *,
    eps: float = 1e-5,
    implementation: Implementation = None,
) -> Float[Array, "*batch D"]:
    """Attention of one pseudo-query over frozen block `sources` and the running `prefix`.

    Keys are the RMS-normalised sources times `norm`, values are the raw sources. Scores, softmax and
    mix in float32, rounded once. Without sources the result is the prefix.
    """
    return select(implementation, xla=xla.mix)(sources, prefix, norm, query, eps=eps)


@functools.partial(jax.jit, static_argnames=("eps", "norm_eps", "implementation"))
def read(
    sources: tuple[Float[Array, "*batch D"], ...],
    prefix: Float[Array, "*batch D"],
    output: Float[Array, "*batch D"] | None,
    norm: Float[Array, " D"],
    query: Float[Array, " D"],
    out_norm: Float[Array, " D"],
    *,
    eps: float = 1e-5,
    norm_eps: float = 1e-5,
    implementation: Implementation = None,
) -> Read:
    """Adds a sublayer's `output` to the prefix, then RMSNorm with weight `out_norm` of the `mix`: one whole site.

    The sum is rounded to the prefix's dtype before it is scored; without an output the prefix stays as it is.
    """
    run = select(implementation, mosaic=mosaic.read, xla=xla.read)
    return run(sources, prefix, output, norm, query, out_norm, eps, norm_eps)


@functools.partial(jax.jit, static_argnames=("eps", "implementation"))
def summarize(
    sources: tuple[Float[Array, "*batch D"], ...],
    norms: Float[Array, "sites D"],
    queries: Float[Array, "sites D"],
    *,
    eps: float = 1e-5,
    implementation: Implementation = None,
) -> Summary:
    """Phase one: all `sites` pseudo-queries of a block over the block's frozen sources."""
    run = select(implementation, mosaic=mosaic.summarize, xla=xla.summarize)
    return run(sources, norms, queries, eps=eps)


@functools.partial(jax.jit, static_argnames=("eps", "implementation"))
def merge(
    summary: Summary,
    site: int | Int[Array, ""],
    prefix: Float[Array, "*batch D"],
    norm: Float[Array, " D"],
    query: Float[Array, " D"],
    *,
    eps: float = 1e-5,
    implementation: Implementation = None,
) -> Float[Array, "*batch D"]:
    """Phase two: merges the live `prefix` into row `site` of a summary by online softmax."""
    return select(implementation, xla=xla.merge)(summary, site, prefix, norm, query, eps=eps)
