"""The residual stream of K3: frozen block snapshots and a running prefix (report section 2.2)."""

from typing import NamedTuple

from flax import nnx
from jaxtyping import Array, Float

from k3jax.params import Tree
from pallas import attn_res
from pallas.dispatch import Implementation


class Residual(NamedTuple):
    """What flows through the depth of the network, per token."""

    sources: tuple[Float[Array, "*batch D"], ...]
    """Prefixes frozen at the start of each block, oldest first."""
    prefix: Float[Array, "*batch D"] | None
    """Sum of the sublayer outputs of the current block; None right after a freeze."""

    def freeze(self) -> "Residual":
        """Starts a block: the raw prefix becomes a source."""
        assert self.prefix is not None
        return Residual((*self.sources, self.prefix), None)

    def add(self, output: Float[Array, "*batch D"]) -> "Residual":
        """Adds a sublayer's output to the prefix."""
        return Residual(self.sources, output if self.prefix is None else self.prefix + output)


class AttnRes(nnx.Module):
    """One read of the residual stream: attention of a learned pseudo-query over its vectors."""

    def __init__(self, parameters: Tree, eps: float, implementation: Implementation) -> None:
        self.norm = nnx.Param(parameters["norm"])
        self.query = nnx.Param(parameters["query"])
        self.eps = eps
        self.implementation: Implementation = implementation

    def __call__(self, residual: Residual) -> Float[Array, "*batch D"]:
        """The mix of the sources and the prefix; the prefix itself while nothing is frozen."""
        assert residual.prefix is not None
        return attn_res.mix(
            residual.sources,
            residual.prefix,
            self.norm[...],
            self.query[...],
            eps=self.eps,
            implementation=self.implementation,
        )
