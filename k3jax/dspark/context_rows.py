"""Context rows of committed tokens in the pools of all draft layers: one product and one launch that stores."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from k3jax.cache import Rows
from k3jax.dspark.config import DraftMla
from k3jax.layers.draft_attention import Pools
from k3jax.layers.rope import frequencies
from pallas import gemv
from pallas.dispatch import BLACKWELL, HOPPER, require_capability
from pallas.gemv import finished
from pallas.gemv.finish import TOKENS
from pallas.gemv.widen import to_half
from pallas.mla import mosaic_rows


def require_supported(draft: Any, pools: Pools, context: Float[Array, "B T D"]) -> None:
    """Raises `NotImplementedError` with the reason for a draft or a context that the kernels do not serve."""
    sizes, matrix = draft.config.attention, draft.layers[0].attention.row_matrices()[0]
    if not isinstance(sizes, DraftMla) or not isinstance(matrix, gemv.Int8Matrix):
        raise NotImplementedError("draft context mosaic serves MLA with matrices of 8 bits")
    if context.dtype != jnp.bfloat16 or context.shape[:2] != (1, TOKENS) or pools[0].dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"draft context mosaic serves {TOKENS} tokens of one row in bfloat16, "
            f"got {context.dtype} {context.shape[:2]} and pools of {pools[0].dtype}"
        )


def store(draft: Any, pools: Pools, context: Float[Array, "B T D"], rows: Rows, interpret: Any = None) -> Pools:
    """The pools with the rows of `context` at `rows.length` onwards. Donates them."""
    if interpret is None:
        require_capability("draft context mosaic", HOPPER, BLACKWELL)
    require_supported(draft, pools, context)
    layers = [layer.attention for layer in draft.layers]
    config, sizes = draft.config, draft.config.attention
    matrices = tuple(matrix for layer in layers for matrix in layer.row_matrices())
    products = finished.slices(to_half(context[0]), matrices, interpret=interpret)
    rope, angles = config.rope, frequencies(config.rope, sizes.qk_rope_head_dim)
    rotation = mosaic_rows.Rotation(angles, rope.attention_factor, rope.interleaved)
    return mosaic_rows.store(
        products,
        [layer.kv_norm.weight[...] for layer in layers],
        pools,
        mosaic_rows.Places(rows.page_table[0], rows.length, rows.query_length),
        rotation,
        config.norm_eps,
        interpret,
    )
