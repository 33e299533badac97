"""Kimi Delta Attention (report section 2.1.1)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from k3jax.cache import KdaCache, KdaSpeculative, Rows
from k3jax.config import K3Config
from k3jax.params import Tree
from k3jax.sharding_local import own_part, term_dtype
from pallas import gemv, kda
from pallas.dispatch import Implementation
from pallas.precision import einsum


class Kda(nnx.Module):
    """Linear attention with a gated delta rule; its whole past is one matrix per head."""

    def __init__(
        self, config: K3Config, parameters: Tree, implementation: Implementation, places: Tree | None = None
    ) -> None:
        self.qkvz = nnx.Param(parameters["qkvz"])
        self.f_a = nnx.Param(parameters["f_a"])
        self.f_b = nnx.Param(parameters["f_b"])
        self.beta = nnx.Param(parameters["beta"])
        self.conv = nnx.Param(parameters["conv"])
        self.a_log = nnx.Param(parameters["a_log"])
        self.dt_bias = nnx.Param(parameters["dt_bias"])
        self.norm = nnx.Param(parameters["norm"])
        self.out = nnx.Param(parameters["out"])
        self.lower_bound, self.norm_eps = config.kda.gate_lower_bound, config.norm_eps
        self.implementation: Implementation = implementation
        self.axis: str | None = places["out"][1] if places else None
        """Mesh axis that the heads are split over: then the output is this device's term of a sum."""

    def __call__(
        self, x: Float[Array, "B T D"], rows: Rows, cache: KdaCache | KdaSpeculative | None
    ) -> tuple[Float[Array, "B T D"], KdaCache | KdaSpeculative | None]:
        """The layer's output and the updated cache."""
        matrices = self.qkvz[...], self.f_a[...], self.beta[...]
        qkvz, narrow, beta_logits = gemv.project(x, *matrices, implementation=self.implementation)
        decay_logits = einsum("bta,hca->bthc", narrow, self.f_b[...])
        beta_logits = own_part(self.axis, beta_logits, qkvz.shape[2], 2)
        output, cache = self.recur(qkvz, decay_logits, beta_logits, rows, cache)
        options = {"dtypes": (term_dtype(self.axis, x),), "implementation": self.implementation}
        (projected,) = gemv.project(output, self.out[...], contract=2, **options)
        return projected, cache

    def recur(
        self,
        qkvz: Float[Array, "B T H 4 C"],
        decay_logits: Float[Array, "B T H C"],
        beta_logits: Float[Array, "B T H"],
        rows: Rows,
        cache: KdaCache | KdaSpeculative | None,
    ) -> tuple[Float[Array, "B T H C"], KdaCache | KdaSpeculative | None]:
        """Convolution, recurrence and output gate: one step per row, a chunk, or tokens that may be rejected."""
        weights = kda.KdaWeights(self.conv[...], self.a_log[...], self.dt_bias[...], self.norm[...])
        inputs = (qkvz, decay_logits, beta_logits)
        options = {
            "lower_bound": self.lower_bound,
            "norm_eps": self.norm_eps,
            "implementation": self.implementation,
        }
        if isinstance(cache, KdaSpeculative):
            pools = (cache.state, cache.window, rows.active_slot, rows.query_length)
            output, records = kda.verify(*inputs, weights, *pools, **options)
            return output, KdaSpeculative(cache.state, cache.window, (records, qkvz))
        if cache is not None and qkvz.shape[1] == 1:
            step = (array[:, 0] for array in inputs)
            pools = (cache.state, cache.window, rows.active_slot, rows.fresh)
            output, state, window = kda.decode(*step, weights, *pools, **options)
            return output[:, None], KdaCache(state, window)
        start = self.zero_state(qkvz) if cache is None else cache.read(rows)
        rest = (start.state, start.window, rows.query_length)
        result = kda.prefill(*inputs, weights, *rest, boundaries=rows.boundary, **options)
        return result.output, None if cache is None else cache.write(rows, result)

    def zero_state(self, qkvz: Float[Array, "B T H 4 C"]) -> KdaCache:
        """The state before the first token."""
        batch, _, heads, _, dim = qkvz.shape
        taps = self.conv.shape[0] - 1
        state = jnp.zeros((batch, heads, dim, dim), jnp.float32)
        return KdaCache(state, jnp.zeros((batch, taps, heads, 3, dim), qkvz.dtype))
