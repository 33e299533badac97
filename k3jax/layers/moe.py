"""Stable LatentMoE (report section 2.3)."""

import math

from flax import nnx
from jaxtyping import Array, Float

from k3jax.config import K3Config
from k3jax.layers.mlp import Mlp
from k3jax.layers.norm import RmsNorm
from k3jax.params import Tree
from pallas import moe
from pallas.dispatch import Implementation
from pallas.precision import einsum


class LatentMoe(nnx.Module):
    """Routed experts in a narrow latent space next to shared experts at full width."""

    def __init__(self, config: K3Config, parameters: Tree, implementation: Implementation) -> None:
        self.router = nnx.Param(parameters["router"])
        self.correction_bias = nnx.Param(parameters["correction_bias"])
        self.latent_down = nnx.Param(parameters["latent_down"])
        self.latent_norm = RmsNorm(parameters["latent_norm"], config.norm_eps)
        self.latent_up = nnx.Param(parameters["latent_up"])
        self.shared = Mlp(config, parameters["shared"])
        self.experts = nnx.Dict({name: nnx.Param(array) for name, array in parameters["experts"].items()})
        self.k = config.moe.num_experts_per_token
        self.scaling = config.moe.routed_scaling_factor
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta
        self.implementation: Implementation = implementation

    def weights(self) -> moe.Experts:
        """The routed experts, packed as in a checkpoint or dense while training."""
        arrays = {name: param[...] for name, param in self.experts.items()}
        return moe.PackedExperts(**arrays) if "gate_up_packed" in arrays else moe.DenseExperts(**arrays)

    def __call__(
        self, x: Float[Array, "*batch D"], forced: moe.Routing | None = None
    ) -> tuple[Float[Array, "*batch D"], moe.Routing]:
        """The layer's output and the routing of each token, tokens flattened.

        `forced` replaces the router's decision (for parity tests).
        """
        tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        routing = forced or moe.route(
            tokens,
            self.router[...],
            self.correction_bias[...],
            k=self.k,
            scaling=self.scaling,
            implementation=self.implementation,
        )
        mixed = moe.experts(
            einsum("nd,ld->nl", tokens, self.latent_down[...]),
            routing.ids,
            routing.weights,
            self.weights(),
            beta=self.beta,
            linear_beta=self.linear_beta,
            implementation=self.implementation,
        )
        routed = einsum("nl,dl->nd", self.latent_norm(mixed), self.latent_up[...])
        return (routed + self.shared(tokens)).reshape(x.shape), routing
