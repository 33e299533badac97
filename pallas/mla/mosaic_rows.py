"""Latents of a few tokens in the pools of several layers, in one launch: norm, rotation and store.

A block has one token of one layer. Its sums come as the slices of a product (`pallas.gemv.finished.slices`); they are
rounded as `gemv.project` and the layers' norms round, so that pools hold what writing them one by one leaves.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float32, Int32

from pallas import inline

THREADS = 128


class Rotation(NamedTuple):
    """How the channels behind the latent are rotated."""

    frequencies: Float[np.ndarray, " half"]
    """Angle per position of each pair."""
    factor: float
    """Of cosines and sines."""
    interleaved: bool
    """Whether pairs are neighbours; otherwise halves apart."""


class Places(NamedTuple):
    """Where the tokens of one sequence are stored."""

    page_table: Int32[Array, " P"]
    length: Int32[Array, " 1"]
    """Tokens before them."""
    count: Int32[Array, " 1"]
    """Tokens that are stored."""


def require_supported(product: jax.Array, pool: jax.Array, rank: int) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernel does not serve."""
    rest = product.shape[-1] - rank
    if pool.dtype != jnp.bfloat16 or rank % (4 * THREADS) or rest % 2 or THREADS % rest:
        raise NotImplementedError(
            f"stored latents are bfloat16 of ranks in multiples of {4 * THREADS}, with a power of two of rotated "
            f"channels up to {THREADS}, got {pool.dtype}, {rank} and {rest}"
        )


def store(
    products: Sequence[Float32[Array, "S T L"]],
    norms: Sequence[BFloat16[Array, " R"]],
    pools: Sequence[BFloat16[Array, "pages page L"]],
    places: Places,
    rotation: Rotation,
    eps: float,
    interpret: Any = None,
) -> tuple[BFloat16[Array, "pages page L"], ...]:
    """The pools with each layer's rows. Donates them. What stands behind the last page or on page 0 is not stored."""
    require_supported(products[0], pools[0], norms[0].size)
    layers, tokens = len(pools), products[0].shape[1]
    refs = [jax.new_ref(pool) for pool in pools]

    def body(*given: Any) -> None:
        operands = iter(given)
        columns = [[next(operands) for _ in range(layers)] for _ in range(2)]
        rest = [next(operands) for _ in range(4)]
        targets = list(operands)
        layer = lax.axis_index("layer")
        for number, (product, norm) in enumerate(zip(*columns, strict=True)):
            work = _Row(product, norm, targets[number], rotation, eps, interpret is not None)
            pl.when(layer == number)(partial(work.run, *rest))

    plgpu.kernel(
        body,
        out_type=(),
        grid=(layers, tokens),
        grid_names=("layer", "token"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="latent_rows",
    )(*products, *norms, jnp.asarray(rotation.frequencies, jnp.float32), *places, *refs)
    return tuple(jax.freeze(ref) for ref in refs)


class _Row:
    """One layer's part of the kernel; a block stores one token."""

    def __init__(self, product: Any, norm: Any, pool: Any, rotation: Rotation, eps: float, emulated: bool) -> None:
        self.product, self.norm, self.pool = product, norm, pool
        self.rotation, self.eps, self.emulated = rotation, eps, emulated
        self.rank, self.size = norm.shape[0], product.shape[-1]

    def line(self, ref: Any) -> jax.Array:
        """[rank] of device memory."""
        layout = plgpu.Layout.WG_STRIDED((self.rank,), vec_size=4)
        return ref[...] if self.emulated else plgpu.load(ref, layout=layout, optimized=False)

    def take(self, ref: Any, place: jax.Array) -> jax.Array:
        """ref[place], one a thread."""
        return ref[...][place] if self.emulated else inline.gather(ref, (place,), ONE)

    def run(self, frequencies: Any, pages: Any, length: Any, count: Any) -> None:
        """The kernel's work."""
        token = lax.axis_index("token")
        slices = range(self.product.shape[0])
        sums = [self.line(self.product.at[piece, token, pl.ds(0, self.rank)]) for piece in slices]
        wide = _rounded(sum(sums[1:], sums[0]))
        scale = lax.rsqrt(jnp.sum(wide * wide) * (1 / self.rank) + self.eps)
        latent = _rounded(wide * scale) * self.line(self.norm).astype(jnp.float32)
        position = length[0] + token
        key = self.rotated(token, position, frequencies)
        page, slot = lax.div(position, jnp.int32(self.pool.shape[1])), lax.rem(position, jnp.int32(self.pool.shape[1]))
        number = pages[jnp.minimum(page, pages.shape[0] - 1)]

        @pl.when((token < count[0]) & (page < pages.shape[0]) & (number > 0))
        def _write() -> None:
            line = self.pool.at[number, slot]
            line[pl.ds(0, self.rank)] = latent.astype(jnp.bfloat16)
            if self.emulated:
                line[pl.ds(self.rank, self.size - self.rank)] = key.astype(jnp.bfloat16)[: self.size - self.rank]
            else:
                inline.scatter(line, self.rank + self.channel(), key.astype(jnp.bfloat16), ONE)

    def channel(self) -> jax.Array:
        """The rotated channel of each thread; several threads may have the same."""
        if self.emulated:
            thread = lax.iota(jnp.int32, THREADS)
        else:
            thread = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=ONE)
        return lax.rem(thread, jnp.full_like(thread, self.size - self.rank))

    def rotated(self, token: jax.Array, position: jax.Array, frequencies: Any) -> jax.Array:
        """The channels behind the latent."""
        channel, half = self.channel(), (self.size - self.rank) // 2
        if self.rotation.interleaved:
            first, pair = channel % 2 == 0, channel // 2
            other = jnp.where(first, channel + 1, channel - 1)
        else:
            first, pair = channel < half, channel % half
            other = jnp.where(first, channel + half, channel - half)

        def channels(place: jax.Array) -> jax.Array:
            lines = [
                self.take(self.product.at[piece, token], place + self.rank) for piece in range(self.product.shape[0])
            ]
            return _rounded(sum(lines[1:], lines[0]))

        angle = position.astype(jnp.float32) * self.take(frequencies, pair)
        cos, sin = self.rotation.factor * jnp.cos(angle), self.rotation.factor * jnp.sin(angle)
        return channels(channel) * cos + channels(other) * jnp.where(first, -sin, sin)


ONE = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
"""One number for each thread."""


def _rounded(x: jax.Array) -> jax.Array:
    """To bfloat16 and back."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)
