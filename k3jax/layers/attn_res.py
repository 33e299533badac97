"""The residual stream of K3: frozen block snapshots and a running prefix (report section 2.2)."""

from typing import NamedTuple

from flax import nnx
from jaxtyping import Array, Float

from k3jax.layers.norm import RmsNorm
from k3jax.params import Tree
from k3jax.sharding_local import Term
from pallas import attn_res
from pallas.dispatch import Implementation


class Residual(NamedTuple):
    """What flows through the depth of the network, per token."""

    sources: tuple[Float[Array, "*batch D"], ...]
    """Prefixes frozen at the start of each block, oldest first."""
    summed: Float[Array, "*batch D"] | None
    """Sum of the sublayer outputs of the current block up to the last read; None right after a freeze."""
    pending: Float[Array, "*batch D"] | Term | None = None
    """The last sublayer's output, or this device's term of it, which the next read adds to the sum."""

    @property
    def prefix(self) -> Float[Array, "*batch D"] | None:
        """Sum of all sublayer outputs of the current block; None right after a freeze."""
        if self.summed is None or self.pending is None:
            return self.summed
        return self.summed + (self.pending.sum() if isinstance(self.pending, Term) else self.pending)

    def settle(self) -> "Residual":
        """The same stream with nothing pending."""
        return Residual(self.sources, self.prefix)

    def freeze(self) -> "Residual":
        """Starts a block: the raw prefix becomes a source."""
        prefix = self.prefix  # once: it may be a sum over devices
        assert prefix is not None
        return Residual((*self.sources, prefix), None)

    def add(self, output: Float[Array, "*batch D"] | Term) -> "Residual":
        """Adds a sublayer's output to the prefix."""
        prefix = self.prefix
        if prefix is not None:
            return Residual(self.sources, prefix, output)
        return Residual(self.sources, output.sum() if isinstance(output, Term) else output)


class AttnRes(nnx.Module):
    """One read of the residual stream: attention of a learned pseudo-query over its vectors."""

    def __init__(self, parameters: Tree, eps: float, implementation: Implementation) -> None:
        self.norm = nnx.Param(parameters["norm"])
        self.query = nnx.Param(parameters["query"])
        self.eps = eps
        self.implementation: Implementation = implementation

    def read(self, residual: Residual, norm: RmsNorm) -> tuple[Residual, Float[Array, "*batch D"]]:
        """The settled stream, and `norm` of the mix of its vectors: what the next sublayer takes."""
        assert residual.summed is not None
        pending = residual.pending
        term = pending if isinstance(pending, Term) else None
        prefix, normed = attn_res.read(
            residual.sources,
            residual.summed,
            pending.part if isinstance(pending, Term) else pending,
            self.norm[...],
            self.query[...],
            norm.weight[...],
            eps=self.eps,
            norm_eps=norm.eps,
            table=term and term.table,
            axis=term and term.axis,
            implementation=self.implementation,
        )
        return Residual(residual.sources, prefix), normed

    def __call__(self, residual: Residual) -> Float[Array, "*batch D"]:
        """The mix of the sources and the prefix; the prefix itself while nothing is frozen."""
        prefix = residual.prefix
        assert prefix is not None
        return attn_res.mix(
            residual.sources,
            prefix,
            self.norm[...],
            self.query[...],
            eps=self.eps,
            implementation=self.implementation,
        )
