"""Compressed queries and latents of a block of tokens, from sums of the product that makes both, in one launch.

A block has a token: it adds the product's slices, divides by the norm of the product's inputs (see
`pallas.gemv.finish`), normalises the compressed query and the latent, rotates the shared key, and stores latent and
key in the token's place of the paged pool.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from pallas import inline
from pallas.gemv import widen
from pallas.gemv.finish import TOKENS
from pallas.mla.mosaic_rows import Places

THREADS = 128


class Norms(NamedTuple):
    """Weights of the norms of compressed queries and latents."""

    query: Float[Array, " Q"]
    latent: Float[Array, " R"]


@partial(jax.jit, static_argnames=("channels", "eps", "interpret"))
def store(
    query: Float32[Array, "S 8 Q"],
    latent: Float32[Array, "S 8 L"],
    squares: Float32[Array, "N 8"],
    channels: int,
    norms: Norms,
    angles: Float32[Array, "16 half"],
    pool: Float[Array, "pages page L"],
    places: Places,
    eps: float,
    interpret: Any = None,
) -> tuple[Float[Array, "8 Q"], Float[Array, "pages page L"]]:
    """(compressed queries in float16 as of `widen.to_half`, the pool with the block's rows). Donates the pool.

    `squares`: sums of squares over `channels` inputs of the product; `angles`: of each token the cosines of the shared
    key's pairs, then of each the sines; `eps`: what all norms add to a mean square. Tokens from `places.count` on are
    not stored, nor what stands behind the last page or on page 0.
    """
    require_supported(query, latent, norms)
    work = _Work(channels, eps, interpret is not None)
    ref = jax.new_ref(pool)
    half = plgpu.kernel(
        work.body,
        out_type=jax.ShapeDtypeStruct(query.shape[1:], jnp.float16),
        grid=(TOKENS,),
        grid_names=("token",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="draft_latents",
    )(query, latent, squares, norms.query, norms.latent, angles, *places, ref)
    return half, jax.freeze(ref)


def require_supported(query: jax.Array, latent: jax.Array, norms: Norms) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernel does not serve."""
    rank, shared = norms.latent.size, latent.shape[2] - norms.latent.size
    if query.shape[1] != TOKENS or query.shape[2] % THREADS or rank % THREADS or shared != THREADS // 2:
        raise NotImplementedError(
            f"draft latents serve {TOKENS} tokens, ranks in multiples of {THREADS} and {THREADS // 2} shared channels, "
            f"got {query.shape[1]}, {query.shape[2]} and {rank}, and {shared}"
        )


class _Work:
    """A token's work."""

    def __init__(self, channels: int, eps: float, emulated: bool) -> None:
        self.channels, self.eps, self.emulated = channels, eps, emulated

    def load(self, ref: Any, *, vector: int) -> jax.Array:
        """A line of device memory."""
        return ref[...] if self.emulated else plgpu.load(ref, layout=_strided(ref.shape[-1], vector))

    def sums(self, ref: Any, token: jax.Array, start: int, count: int) -> jax.Array:
        """Channels of a token, slices added."""
        lines = [
            self.load(ref.at[piece, token, pl.ds(start, count)], vector=_vector(count)) for piece in range(ref.shape[0])
        ]
        return sum(lines[1:], lines[0])

    def take(self, ref: Any, *places: jax.Array) -> jax.Array:
        """Single numbers by thread."""
        return (
            ref[...][places].astype(jnp.float32) if self.emulated else inline.gather(ref, places, _strided(THREADS, 1))
        )

    def root(self, squares: jax.Array, count: int) -> jax.Array:
        """What divides, inverted."""
        return lax.rsqrt(jnp.sum(squares) * (1 / count) + self.eps)

    def body(self, *refs: Any) -> None:
        """The kernel's. Everything is on its way before the first sum, whose threads wait for one another."""
        query, latent, squares, query_norm, latent_norm, angles, pages, length, count, pool, half = refs
        token, rank = lax.axis_index("token"), latent_norm.shape[0]
        thread = (
            lax.iota(jnp.int32, THREADS)
            if self.emulated
            else plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=_strided(THREADS, 1))
        )
        here = thread * 0 + token
        position = length[0] + token
        page, slot = lax.div(position, jnp.int32(pool.shape[1])), lax.rem(position, jnp.int32(pool.shape[1]))
        number, tokens = pages[jnp.minimum(page, pages.shape[0] - 1)], count[0]
        compressed, line = self.sums(query, token, 0, query.shape[2]), self.sums(latent, token, 0, rank)
        key, total = self.rotated(latent, thread, here, rank, angles), self.total(squares, thread, here)
        weights = [self.load(norm, vector=_vector(norm.shape[0])) for norm in (query_norm, latent_norm)]
        divide = self.root(total, self.channels)
        normed = []
        for x, weight in zip((compressed, line), weights):
            x = x * divide
            normed.append(x * self.root(x * x, x.size) * weight.astype(jnp.float32))
        half[token] = widen.to_half(normed[0])

        @pl.when((token < tokens) & (page < pages.shape[0]) & (number > 0))
        def _write() -> None:
            row, shared = pool.at[number, slot], (key * divide).astype(pool.dtype)
            row[pl.ds(0, rank)] = normed[1].astype(pool.dtype)
            if self.emulated:
                row[pl.ds(rank, THREADS // 2)] = shared[: THREADS // 2]
            else:
                inline.scatter(row, rank + lax.rem(thread, jnp.int32(THREADS // 2)), shared, _strided(THREADS, 1))

    def total(self, squares: Any, thread: jax.Array, here: jax.Array) -> jax.Array:
        """Parts of the sum of a token's squares."""
        total, rows = 0.0 * thread.astype(jnp.float32), squares.shape[0]
        for first in range(0, rows, THREADS):
            found = self.take(squares, jnp.minimum(thread + first, rows - 1), here)
            total += jnp.where(thread + first < rows, found, 0.0)
        return total

    def rotated(self, latent: Any, thread: jax.Array, here: jax.Array, rank: int, angles: Any) -> jax.Array:
        """The shared key, twice."""
        channel = lax.rem(thread, jnp.int32(THREADS // 2))
        odd = lax.rem(channel, jnp.int32(2))
        pieces = range(latent.shape[0])
        own = [self.take(latent, here * 0 + piece, here, channel + rank) for piece in pieces]
        other = [self.take(latent, here * 0 + piece, here, channel + 1 - 2 * odd + rank) for piece in pieces]
        cos, sin = (self.take(angles, here + kind, lax.div(channel, jnp.int32(2))) for kind in (0, TOKENS))
        return sum(own) * cos + sum(other) * sin * jnp.where(odd == 0, -1.0, 1.0)


def _vector(count: int) -> int:
    """Neighbours that a thread takes."""
    return 4 if count % (4 * THREADS) == 0 else 1


def _strided(size: int, vector: int) -> Any:
    return plgpu.Layout.WG_STRIDED((size,), vec_size=vector)
