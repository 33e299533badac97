"""Reads with the residual stream split over devices by token, for tensor-parallel prefill.

Each device keeps the frozen sources and the prefix of its own tokens alone. A sublayer's all-reduce becomes a
reduce-scatter in front of the read and an all-gather behind it, so AttnRes and the norm run once instead of on every
device, and a snapshot exists once.
"""

import jax
from jaxtyping import Array, Float

from pallas.attn_res import api
from pallas.attn_res.types import Read
from pallas.dispatch import Implementation


def read(
    sources: tuple[Float[Array, "B S D"], ...],
    prefix: Float[Array, "B S D"],
    partial_output: Float[Array, "B T D"] | None,
    norm: Float[Array, " D"],
    query: Float[Array, " D"],
    out_norm: Float[Array, " D"],
    *,
    axis: str,
    eps: float = 1e-5,
    norm_eps: float = 1e-5,
    implementation: Implementation = None,
) -> Read:
    """`api.read` inside a `shard_map` over mesh axis `axis` of n devices, T = n S tokens.

    `partial_output` is this device's term of the sublayer's output for all tokens. The prefix of the result is that of
    the device's own tokens, the normed mix that of all of them.
    """
    output = None
    if partial_output is not None:
        output = jax.lax.psum_scatter(partial_output, axis, scatter_dimension=1, tiled=True)
    own = api.read(
        sources, prefix, output, norm, query, out_norm, eps=eps, norm_eps=norm_eps, implementation=implementation
    )
    return Read(own.prefix, jax.lax.all_gather(own.normed, axis, axis=1, tiled=True))
