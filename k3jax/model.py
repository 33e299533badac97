"""Kimi K3's text model: the forward pass of the report, figure 2 and equation (1)."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from k3jax.cache import K3Cache, LayerCache, Rows
from k3jax.config import K3Config
from k3jax.layers.attn_res import AttnRes, Residual
from k3jax.layers.kda import Kda
from k3jax.layers.mla import Mla
from k3jax.layers.mlp import Mlp
from k3jax.layers.moe import LatentMoe
from k3jax.layers.norm import RmsNorm
from k3jax.params import Tree, model_specs
from k3jax.sharding import Layout
from k3jax.sharding_local import TOKENS_OF_A_DEVICE, Spread, Term, look_up
from pallas import gemv
from pallas.dispatch import Implementation
from pallas.moe import Routing

WHOLE = Spread()
"""The stream of one device."""


class LayerTrace(NamedTuple):
    """What a layer leaves behind for inspection."""

    prefix: Float[Array, "B T D"]
    """The running prefix after the layer."""
    routing: Routing | None
    """Routed experts of each token (flattened); None in a dense layer."""
    mixed: Float[Array, "B T D"]
    """What the next read of the residual stream makes of it: the next layer's, or the output's."""
    scores: Float32[Array, "N E"] | None = None
    """The router's biased scores, where other experts than the best were forced."""


class Output(NamedTuple):
    """Result of a forward pass."""

    hidden: Float[Array, "B T D"]
    """Normalised final hidden states, ready for the head."""
    cache: K3Cache | None
    trace: tuple[LayerTrace, ...]


class Layer(nnx.Module):
    """One decoder layer: attention and an MLP, each reading the residual stream by AttnRes."""

    def __init__(
        self,
        config: K3Config,
        layer: int,
        parameters: Tree,
        implementation: Implementation,
        places: Tree | None = None,
    ) -> None:
        eps = config.norm_eps
        self.starts_block = config.starts_block(layer)
        self.attention_res = AttnRes(parameters["attention_res"], eps, implementation)
        self.attention_norm = RmsNorm(parameters["attention_norm"], eps)
        attention = Mla if config.is_mla(layer) else Kda
        self.attention = attention(config, parameters["attention"], implementation, places and places["attention"])
        self.ffn_res = AttnRes(parameters["ffn_res"], eps, implementation)
        self.ffn_norm = RmsNorm(parameters["ffn_norm"], eps)
        ffn = LatentMoe if config.is_moe(layer) else Mlp
        self.ffn = ffn(config, parameters["ffn"], implementation, places and places["ffn"])

    def feed_forward(
        self, x: Float[Array, "B S D"], spread: Spread, experts: Int32[Array, "N k"] | None
    ) -> tuple[Float[Array, "B S D"] | Term, Routing | None, Float32[Array, "N E"] | None]:
        """What the MLP or MoE adds to the stream; the routing of the latter, and its scores if `experts` are given."""
        dtype, ffn = x.dtype, self.ffn
        if not isinstance(ffn, LatentMoe):
            return spread.leave(ffn(spread.all_tokens(x)), dtype, terms=ffn.axis is not None), None, None
        if spread.by_token and ffn.expert_axis is not None:
            return *self._exchanged(ffn, x, spread), None
        x, scores, forced = spread.all_tokens(x), None, None
        if experts is not None:
            plain = ffn.scores(x)
            scores, weights = plain + ffn.correction_bias[...][None], jnp.take_along_axis(plain, experts, axis=-1)
            forced = Routing(experts, weights / jnp.sum(weights, axis=-1, keepdims=True) * ffn.scaling)
        fed, routing = ffn(x, forced, table=spread.table)
        return spread.leave(fed, dtype, terms=ffn.axis is not None), routing, scores

    def _exchanged(
        self, ffn: LatentMoe, x: Float[Array, "B S D"], spread: Spread
    ) -> tuple[Float[Array, "B S D"], Routing]:
        """The MoE of the device's own tokens, with experts that live on all devices; the routing of all tokens."""
        fed, own = ffn(x, own_tokens=True)
        whole = (spread.all_tokens(array.reshape(*x.shape[:2], -1)) for array in own)
        return fed, Routing(*(array.reshape(-1, array.shape[-1]) for array in whole))

    def __call__(
        self,
        residual: Residual,
        rows: Rows,
        cache: LayerCache | None,
        spread: Spread = WHOLE,
        experts: Int32[Array, "N k"] | None = None,
    ) -> tuple[Residual, LayerCache | None, tuple[Routing | None, Float32[Array, "N E"] | None]]:
        """Reads the stream before a freeze, so that the first read of a block still sees the old prefix."""
        residual, x = self.attention_res.read(residual, self.attention_norm)
        if self.starts_block:
            residual = residual.freeze()
        dtype, attention = x.dtype, self.attention
        attended, cache = attention(spread.all_tokens(x), rows, cache)  # pyright: ignore[reportArgumentType]
        residual = residual.add(spread.leave(attended, dtype, terms=attention.axis is not None))
        residual, x = self.ffn_res.read(residual, self.ffn_norm)
        fed, routing, scores = self.feed_forward(x, spread, experts)
        return residual.add(fed), cache, (routing, scores)


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """A model's place on a mesh: the partition of every parameter."""

    layout: Layout
    partitions: Tree

    def of_parameter(self, path: Sequence[str | int]) -> PartitionSpec:
        """The partition of the parameter at `path` in the module tree."""
        place: Any = {**self.partitions, "inboxes": PartitionSpec(self.layout.axis)}
        for key in path:
            if isinstance(place, PartitionSpec):  # norms keep their weight one level deeper
                break
            place = place[str(key)]
        return place

    def spread(self, tokens: int) -> Spread:
        """How a chunk of `tokens` a row flows through the layers: by token where every device has enough of them."""
        devices = self.layout.mesh.size
        by_token = devices > 1 and tokens % devices == 0 and tokens >= TOKENS_OF_A_DEVICE * devices
        return Spread(self.layout.axis, by_token)


class K3(nnx.Module):
    """Embedding, layers, head.

    With a layout of a mesh its parameters are those of all devices, and a call runs on each device's part of them
    inside `jax.shard_map`, so that kernels never meet a divided array.
    """

    def __init__(
        self, config: K3Config, parameters: Tree, implementation: Implementation = None, layout: Layout | None = None
    ) -> None:
        places = None if layout is None else layout.partitions(model_specs(config))
        self.placement = None if layout is None or places is None else Placement(layout, places)
        self.vocab_axis: str | None = places["head"][0] if places else None
        """Mesh axis that embedding and head are split over by token id."""
        self.embedding = nnx.Param(parameters["embedding"])
        self.layers = nnx.List(
            Layer(
                config, layer, parameters["layers"][str(layer)], implementation, places and places["layers"][str(layer)]
            )
            for layer in range(config.num_layers)
        )
        self.output_res = AttnRes(parameters["output_res"], config.norm_eps, implementation)
        self.norm = RmsNorm(parameters["norm"], config.norm_eps)
        self.head = nnx.Param(parameters["head"])
        self.implementation: Implementation = implementation
        # Without the embedding's sum there is no exchange of the runtime's in front, see `forward`.
        inboxes = None if layout is None or implementation == "xla" or self.vocab_axis is None else layout.inboxes
        self.inboxes = None if inboxes is None else nnx.Variable(inboxes.table)
        """Where devices send terms of sums; the memory itself belongs to the layout."""

    def __call__(
        self,
        ids: Int32[Array, "B T"],
        rows: Rows,
        cache: K3Cache | None = None,
        *,
        trace: bool = False,
        experts: tuple[Int32[Array, "N k"], ...] | None = None,
    ) -> Output:
        """Runs `ids` as the continuation of the sequences in `rows`, or from the start without a cache.

        Columns beyond a row's `query_length` are padding. `experts` gives those of every token for each MoE layer. The
        head is separate: see `logits`.
        """
        if self.placement is None:
            return self.forward(ids, rows, cache, WHOLE, trace, experts)
        return self._on_mesh(self.placement, ids, rows, cache, trace, experts)

    def _on_mesh(
        self,
        placement: Placement,
        ids: Int32[Array, "B T"],
        rows: Rows,
        cache: K3Cache | None,
        trace: bool,
        experts: tuple[Int32[Array, "N k"], ...] | None,
    ) -> Output:
        """`forward` on every device, with its part of the parameters and of the cache."""
        layout = placement.layout
        # Given experts are those of all tokens: then every device has all of them.
        spread = placement.spread(ids.shape[1]) if experts is None else Spread(layout.axis)
        graph, state = nnx.split(self)
        flat = nnx.to_flat_state(state)
        weights = nnx.from_flat_state([(path, placement.of_parameter(path)) for path, _ in flat])
        whole = PartitionSpec()
        stream = PartitionSpec(None, spread.axis) if spread.by_token else whole
        before, after = (cache and layout.cache_partitions(cache, pending=pending) for pending in (False, True))
        traces = (LayerTrace(stream, whole, stream, whole),) * len(self.layers) if trace else ()

        def local(state: Any, ids: Array, rows: Rows, cache: K3Cache | None, experts: Any) -> Output:
            return nnx.merge(graph, state).forward(ids, rows, cache, spread, trace, experts)

        run = layout.on_devices(local, (weights, whole, whole, before, whole), Output(whole, after, traces))
        return run(state, ids, rows, cache, experts)

    def forward(
        self,
        ids: Int32[Array, "B T"],
        rows: Rows,
        cache: K3Cache | None,
        spread: Spread,
        trace: bool,
        experts: tuple[Int32[Array, "N k"], ...] | None,
    ) -> Output:
        """`__call__` on one device, which has a part of the parameters where there are several."""
        rest = iter(experts or ())
        embedded = look_up(self.vocab_axis, self.embedding[...], ids)
        # The runtime's sum: a program with one of its exchanges begins on all devices only when all are prepared, so
        # that no kernel waits for a device that is still loading its own.
        residual = Residual((), spread.take(embedded, embedded.dtype, terms=self.vocab_axis is not None))
        if self.inboxes is not None:
            spread = dataclasses.replace(spread, table=self.inboxes[...])
        entries: list[LayerCache | None] = []
        traces: list[LayerTrace] = []
        for index, layer in enumerate(self.layers):
            forced = next(rest, None) if isinstance(layer.ffn, LatentMoe) else None
            residual, entry, routed = layer(residual, rows, cache.layers[index] if cache else None, spread, forced)
            entries.append(entry)
            if trace:
                # Settled once for all that read it: the sum must not be rounded differently in two places.
                residual = residual.settle()
                assert residual.summed is not None
                routing, scores = routed
                traces.append(LayerTrace(residual.summed, routing, self._next_read(index)(residual), scores))
        _, hidden = self.output_res.read(residual, self.norm)
        kept = [entry for entry in entries if entry is not None]
        return Output(spread.all_tokens(hidden), K3Cache(tuple(kept)) if cache else None, tuple(traces))

    def _next_read(self, layer: int) -> AttnRes:
        """The read that follows `layer`."""
        return self.output_res if layer + 1 == len(self.layers) else self.layers[layer + 1].attention_res

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """float32 logits over the vocabulary, rounded to the model's dtype first as the released code does.

        On a mesh that splits the vocabulary they stay split; `step.Graph.replicate` puts them together.
        """

        def project(head: Float[Array, "V D"], hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
            return gemv.project(hidden, head, implementation=self.implementation)[0]

        if self.placement is not None:
            place = self.placement.of_parameter(["head"])
            columns = PartitionSpec(*[None] * (hidden.ndim - 1), self.vocab_axis)
            project = self.placement.layout.on_devices(project, (place, PartitionSpec()), columns)
        return project(self.head[...], hidden).astype(jnp.float32)
