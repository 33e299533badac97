"""Kimi K3's text model: the forward pass of the report, figure 2 and equation (1)."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from k3jax.cache import K3Cache, LayerCache, Rows
from k3jax.config import K3Config
from k3jax.layers.attn_res import AttnRes, Residual
from k3jax.layers.kda import Kda
from k3jax.layers.mla import Mla
from k3jax.layers.mlp import Mlp
from k3jax.layers.moe import LatentMoe
from k3jax.layers.norm import RmsNorm
from k3jax.params import Tree
from pallas import gemv
from pallas.dispatch import Implementation
from pallas.moe import Routing


class LayerTrace(NamedTuple):
    """What a layer leaves behind for inspection."""

    prefix: Float[Array, "B T D"]
    """The running prefix after the layer."""
    routing: Routing | None
    """Routed experts of each token (flattened); None in a dense layer."""
    mixed: Float[Array, "B T D"]
    """What the next read of the residual stream makes of it: the next layer's, or the output's."""


class Output(NamedTuple):
    """Result of a forward pass."""

    hidden: Float[Array, "B T D"]
    """Normalised final hidden states, ready for the head."""
    cache: K3Cache | None
    trace: tuple[LayerTrace, ...]


class Layer(nnx.Module):
    """One decoder layer: attention and an MLP, each reading the residual stream by AttnRes."""

    def __init__(self, config: K3Config, layer: int, parameters: Tree, implementation: Implementation) -> None:
        eps = config.norm_eps
        self.starts_block = config.starts_block(layer)
        self.attention_res = AttnRes(parameters["attention_res"], eps, implementation)
        self.attention_norm = RmsNorm(parameters["attention_norm"], eps)
        attention = Mla if config.is_mla(layer) else Kda
        self.attention = attention(config, parameters["attention"], implementation)
        self.ffn_res = AttnRes(parameters["ffn_res"], eps, implementation)
        self.ffn_norm = RmsNorm(parameters["ffn_norm"], eps)
        self.ffn = (
            LatentMoe(config, parameters["ffn"], implementation)
            if config.is_moe(layer)
            else Mlp(config, parameters["ffn"], implementation)
        )

    def feed_forward(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Routing | None]:
        """The layer's MLP or MoE, and the routing of the latter."""
        return self.ffn(x) if isinstance(self.ffn, LatentMoe) else (self.ffn(x), None)

    def __call__(
        self, residual: Residual, rows: Rows, cache: LayerCache | None
    ) -> tuple[Residual, LayerCache | None, Routing | None]:
        """Reads the stream before a freeze, so that the first read of a block still sees the old prefix."""
        residual, x = self.attention_res.read(residual, self.attention_norm)
        if self.starts_block:
            residual = residual.freeze()
        attended, cache = self.attention(x, rows, cache)  # pyright: ignore[reportArgumentType]
        residual, x = self.ffn_res.read(residual.add(attended), self.ffn_norm)
        fed, routing = self.feed_forward(x)
        return residual.add(fed), cache, routing


class K3(nnx.Module):
    """Embedding, layers, head."""

    def __init__(self, config: K3Config, parameters: Tree, implementation: Implementation = None) -> None:
        self.embedding = nnx.Param(parameters["embedding"])
        layers = parameters["layers"]
        self.layers = nnx.List(
            [Layer(config, layer, layers[str(layer)], implementation) for layer in range(config.num_layers)]
        )
        self.output_res = AttnRes(parameters["output_res"], config.norm_eps, implementation)
        self.norm = RmsNorm(parameters["norm"], config.norm_eps)
        self.head = nnx.Param(parameters["head"])
        self.implementation: Implementation = implementation

    def __call__(
        self, ids: Int32[Array, "B T"], rows: Rows, cache: K3Cache | None = None, *, trace: bool = False
    ) -> Output:
        """Runs `ids` as the continuation of the sequences in `rows`, or from the start without a cache.

        Columns beyond a row's `query_length` are padding. The head is separate: see `logits`.
        """
        residual = Residual((), self.embedding[...][ids])
        entries: list[LayerCache | None] = []
        traces: list[LayerTrace] = []
        for index, layer in enumerate(self.layers):
            residual, entry, routing = layer(residual, rows, cache.layers[index] if cache else None)
            entries.append(entry)
            if trace:
                # Settled once for all that read it: the sum must not be rounded differently in two places.
                residual = residual.settle()
                assert residual.summed is not None
                traces.append(LayerTrace(residual.summed, routing, self._next_read(index)(residual)))
        _, hidden = self.output_res.read(residual, self.norm)
        kept = [entry for entry in entries if entry is not None]
        return Output(hidden, K3Cache(tuple(kept)) if cache else None, tuple(traces))

    def _next_read(self, layer: int) -> AttnRes:
        """The read that follows `layer`."""
        return self.output_res if layer + 1 == len(self.layers) else self.layers[layer + 1].attention_res

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """float32 logits over the vocabulary, rounded to the model's dtype first as the released code does."""
        (logits,) = gemv.project(hidden, self.head[...], implementation=self.implementation)
        return logits.astype(jnp.float32)
