"""What a device of a mesh computes by itself inside `jax.shard_map`, and the sums and exchanges between devices.

A layer whose heads or inner channels are split gives a term: the terms of all devices add up to its output. Between
layers the residual stream is whole on every device, or every device keeps its own share of the tokens: then the sum is
scattered, AttnRes and the norm run on the share, and the tokens are gathered in front of the next layer. `axis` is the
mesh axis that something is split over, None where it is whole.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped, UInt32

from pallas import collectives, gemv

TOKENS_OF_A_DEVICE = 16
"""A chunk is split by token where every device gets at least so many: fewer are read faster than exchanged."""


def term_dtype(axis: str | None, x: Float[Array, "*batch D"]) -> jnp.dtype:
    """The dtype of terms: float32 for few rows, where latency and not bytes is what a sum costs; else that of `x`."""
    few = x.size <= gemv.FEW_ROWS * x.shape[-1]
    return jnp.dtype(jnp.float32 if axis is not None and few else x.dtype)


def add_up(
    axis: str | None, term: Float[Array, "*batch D"], dtype: jnp.dtype, table: UInt32[Array, "1 W"] | None = None
) -> Float[Array, "*batch D"]:
    """The sum of the devices' terms on every device, in `dtype`; in one hop through the inboxes of `table`."""
    return term.astype(dtype) if axis is None else collectives.all_reduce(term, axis, table, dtype=dtype)


class Term(NamedTuple):
    """A term that waits to be summed by the read that takes it, see `attn_res.read`."""

    part: Float[Array, "*batch D"]
    dtype: jnp.dtype
    """Of the sum."""
    axis: str
    table: UInt32[Array, "1 W"]

    def sum(self) -> Float[Array, "*batch D"]:
        """The sum by itself."""
        return add_up(self.axis, self.part, self.dtype, self.table)


def term_of(axis: str, whole: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Terms that add up to what every device has: the first device's is that, all others are zero."""
    return jnp.where(lax.axis_index(axis) == 0, whole, jnp.zeros((), whole.dtype))


def term_of_columns(axis: str, columns: Float[Array, "N C"]) -> Float[Array, "N D"]:
    """Terms that add up to the devices' columns side by side: each is zero outside its own."""
    count, width = columns.shape
    empty = jnp.zeros((count, width * lax.axis_size(axis)), columns.dtype)
    return lax.dynamic_update_slice_in_dim(empty, columns, lax.axis_index(axis) * width, axis=1)


def own_part(axis: str | None, whole: Float[Array, "..."], size: int, dimension: int) -> Float[Array, "..."]:
    """The device's `size` entries of an array that all devices have whole."""
    if axis is None:
        return whole
    return lax.dynamic_slice_in_dim(whole, lax.axis_index(axis) * size, size, axis=dimension)


def look_up(axis: str | None, table: Float[Array, "V D"], ids: Int32[Array, "*batch"]) -> Float[Array, "*batch D"]:
    """The device's term of rows `ids`, where it has rows of its own; without an axis the rows themselves."""
    if axis is None:
        return table[ids]
    own = ids - lax.axis_index(axis) * table.shape[0]
    here = (own >= 0) & (own < table.shape[0])
    return jnp.where(here[..., None], table[jnp.where(here, own, 0)], jnp.zeros((), table.dtype))


def own_experts(axis: str, ids: Int32[Array, "N k"], held: int) -> Int32[Array, "N k"]:
    """Ids among the `held` experts of this device; -1 for those of others."""
    own = ids - lax.axis_index(axis) * held
    return jnp.where((own >= 0) & (own < held), own, -1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """How the residual stream lies on the devices of mesh axis `axis`."""

    axis: str | None = None
    by_token: bool = False
    """Each of n devices keeps S = T / n tokens of every row; otherwise all of them keep all T = S."""
    table: UInt32[Array, "1 W"] | None = None
    """Where the devices' inboxes are, for sums of a few rows; without it the runtime adds them up."""

    def take(self, output: Float[Array, "B T D"], dtype: jnp.dtype, *, terms: bool) -> Float[Array, "B S D"]:
        """A layer's output as the stream holds it; `terms` says that it is a term of a sum, not the same everywhere."""
        if self.axis is None:
            return output
        if not self.by_token:
            return add_up(self.axis if terms else None, output, dtype, self.table)
        if terms:
            return lax.psum_scatter(output, self.axis, scatter_dimension=1, tiled=True).astype(dtype)
        return own_part(self.axis, output, output.shape[1] // lax.axis_size(self.axis), 1).astype(dtype)

    def leave(self, output: Float[Array, "B T D"], dtype: jnp.dtype, *, terms: bool) -> Float[Array, "B S D"] | Term:
        """As `take`; a sum in one hop is left to the next read of the stream, which saves a kernel."""
        if self.axis is None or self.table is None or self.by_token or not terms:
            return self.take(output, dtype, terms=terms)
        return Term(output, dtype, self.axis, self.table)

    def all_tokens(self, x: Shaped[Array, "B S D"]) -> Shaped[Array, "B T D"]:
        """What the next layer takes: every token on every device."""
        return lax.all_gather(x, self.axis, axis=1, tiled=True) if self.by_token else x
