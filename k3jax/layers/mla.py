"""Gated multi-head latent attention without positional encoding (report section 2.1.2)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from k3jax.cache import MlaCache, Rows
from k3jax.config import K3Config
from k3jax.layers.norm import RmsNorm
from k3jax.params import Tree
from k3jax.sharding_local import term_dtype
from pallas import gemv, mla
from pallas.dispatch import Implementation

FEW_QUERIES = 16
"""Up to this many queries per row attention is absorbed; beyond, keys and values are expanded."""


class Mla(nnx.Module):
    """Latent attention over the own tokens, or over a paged cache."""

    def __init__(
        self, config: K3Config, parameters: Tree, implementation: Implementation, places: Tree | None = None
    ) -> None:
        self.in_proj = nnx.Param(parameters["in_proj"])
        self.q_norm = RmsNorm(parameters["q_norm"], config.mla.norm_eps)
        self.kv_norm = RmsNorm(parameters["kv_norm"], config.mla.norm_eps)
        self.q_up = nnx.Param(parameters["q_up"])
        self.key_up = nnx.Param(parameters["key_up"])
        self.value_up = nnx.Param(parameters["value_up"])
        self.gate = nnx.Param(parameters["gate"])
        self.out = nnx.Param(parameters["out"])
        self.q_rank, self.kv_rank = config.mla.q_lora_rank, config.mla.kv_lora_rank
        self.scale = config.mla.scale
        self.implementation: Implementation = implementation
        self.axis: str | None = places["out"][1] if places else None
        """Mesh axis that the heads are split over: then the output is this device's term of a sum."""

    def project(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T H Q"], Float[Array, "B T L"], Array]:
        """Queries, latent rows to be cached (normalised latent and raw shared key), and the output gate's logits."""
        matrices = self.in_proj[...], self.gate[...]
        projected, gate = gemv.project(x, *matrices, implementation=self.implementation)
        compressed = projected[..., self.q_rank : self.q_rank + self.kv_rank]
        shared = projected[..., self.q_rank + self.kv_rank :]
        narrow = self.q_norm(projected[..., : self.q_rank])
        (query,) = gemv.project(narrow, self.q_up[...], implementation=self.implementation)
        return query, jnp.concatenate([self.kv_norm(compressed), shared], axis=-1), gate

    def attend(
        self, query: Float[Array, "B T H Q"], latent: Float[Array, "B T L"], rows: Rows, cache: MlaCache | None
    ) -> tuple[Float[Array, "B T H V"], MlaCache | None]:
        """Causal attention over the cached rows and the new ones, which are stored."""
        up = (self.key_up[...], self.value_up[...])
        options = {"scale": self.scale, "implementation": self.implementation}
        if cache is None:
            return mla.prefill(query, latent, *up, jnp.zeros_like(rows.length), rows.query_length, **options), None
        tokens = query.shape[1]
        scale = cache.page_scale
        pool = mla.write_pages(cache.latent, latent, rows.page_table, rows.length, rows.valid(tokens), scale)
        span = (rows.length, rows.length + rows.query_length)
        if tokens <= FEW_QUERIES:
            output = mla.decode(query, pool, rows.page_table, *up, *span, scale, **options)
        else:
            cached = mla.gather_pages(pool, rows.page_table, scale).astype(query.dtype)
            output = mla.prefill(query, cached, *up, *span, **options)
        return output, MlaCache(pool)

    def __call__(
        self, x: Float[Array, "B T D"], rows: Rows, cache: MlaCache | None
    ) -> tuple[Float[Array, "B T D"], MlaCache | None]:
        """The layer's output and the updated cache."""
        query, latent, logits = self.project(x)
        output, cache = self.attend(query, latent, rows, cache)
        gate = jax.nn.sigmoid(logits.astype(jnp.float32)).astype(x.dtype)
        options = {"dtypes": (term_dtype(self.axis, x),), "implementation": self.implementation}
        (projected,) = gemv.project(output * gate, self.out[...], contract=2, **options)
        return projected, cache
