"""Stable LatentMoE (report section 2.3)."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32

from k3jax.config import K3Config
from k3jax.layers.mlp import Mlp
from k3jax.layers.norm import RmsNorm
from k3jax.params import Tree
from pallas import gemv, moe
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
        self.shared = Mlp(config, parameters["shared"], implementation)
        self.experts = nnx.Dict({name: nnx.Param(array) for name, array in parameters["experts"].items()})
        self.k = config.moe.num_experts_per_token
        self.scaling = config.moe.routed_scaling_factor
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta
        self.implementation: Implementation = implementation
        self.expert_axis: str | None = None
        """Mesh axis that the experts and the tokens are split over, inside `jax.shard_map`: see `expert_parallel`."""

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
        logits, latent, hidden = self.front(tokens)
        routing = forced or moe.choose(logits, self.correction_bias[...], k=self.k, scaling=self.scaling)
        mixed = self.latent_norm(self.mix(latent, routing))
        (routed,) = gemv.project(mixed, self.latent_up[...], implementation=self.implementation)
        return (routed + self.shared.finish(hidden)).reshape(x.shape), routing

    def front(
        self, tokens: Float[Array, "N D"]
    ) -> tuple[Float32[Array, "N E"], Float[Array, "N L"], Float[Array, "N 2 F"]]:
        """Router logits, latents, and gate and up of the shared experts: for a few tokens in one pass over the weights.

        Products of bfloat16 numbers are exact in float32, so the router's logits are float32 either way; many tokens
        widen its operands so that gradients are float32 too.
        """
        matrices = self.router[...], self.latent_down[...], self.shared.gate_up[...]
        if tokens.shape[0] <= gemv.FEW_ROWS:
            kinds = (jnp.float32, tokens.dtype, tokens.dtype)
            logits, latent, hidden = gemv.project(tokens, *matrices, dtypes=kinds, implementation=self.implementation)
            return logits, latent, hidden
        router, down, gate_up = matrices
        logits = einsum("nd,ed->ne", tokens.astype(jnp.float32), router.astype(jnp.float32))
        return logits, einsum("nd,ld->nl", tokens, down), einsum("nd,ifd->nif", tokens, gate_up)

    def mix(self, latent: Float[Array, "N L"], routing: moe.Routing) -> Float[Array, "N L"]:
        """The weighted sum of each token's experts, wherever they live."""
        run = moe.experts
        if self.expert_axis is not None:
            run = functools.partial(moe.parallel_experts, axis=self.expert_axis)
        options = {"beta": self.beta, "linear_beta": self.linear_beta, "implementation": self.implementation}
        return run(latent, routing.ids, routing.weights, self.weights(), **options)


def expert_parallel(layer: LatentMoe, mesh: Mesh, axis: str) -> Callable[[Array], Array]:
    """The layer with its experts and the leading axis of its input split over a mesh axis, all else whole everywhere.

    Both must be divisible by the size of the axis. Tokens travel to their experts and back by all-to-all.
    """
    layer = nnx.merge(*nnx.split(layer))
    layer.expert_axis = axis
    graph, state = nnx.split(layer)
    split, whole = PartitionSpec(axis), PartitionSpec()

    def place(path: tuple[Any, ...], _: Any) -> PartitionSpec:
        return split if path[0] == "experts" else whole

    def local(state: Any, x: Array) -> Array:
        return nnx.merge(graph, state)(x)[0]

    flat = nnx.to_flat_state(state)
    specs = nnx.from_flat_state([(path, place(path, leaf)) for path, leaf in flat])
    run = jax.shard_map(local, mesh=mesh, in_specs=(specs, split), out_specs=split, check_vma=False)
    return functools.partial(jax.jit(run), state)
