"""Reading and writing rows of a paged pool. Page 0 is the dummy page."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

NARROW = jnp.float8_e4m3fn
"""The 8-bit type of latents."""


def gather(
    pool: Float[Array, "pages page L"],
    page_table: Int32[Array, "B P"],
    page_scale: Float32[Array, " pages"] | None = None,
) -> Float[Array, "B P*page L"]:
    """The rows of each sequence in order, as one array; float32 where the pool has a scale for each page."""
    rows = pool[page_table]
    if page_scale is not None:
        rows = rows.astype(jnp.float32) * page_scale[page_table][..., None, None]
    return rows.reshape(rows.shape[0], -1, rows.shape[-1])


def quantize(
    pool: Float[Array, "pages page L"],
) -> tuple[Float[Array, "pages page L"], Float32[Array, " pages"]]:
    """(pool in 8 bits, scale of each page): the largest value of a page becomes the largest of the type."""
    wide = pool.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=(1, 2)) / float(jnp.finfo(NARROW).max)
    scale = jnp.where(scale > 0, scale, 1.0)
    return (wide / scale[:, None, None]).astype(NARROW), scale


def write(
    pool: Float[Array, "pages page L"],
    rows: Float[Array, "B T L"],
    page_table: Int32[Array, "B P"],
    start: Int32[Array, " B"],
    valid: Bool[Array, "B T"],
    page_scale: Float32[Array, " pages"] | None = None,
) -> Float[Array, "pages page L"]:
    """Stores row `t` of sequence `b` at position start[b] + t where `valid`; other rows write nothing.

    With a scale for each page, rows are divided by that of theirs; what the pool's type cannot hold becomes the largest
    value that it can. Donates the pool.
    """
    pages, page, _ = pool.shape
    position = start[:, None] + jnp.arange(rows.shape[1], dtype=jnp.int32)[None, :]
    slot = jnp.take_along_axis(page_table, jnp.minimum(position // page, page_table.shape[1] - 1), axis=1)
    # An index past the end is dropped; a negative one would wrap around.
    slot = jnp.where(valid & (position // page < page_table.shape[1]) & (slot > 0), slot, pages)
    if page_scale is not None:
        most = float(jnp.finfo(pool.dtype).max)
        scale = page_scale[jnp.minimum(slot, pages - 1)]
        rows = jnp.clip(rows.astype(jnp.float32) / scale[..., None], -most, most)
    return pool.at[slot, position % page].set(rows.astype(pool.dtype), mode="drop")
