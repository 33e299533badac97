"""The dense MLP with the SiTU activation."""

from flax import nnx
from jaxtyping import Array, Float

from k3jax.config import K3Config
from k3jax.params import Tree
from k3jax.sharding_local import term_dtype
from pallas import gemv
from pallas.activation import situ
from pallas.dispatch import Implementation


class Mlp(nnx.Module):
    """down(SiTU(gate(x), up(x))): layer 0 and the shared experts."""

    def __init__(
        self, config: K3Config, parameters: Tree, implementation: Implementation = None, places: Tree | None = None
    ) -> None:
        self.gate_up = nnx.Param(parameters["gate_up"])
        self.down = nnx.Param(parameters["down"])
        self.implementation: Implementation = implementation
        self.beta = config.situ_beta
        self.linear_beta = config.situ_linear_beta
        self.axis: str | None = places["down"][1] if places else None
        """Mesh axis that the inner channels are split over: then the output is this device's term of a sum."""

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Applies the MLP to the last axis."""
        (hidden,) = gemv.project(x, self.gate_up[...], implementation=self.implementation)
        return self.finish(hidden)

    def finish(self, hidden: Float[Array, "*batch 2 F"]) -> Float[Array, "*batch D"]:
        """The output from the products with `gate_up`."""
        activation = situ(hidden[..., 0, :], hidden[..., 1, :], beta=self.beta, linear_beta=self.linear_beta)
        options = {"dtypes": (term_dtype(self.axis, activation),), "implementation": self.implementation}
        (output,) = gemv.project(activation, self.down[...], **options)
        return output
