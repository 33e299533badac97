"""Reading and writing rows of a paged pool. Page 0 is the dummy page."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32


def gather(pool: Float[Array, "pages page L"], page_table: Int32[Array, "B P"]) -> Float[Array, "B P*page L"]:
    """The rows of each sequence in order, as one array."""
    rows = pool[page_table]
    return rows.reshape(rows.shape[0], -1, rows.shape[-1])


def write(
    pool: Float[Array, "pages page L"],
    rows: Float[Array, "B T L"],
    page_table: Int32[Array, "B P"],
    start: Int32[Array, " B"],
    valid: Bool[Array, "B T"],
) -> Float[Array, "pages page L"]:
    """Stores row `t` of sequence `b` at position start[b] + t where `valid`; other rows write nothing.

    Donates the pool.
    """
    pages, page, _ = pool.shape
    position = start[:, None] + jnp.arange(rows.shape[1], dtype=jnp.int32)[None, :]
    slot = jnp.take_along_axis(page_table, jnp.minimum(position // page, page_table.shape[1] - 1), axis=1)
    # An index past the end is dropped; a negative one would wrap around.
    slot = jnp.where(valid & (position // page < page_table.shape[1]) & (slot > 0), slot, pages)
    return pool.at[slot, position % page].set(rows.astype(pool.dtype), mode="drop")
