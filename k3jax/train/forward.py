"""The training loss: next-token cross-entropy, rematerialised layer by layer, with routing statistics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from k3jax.cache import Rows
from k3jax.config import K3Config
from k3jax.layers.attn_res import AttnRes, Residual
from k3jax.layers.moe import LatentMoe
from k3jax.layers.norm import RmsNorm
from k3jax.model import Layer
from k3jax.params import Tree
from k3jax.train import balance
from pallas.moe import Routing
from pallas.moe.grouped import take_rows
from pallas.precision import einsum

Observe = Callable[[balance.Routed], None]


class Batch(NamedTuple):
    """Token windows. Padding is the pad id at the end of a row."""

    ids: Int32[Array, "B T+1"]
    weight: Float32[Array, "B T"]
    """Weight of predicting ids[:, 1:]; 0 for prompts and padding."""


class Losses(NamedTuple):
    """Sums over a (micro-)batch."""

    nats: Float32[Array, ""]
    weight: Float32[Array, ""]
    routed: balance.Routed


class ObservedMoe(LatentMoe):
    """A LatentMoE that counts how its valid tokens are routed."""

    def __init__(self, config: K3Config, parameters: Tree, valid: Bool[Array, "B T"], observe: Observe) -> None:
        super().__init__(config, parameters, "xla")
        self.count = lambda x: observe(
            balance.count(
                balance.router_scores(x, parameters["router"]), parameters["correction_bias"], self.k, valid.reshape(-1)
            )
        )

    def __call__(
        self, x: Float[Array, "*batch D"], forced: Routing | None = None, **where: Any
    ) -> tuple[Float[Array, "*batch D"], Routing]:
        """The layer's output and routing, counted; `where` goes on to the layer."""
        self.count(jax.lax.stop_gradient(x.reshape(-1, x.shape[-1])))
        return super().__call__(x, forced, **where)


def rows_of(ids: Int32[Array, "B T"], pad: int) -> Rows:
    """Rows without a cache; padding at the end of a row is no token."""
    zeros = jnp.zeros(ids.shape[0], jnp.int32)
    length = jnp.sum(ids != pad, axis=1, dtype=jnp.int32)
    return Rows(zeros, jnp.zeros((ids.shape[0], 1), jnp.int32), zeros, length)


def run_layer(config: K3Config, index: int, parameters: Tree, residual: Residual, rows: Rows) -> tuple:
    """One layer from its parameters: (residual, `balance.Routed` of a MoE layer or None)."""
    seen: list[balance.Routed] = []
    layer = Layer(config, index, parameters, "xla")
    if config.is_moe(index):
        assert residual.prefix is not None
        valid = rows.valid(residual.prefix.shape[1])
        layer.ffn = ObservedMoe(config, parameters["ffn"], valid, seen.append)
    residual, _, _ = layer(residual, rows, None)
    return residual.settle(), seen[0] if seen else None


def hidden_states(
    config: K3Config, parameters: Tree, ids: Int32[Array, "B T"], *, remat: bool = True
) -> tuple[Float[Array, "B T D"], balance.Routed]:
    """Final hidden states and stacked statistics of the MoE layers. Differentiable in `parameters`."""
    rows = rows_of(ids, config.pad_token_id)
    embedded = take_rows(parameters["embedding"], ids.reshape(-1))
    residual = Residual((), embedded.reshape(*ids.shape, -1))
    statistics: list[balance.Routed] = []
    for index in range(config.num_layers):

        def apply(parameters: Tree, residual: Residual, index: int = index) -> tuple:
            return run_layer(config, index, parameters, residual, rows)

        step = jax.checkpoint(apply) if remat else apply
        residual, routed = step(parameters["layers"][str(index)], residual)
        statistics += [routed] if routed is not None else []
    mixed = AttnRes(parameters["output_res"], config.norm_eps, "xla")(residual)
    return RmsNorm(parameters["norm"], config.norm_eps)(mixed), jax.tree.map(lambda *x: jnp.stack(x), *statistics)


def token_nats(
    hidden: Float[Array, "B T D"], head: Float[Array, "V D"], target: Int32[Array, "B T"]
) -> Float32[Array, "B T"]:
    """Negative log likelihood of each target, in float32."""
    logits = einsum("btd,vd->btv", hidden, head, out=jnp.dtype(jnp.float32))
    chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def losses(config: K3Config, parameters: Tree, batch: Batch, *, remat: bool = True) -> Losses:
    """Weighted sums over the batch; `parameters` as `specs.compute_parameters` gives them."""
    hidden, routed = hidden_states(config, parameters, batch.ids[:, :-1], remat=remat)
    nats = token_nats(hidden, parameters["head"], batch.ids[:, 1:])
    return Losses(jnp.sum(nats * batch.weight), jnp.sum(batch.weight), routed)
