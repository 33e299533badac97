"""One read of the residual stream as one Mosaic GPU kernel: add, score, softmax, mix, RMSNorm.

A token's channels are spread over the blocks of a cluster, 1024 each, eight a thread. Every vector is loaded once and
stays in registers. Two exchanges join the blocks: the sums that the scores need (squares and products of every
vector), then the squares of the mix.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt32

from pallas import cluster, inline
from pallas.attn_res.types import Read
from pallas.cluster import LANES
from pallas.collectives import exchange

THREADS, WARPS, WIDTH = 128, 4, 8
SPAN = THREADS * WIDTH
"""Channels of a block."""
MOST = 16
"""Vectors that a read can mix: half a warp's lanes."""
MOST_BLOCKS = 8
THREAD = plgpu.Layout.TILED(
    plgpu.Tiling(((THREADS, WIDTH), (THREADS // 4, WIDTH))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
)
"""[128, 8]: the same channels, a row per thread, so that a sum over a row stays inside it."""
ROWS = plgpu.Layout.TILED(plgpu.Tiling(((4, THREADS), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
"""[rows, 128]: a row per warp and step, so that a sum over a row stays inside a warp."""


def require_supported(prefix: Float[Array, "*batch D"], sources: int) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernel does not serve."""
    if prefix.dtype != jnp.bfloat16:
        raise NotImplementedError(f"attn_res mosaic kernels serve bfloat16, got {prefix.dtype}")
    if (channels := prefix.shape[-1]) % SPAN or channels > MOST_BLOCKS * SPAN:
        raise NotImplementedError(
            f"attn_res mosaic read serves 1 to {MOST_BLOCKS} times {SPAN} channels, got {channels}"
        )
    if sources >= MOST:
        raise NotImplementedError(f"attn_res mosaic read serves at most {MOST - 1} sources, got {sources}")


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
    table: UInt32[Array, "1 W"] | None = None,
    devices: int = 1,
) -> Read:
    """`api.read`; interpretation knows no clusters, so there a token has as many channels as one block.

    With a `table` the output is a term in float32: the threads that take it sum it up over so many `devices`.
    """
    require_supported(prefix, len(sources))
    if table is not None and output is not None:
        exchange.require_supported(output)
    shape, channels = prefix.shape, prefix.shape[-1]
    tokens, blocks = prefix.size // channels, channels // SPAN
    given = (*sources, prefix, *(() if output is None else (output,)))
    vectors = [x.reshape(tokens, blocks, THREADS, WIDTH) for x in given]
    weights = [x.reshape(blocks, THREADS, WIDTH) for x in (norm, query, out_norm)]
    tables = () if table is None else (table,)
    kernel = _Kernel(
        blocks=blocks,
        count=len(sources) + 1,
        adds=output is not None,
        devices=devices if tables else None,
        dtype=prefix.dtype,
        eps=eps,
        norm_eps=norm_eps,
        # Interpretation does not know the lighter one.
        synchronize=inline.synchronize if interpret is None else plgpu.commit_smem,
    )
    like = jax.ShapeDtypeStruct((tokens, blocks, THREADS, WIDTH), prefix.dtype)
    spread: dict[str, Any] = {} if blocks == 1 else {"cluster": (blocks,), "cluster_names": ("block",)}
    results = plgpu.kernel(
        kernel.body,
        out_type=(like,) * (1 if output is None else 2),
        grid=(tokens,),
        grid_names=("tokens",),
        **spread,
        scratch_types=(
            plgpu.SMEM((2, MOST, THREADS), jnp.float32),
            plgpu.SMEM((blocks, 32 + MOST), jnp.float32),
            plgpu.SMEM((32,), jnp.float32),
            plgpu.SMEM((32,), jnp.float32),
            plgpu.SMEM((cluster.WORDS,), jnp.int32),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="attn_res_read",
    )(*vectors, *weights, *tables)
    results = [x.reshape(shape) for x in results]
    return Read(prefix if output is None else results[0], results[-1])


class _Scratch(NamedTuple):
    """A block's shared memory."""

    partials: Any
    """[2, `MOST`, `THREADS`]: each thread's share of the vectors' squares, and of their products with the key."""
    inbox: Any
    """[blocks, 32 + `MOST`]: the blocks' sums of both."""
    alphas: Any
    """[32]: shares of the vectors in the mix."""
    squares: Any
    """[32]: the warps' sums of squares of the mix."""
    barriers: Any


def _load(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=THREAD, optimized=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """What a block of the read does."""

    blocks: int
    """Of a token."""
    count: int
    """Vectors that are mixed, the prefix included."""
    adds: bool
    """Whether an output is added to the prefix."""
    devices: int | None
    """Over which the output's terms are summed first."""
    dtype: Any
    eps: float
    norm_eps: float
    synchronize: Callable[[], None]

    @property
    def channels(self) -> int:
        """Of a vector."""
        return self.blocks * SPAN

    @property
    def rows(self) -> int:
        """Of the sums, as `ROWS` wants them."""
        return -(-self.count // 4) * 4

    def body(self, *refs: Any) -> None:
        """The kernel."""
        loaded = self.count + self.adds
        inputs, (norm, query, out_norm, *refs) = refs[:loaded], refs[loaded:]
        table, *refs = refs if self.devices else (None, *refs)
        prefix_out, *refs = refs if self.adds else (None, *refs)
        normed_out, *refs = refs
        scratch = _Scratch(*refs)
        token = lax.axis_index("tokens")
        block = lax.axis_index("block") if self.blocks > 1 else 0
        if self.blocks > 1:
            cluster.open_exchange(scratch.barriers, (self.blocks * 2 * self.rows * 4, self.blocks * WARPS * 4))
        term = None
        if self.devices:
            own = inputs[self.count].at[token, block]
            term = exchange.Site(table, inputs[self.count], own, self.devices, THREAD)
            term.send()
        key = _load(norm.at[block]).astype(jnp.float32) * _load(query.at[block]).astype(jnp.float32)
        gain = _load(out_norm.at[block])
        values = [_load(ref.at[token, block]) for ref in inputs[: self.count - 1]]
        live = [_load(ref.at[token, block]) for ref in inputs[self.count - 1 : loaded - (term is not None)]]
        for index, value in enumerate(values):
            self.note_sums(scratch, index, value, key)
        if term is not None:
            live.append(term.receive())
        if self.adds:
            live[0] = live[0] + live[1]
            prefix_out[token, block] = live[0]
        values.append(live[0])
        self.note_sums(scratch, self.count - 1, live[0], key)
        self.synchronize()
        self.gather_sums(scratch, block)
        lane = plgpu.broadcasted_iota(jnp.int32, (32,), 0, layout=LANES)
        self.share_out(scratch, lane)
        mixed = sum((scratch.alphas[index] * value.astype(jnp.float32) for index, value in enumerate(values)), 0.0)
        wide = mixed.astype(self.dtype).astype(jnp.float32)
        square = self.square_of(wide, scratch, block, lane)
        normed = (wide * lax.rsqrt(square * (1.0 / self.channels) + self.norm_eps)).astype(self.dtype)
        normed_out[token, block] = gain * normed

    def note_sums(self, scratch: _Scratch, index: int, value: jax.Array, key: jax.Array) -> None:
        """A thread's own share of a vector's squares and products."""
        wide = value.astype(jnp.float32)
        scratch.partials[0, index] = (wide * wide).sum(axis=1)
        scratch.partials[1, index] = (wide * key).sum(axis=1)

    def gather_sums(self, scratch: _Scratch, block: Any) -> None:
        """Every block's sums, in every block's inbox."""
        totals = [
            plgpu.load(scratch.partials.at[kind, pl.ds(0, self.rows)], layout=ROWS, optimized=False).sum(axis=1)
            for kind in range(2)
        ]
        if self.blocks > 1:
            cluster.await_peers()
            for kind in range(2):
                here = scratch.inbox.at[block, pl.ds(MOST * kind, self.rows)]
                cluster.send_rows(scratch.barriers, here, totals[kind], ROWS.reduce(1), self.blocks)
            cluster.receive(scratch.barriers, 0)
        else:
            for kind in range(2):
                scratch.inbox[0, pl.ds(MOST * kind, self.rows)] = totals[kind]
            self.synchronize()

    def share_out(self, scratch: _Scratch, lane: jax.Array) -> None:
        """Softmax of the scores."""

        def total(kind: int) -> jax.Array:
            places = (scratch.inbox.at[part, pl.ds(MOST * kind, 32)] for part in range(self.blocks))
            first, *parts = (plgpu.load(place, layout=LANES, optimized=False) for place in places)
            return sum(parts, first)

        scores = total(1) * lax.rsqrt(total(0) * (1.0 / self.channels) + self.eps)
        scores = jnp.where(lane < self.count, scores, -jnp.inf)
        shares = jnp.exp(scores - jnp.max(scores))
        scratch.alphas[...] = shares / jnp.sum(shares)
        self.synchronize()

    def square_of(self, wide: jax.Array, scratch: _Scratch, block: Any, lane: jax.Array) -> jax.Array:
        """Sum of the squares of the mix over all channels."""
        if self.blocks == 1:
            return jnp.sum((wide * wide).sum(axis=1))
        here = scratch.squares.at[pl.ds(WARPS * block, WARPS)]
        cluster.send_warp_sums(scratch.barriers, here, (wide * wide).sum(axis=1), THREAD.reduce(1), self.blocks)
        cluster.receive(scratch.barriers, 1)
        parts = plgpu.load(scratch.squares, layout=LANES, optimized=False)
        return jnp.sum(jnp.where(lane < WARPS * self.blocks, parts, 0.0))
