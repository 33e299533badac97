"""Public functions of Block Attention Residuals (report section 2.2, equations 8 to 10)."""

import functools
from typing import Any

import jax
from jaxtyping import Array, Float, Int, UInt32

from pallas import collectives
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


@functools.partial(jax.jit, static_argnames=("eps", "norm_eps", "axis", "implementation"))
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
    table: UInt32[Array, "1 W"] | None = None,
    axis: str | None = None,
    implementation: Implementation = None,
) -> Read:
    """Adds a sublayer's `output` to the prefix, then RMSNorm with weight `out_norm` of the `mix`: one whole site.

    The sum is rounded to the prefix's dtype before it is scored; without an output the prefix stays as it is.
    With `table`, the output is this device's term of a sum over mesh axis `axis`, in one hop; see
    `collectives.all_reduce`. Raises `ValueError` for one of both alone.
    """
    if (table is None) != (axis is None):
        alone = "a table alone" if axis is None else f"axis {axis!r} alone"
        raise ValueError(f"table and axis of a sum go together, got {alone}")
    if table is not None and axis is not None and output is not None:
        run = select(implementation, mosaic=mosaic.read_term, xla=functools.partial(_summed_first, implementation))
        return run(sources, prefix, output, norm, query, out_norm, eps, norm_eps, table, axis)
    run = select(implementation, mosaic=mosaic.read, xla=xla.read)
    return run(sources, prefix, output, norm, query, out_norm, eps, norm_eps)


def _summed_first(implementation: Implementation, *args: Any) -> Read:
    """A read whose output is summed by a kernel of its own."""
    sources, prefix, term, *weights, eps, norm_eps, table, axis = args
    output = collectives.all_reduce(term, axis, table, dtype=prefix.dtype, implementation=implementation)
    return read(sources, prefix, output, *weights, eps=eps, norm_eps=norm_eps, implementation=implementation)


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
