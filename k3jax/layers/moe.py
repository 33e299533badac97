"""Stable LatentMoE (report section 2.3)."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, UInt32

from k3jax.config import K3Config
from k3jax.layers.mlp import Mlp
from k3jax.layers.norm import RmsNorm
from k3jax.params import Tree
from k3jax.sharding_local import add_up, own_experts, term_dtype, term_of, term_of_columns
from pallas import collectives, gemv, moe
from pallas.dispatch import Implementation
from pallas.precision import einsum


class LatentMoe(nnx.Module):
    """Routed experts in a narrow latent space next to shared experts at full width."""

    def __init__(
        self, config: K3Config, parameters: Tree, implementation: Implementation, places: Tree | None = None
    ) -> None:
        self.router = nnx.Param(parameters["router"])
        self.correction_bias = nnx.Param(parameters["correction_bias"])
        self.latent_down = nnx.Param(parameters["latent_down"])
        self.latent_norm = RmsNorm(parameters["latent_norm"], config.norm_eps)
        self.latent_up = nnx.Param(parameters["latent_up"])
        self.shared = Mlp(config, parameters["shared"], implementation, places and places["shared"])
        self.experts = nnx.Dict({name: nnx.Param(array) for name, array in parameters["experts"].items()})
        self.k = config.moe.num_experts_per_token
        self.scaling = config.moe.routed_scaling_factor
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta
        self.implementation: Implementation = implementation
        down = places["experts"]["down_packed"] if places else (None,) * 3
        self.expert_axis: str | None = down[0]
        """Mesh axis that the experts are split over."""
        self.inner_axis: str | None = down[2]
        """Mesh axis that every expert's inner channels are split over."""
        self.column_axis: str | None = places["latent_up"][0] if places else None
        """Mesh axis that the columns of the routed output are split over."""

    @property
    def axis(self) -> str | None:
        """Mesh axis over whose devices the outputs are terms of a sum."""
        return self.column_axis or self.shared.axis

    def weights(self) -> moe.Experts:
        """The routed experts, packed as in a checkpoint or dense while training."""
        arrays = {name: param[...] for name, param in self.experts.items()}
        return moe.PackedExperts(**arrays) if "gate_up_packed" in arrays else moe.DenseExperts(**arrays)

    def __call__(
        self,
        x: Float[Array, "*batch D"],
        forced: moe.Routing | None = None,
        *,
        own_tokens: bool = False,
        table: UInt32[Array, "1 W"] | None = None,
    ) -> tuple[Float[Array, "*batch D"], moe.Routing]:
        """The layer's output and the routing of each token, tokens flattened.

        `forced` replaces the router's decision (for parity tests). `own_tokens`: every device of the experts' mesh axis
        has other tokens, which travel to their experts and back; otherwise all have the same. `table`: see `add_up`.
        """
        tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        chosen, latent, hidden = self.front(tokens)
        routing = forced or chosen
        mixed = self.mix(latent, routing, own_tokens=own_tokens, table=table)
        return self.join(mixed, hidden).reshape(x.shape), routing

    def scores(self, x: Float[Array, "*batch D"]) -> Float32[Array, "N E"]:
        """The router's scores of each token without the bias, in float32; the experts of the best biased ones run."""
        tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(jnp.float32)
        return jax.nn.sigmoid(einsum("nd,ed->ne", tokens, self.router[...].astype(jnp.float32)))

    def front(self, tokens: Float[Array, "N D"]) -> tuple[moe.Routing, Float[Array, "N L"], Float[Array, "N 2 F"]]:
        """Routing, latents, and gate and up of the shared experts: for a few tokens in one pass over the weights.

        Products of bfloat16 numbers are exact in float32, so the router's logits are float32 either way; many tokens
        widen its operands so that gradients are float32 too.
        """
        router, bias = self.router[...], self.correction_bias[...]
        matrices = self.latent_down[...], self.shared.gate_up[...]
        options = {"k": self.k, "scaling": self.scaling, "implementation": self.implementation}
        if tokens.shape[0] <= gemv.FEW_ROWS:
            routing, (latent, hidden) = moe.front(tokens, router, bias, matrices, **options)
            return routing, latent, hidden
        routing = moe.route(tokens, router, bias, **options)
        return routing, einsum("nd,ld->nl", tokens, matrices[0]), einsum("nd,ifd->nif", tokens, matrices[1])

    def mix(
        self,
        latent: Float[Array, "N L"],
        routing: moe.Routing,
        *,
        own_tokens: bool = False,
        table: UInt32[Array, "1 W"] | None = None,
    ) -> Float[Array, "N L"]:
        """The norm of the weighted sum of each token's experts, wherever they live."""
        options = {"beta": self.beta, "linear_beta": self.linear_beta, "implementation": self.implementation}
        if own_tokens:
            assert self.expert_axis is not None
            args = (latent, routing.ids, routing.weights, self.weights())
            return self.latent_norm(moe.parallel_experts(*args, axis=self.expert_axis, **options))
        axis, ids = self.expert_axis or self.inner_axis, routing.ids
        if self.expert_axis is not None:
            ids = own_experts(self.expert_axis, ids, self.experts["down_packed"].shape[0])
        dtype = term_dtype(axis, latent)
        mixed = moe.experts(latent, ids, routing.weights, self.weights(), dtype=dtype, **options)
        if axis is None or table is None:
            return self.latent_norm(add_up(axis, mixed, latent.dtype))
        weight, eps = self.latent_norm.weight[...], self.latent_norm.eps
        return collectives.normed_all_reduce(mixed, axis, table, weight, dtype=latent.dtype, eps=eps)

    def join(self, mixed: Float[Array, "N L"], hidden: Float[Array, "N 2 F"]) -> Float[Array, "N D"]:
        """Routed and shared output together: a term of a sum where either is split, with one collective for both."""
        dtype = term_dtype(self.axis, mixed)
        (routed,) = gemv.project(mixed, self.latent_up[...], dtypes=(dtype,), implementation=self.implementation)
        shared = self.shared.finish(hidden)
        if self.column_axis is not None:
            routed = term_of_columns(self.column_axis, routed)
        elif self.axis is not None:
            routed = term_of(self.axis, routed)
        if self.axis is not None and self.shared.axis is None:
            shared = term_of(self.axis, shared)
        return routed + shared.astype(dtype)
