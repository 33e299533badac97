"""The Triton backend of the routed experts of many tokens, through `jax-triton` (extra `triton`).

`tl.dot_scaled` multiplies MXFP4 weights with bfloat16 or MXFP8 activations: natively on Blackwell, by expansion to
bfloat16 on Hopper, where the Mosaic kernels are the faster ones.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from pallas.dispatch import MissingPackage, require_gpu
from pallas.moe import grouped, mxfp8
from pallas.moe.gradient import differentiable
from pallas.moe.mosaic_decode import require_supported
from pallas.moe.types import Experts, PackedExperts
from pallas.moe.xla import combine

FEWEST_TOKENS = 17
"""Fewer are no work for grouped products."""
BLOCKS = (16, 32, 64, 128)
"""Tokens of a block to choose from: Triton's sizes are powers of two."""
COST_OF_A_BLOCK = 32.0
"""What a block costs beside its products, in tokens."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a grouped kernel is cut; the quickest of eleven tried on an H200."""

    rows: int = 128
    """Weight rows of a tile, of both planes together."""
    depth: int = 64
    """Inputs of a step."""
    tokens: int | None = None
    """Tokens of a block; None takes what the load asks for."""
    warps: int = 4
    stages: int = 5


def block_tokens(pairs: int, num_experts: int) -> int:
    """Tokens of a block for an expected even load."""
    load = max(1.0, pairs / num_experts)
    return min(BLOCKS, key=lambda size: -(-load // size) * (size + COST_OF_A_BLOCK))


def require_package() -> Any:
    """The module `jax_triton`; raises `MissingPackage` where it or Triton is absent."""
    try:
        import jax_triton  # pyright: ignore[reportMissingImports]
        import triton  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingPackage(
            f"moe triton needs the package {error.name!r}: install the extra `triton` (pip install 'k3jax[triton]')"
        ) from error
    return jax_triton


def experts(
    x: Float[Array, "N L"],
    ids: Int32[Array, "N k"],
    weights: Float[Array, "N k"],
    experts: Experts,
    *,
    beta: float,
    linear_beta: float,
    dtype: jnp.dtype | None = None,
    activations: mxfp8.Activations = None,
) -> Float[Array, "N L"]:
    """See `pallas.moe.experts`. Refuses with `NotImplementedError` what the kernel does not serve."""
    require_gpu("moe triton")
    require_package()
    require_supported(x, experts)
    if x.shape[0] < FEWEST_TOKENS:
        raise NotImplementedError(f"moe triton serves {FEWEST_TOKENS} tokens and more, got {x.shape[0]}")
    assert isinstance(experts, PackedExperts)
    kernel = partial(run, activations=activations)
    return differentiable(kernel, x, ids, weights, experts, beta, linear_beta, dtype or x.dtype)


def run(
    x: Float[Array, "N L"],
    ids: Int32[Array, "N k"],
    weights: Float[Array, "N k"],
    experts: PackedExperts,
    beta: float,
    linear_beta: float,
    dtype: jnp.dtype,
    activations: mxfp8.Activations = None,
    settings: Settings | None = None,
    capability: int | None = None,
) -> Float[Array, "N L"]:
    """Both grouped products; `capability` (90 for 9.0) is that of the first device where it is not given."""
    num_experts, _, inner = experts.gate_up_packed.shape[:3]
    cut = settings or Settings()
    size = cut.tokens or block_tokens(ids.size, num_experts)
    order, used = grouped.plan_used(ids, num_experts, size)
    product = partial(_product, order=order, used=used, cut=cut, scalars=(beta, linear_beta), capability=capability)
    tokens = [grouped.dispatch(part, order) for part in _operands(x, activations)]
    hidden = product(tokens, experts.gate_up_packed, experts.gate_up_scale, inner, 2)
    outputs = product(_operands(hidden, activations), experts.down_packed, experts.down_scale, x.shape[1], 1)
    return combine(grouped.collect(outputs, order), ids, weights, dtype)


def _operands(x: Array, activations: mxfp8.Activations) -> tuple[Array, ...]:
    return (x,) if activations is None else tuple(mxfp8.quantize(x))


def _product(
    rows: Any,
    weights: UInt8[Array, "*E M half"],
    scale: UInt8[Array, "*E M groups"],
    width: int,
    planes: int,
    *,
    order: grouped.Plan,
    used: Int32[Array, "1"],
    cut: Settings,
    scalars: tuple[float, float],
    capability: int | None,
) -> Float[Array, "R width"]:
    from pallas.moe import triton_kernel  # Triton is an extra

    blocks, depth = order.expert.shape[0], weights.shape[-1] * 2
    return require_package().triton_call(
        rows[0],
        rows[-1] if len(rows) > 1 else scale,
        weights,
        scale,
        order.expert,
        used,
        kernel=triton_kernel.grouped_product,
        out_shape=jax.ShapeDtypeStruct((rows[0].shape[0], width), jnp.bfloat16),
        grid=(blocks * (width * planes // cut.rows),),
        num_warps=cut.warps,
        num_stages=cut.stages,
        compute_capability=capability,
        K=depth,
        M=width,
        PLANES=planes,
        MXFP8=len(rows) > 1,
        BETA=scalars[0],
        LINEAR_BETA=scalars[1],
        BLOCK_M=cut.rows,
        BLOCK_N=rows[0].shape[0] // blocks,
        BLOCK_K=cut.depth,
    )
