"""Phase one as a Mosaic GPU kernel: several pseudo-queries over the frozen sources of a few tokens.

As in `mosaic_read` a token's channels are spread over a cluster of blocks and every source stays in registers; the
sites are shared out among clusters. Phase two would still have to wait for the live prefix with both exchanges of a
read, so that phase one pays only where it costs less than the reads save: `bench.py` measures both.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas import cluster, inline
from pallas.attn_res.mosaic_read import ROWS, SPAN, THREAD, THREADS, WIDTH, require_supported
from pallas.attn_res.types import Summary
from pallas.cluster import LANES

MOST_TOKENS = 64
PLACES = 8
"""Places for the products of a site, so sources that can be served."""
CHUNK = 16
"""Sums that are sent at a time."""


def summarize(
    sources: tuple[Float[Array, "*batch D"], ...],
    norms: Float[Array, "sites D"],
    queries: Float[Array, "sites D"],
    eps: float,
    groups: int = 8,
    interpret: Any = None,
) -> Summary:
    """`api.summarize`; `total` is 1 and `maximum` the logarithm of the sum. Interpretation as in `mosaic_read.read`."""
    require_served(sources, norms, groups)
    shape, channels = sources[0].shape, sources[0].shape[-1]
    tokens, blocks, count = sources[0].size // channels, channels // SPAN, len(sources)
    sites, share = norms.shape[0], norms.shape[0] // groups
    squares = share * PLACES
    rows = -(-(squares + count) // CHUNK) * CHUNK
    vectors = [x.reshape(tokens, blocks, THREADS, WIDTH) for x in sources]
    keys = [x.reshape(sites, blocks, THREADS, WIDTH) for x in (norms, queries)]
    # Interpretation does not know the lighter one.
    synchronize = inline.synchronize if interpret is None else plgpu.commit_smem

    def body(*refs: Any):
        inputs, (norm, query, mixed_out, log_out, partials, inbox, alphas, barriers) = refs[:count], refs[count:]
        token, first = lax.axis_index("tokens"), lax.axis_index("groups") * share
        block = lax.axis_index("block") if blocks > 1 else 0
        if blocks > 1:
            cluster.open_exchange(barriers, (blocks * rows * 4, 4))

        def load(ref: Any) -> jax.Array:
            return plgpu.load(ref, layout=THREAD, optimized=False).astype(jnp.float32)

        values = [load(ref.at[token, block]) for ref in inputs]
        for index, value in enumerate(values):
            partials[squares + index] = (value * value).sum(axis=1)
        for site in range(share):
            key = load(norm.at[first + site, block]) * load(query.at[first + site, block])
            for index, value in enumerate(values):
                partials[site * PLACES + index] = (value * key).sum(axis=1)
        synchronize()
        if blocks > 1:
            cluster.await_peers()
        for start in range(0, rows, CHUNK):
            part = plgpu.load(partials.at[pl.ds(start, CHUNK)], layout=ROWS, optimized=False).sum(axis=1)
            if blocks > 1:
                cluster.send_rows(barriers, inbox.at[block, pl.ds(start, CHUNK)], part, ROWS.reduce(1), blocks)
            else:
                inbox[0, pl.ds(start, CHUNK)] = part
        if blocks > 1:
            cluster.receive(barriers, 0)
        else:
            synchronize()

        def total(start: int) -> jax.Array:
            lanes = pl.ds(start, 32)
            parts = [plgpu.load(inbox.at[part, lanes], layout=LANES, optimized=False) for part in range(blocks)]
            return sum(parts[1:], parts[0])

        lane = plgpu.broadcasted_iota(jnp.int32, (32,), 0, layout=LANES)
        scale = lax.rsqrt(total(squares) * (1.0 / channels) + eps)
        for site in range(share):
            scores = jnp.where(lane < count, total(site * PLACES) * scale, -jnp.inf)
            maximum = jnp.max(scores)
            shares = jnp.exp(scores - maximum)
            whole = jnp.sum(shares)
            alphas[site] = shares / whole
            log_out[first + site, token, block] = jnp.where(lane < count, maximum + jnp.log(whole), 0.0)
        synchronize()
        for site in range(share):
            terms = (alphas[site, index] * value for index, value in enumerate(values))
            mixed_out[first + site, token, block] = sum(terms, 0.0)

    spread: dict[str, Any] = {} if blocks == 1 else {"cluster": (blocks,), "cluster_names": ("block",)}
    mixed, logs = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((sites, tokens, blocks, THREADS, WIDTH), jnp.float32),
            jax.ShapeDtypeStruct((sites, tokens, blocks, 32), jnp.float32),
        ),
        grid=(tokens, groups),
        grid_names=("tokens", "groups"),
        **spread,
        scratch_types=(
            plgpu.SMEM((rows, THREADS), jnp.float32),
            plgpu.SMEM((blocks, rows + 32), jnp.float32),
            plgpu.SMEM((share, 32), jnp.float32),
            plgpu.SMEM((cluster.WORDS,), jnp.int32),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="attn_res_summary",
    )(*vectors, *keys)
    maximum = logs[:, :, 0, 0].reshape(sites, *shape[:-1])
    return Summary(maximum, jnp.ones_like(maximum), mixed.reshape(sites, *shape))


def require_served(sources: tuple[Float[Array, "*batch D"], ...], norms: Float[Array, "sites D"], groups: int) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernel does not serve."""
    if not 0 < len(sources) <= PLACES:
        raise NotImplementedError(f"attn_res mosaic summary serves 1 to {PLACES} sources, got {len(sources)}")
    require_supported(sources[0], len(sources))
    if (tokens := sources[0].size // sources[0].shape[-1]) > MOST_TOKENS:
        raise NotImplementedError(f"attn_res mosaic summary serves up to {MOST_TOKENS} tokens, got {tokens}")
    if norms.shape[0] % groups:
        raise NotImplementedError(f"attn_res mosaic summary serves multiples of {groups} sites, got {norms.shape[0]}")
