"""One optimizer step, data-parallel: every device works on its rows, sums meet in one all-reduce each."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float32, Int32

from k3jax.config import K3Config
from k3jax.params import Tree, flatten
from k3jax.train import balance, specs
from k3jax.train.forward import Batch, Losses, losses
from k3jax.train.optimizer import optimizer

AXIS = "data"


class TrainState(NamedTuple):
    """Everything that a run needs to continue bit for bit."""

    step: Int32[Array, ""]
    masters: Tree
    """float32 parameters."""
    optimizer: Any


class Metrics(NamedTuple):
    """Of one step, before its update."""

    loss: Float32[Array, ""]
    """Nats per weighted token."""
    gradient_norm: Float32[Array, ""]
    imbalance: Float32[Array, " layers"]
    """Largest over mean expert load of each MoE layer."""
    load: Int32[Array, "layers E"]


class Controls(NamedTuple):
    """What may change from step to step without a new compilation."""

    learning_rate: Float32[Array, ""]
    balanced: Bool[Array, ""]
    """False leaves the correction biases as they are: no load balancing at all."""


Step = Callable[[TrainState, Batch, Controls], tuple[TrainState, Metrics]]


def create_state(config: K3Config, seed: int, mesh: Mesh, **options: Any) -> TrainState:
    """Fresh parameters and optimizer state, whole on every device; `options` as for `optimizer.optimizer`."""

    @partial(jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec()))
    def create(key: jax.Array) -> TrainState:
        masters = specs.initialize(config, key)
        transformation = optimizer(specs.training_specs(config), **options)
        return TrainState(jnp.zeros((), jnp.int32), masters, transformation.init(masters))

    return create(jax.random.key(seed))


def gradients(
    config: K3Config, masters: Tree, batch: Batch, *, dtype: Any = jnp.bfloat16, remat: bool = True
) -> tuple[Losses, Tree]:
    """Sums over a batch, and the gradient of `nats` in the master parameters."""

    def nats(masters: Tree) -> tuple[Array, Losses]:
        result = losses(
            config, specs.compute_parameters(specs.training_specs(config), masters, dtype), batch, remat=remat
        )
        return result.nats, result

    gradient, result = jax.grad(nats, has_aux=True)(masters)
    return result, gradient


def accumulate(
    config: K3Config, masters: Tree, batch: Batch, micro_batches: int, **options: Any
) -> tuple[Losses, Tree]:
    """`gradients` summed over `micro_batches` equal parts of the batch, one after the other."""
    if micro_batches == 1:
        return gradients(config, masters, batch, **options)
    parts = jax.tree.map(lambda array: array.reshape(micro_batches, -1, *array.shape[1:]), batch)

    def add(total: Any, part: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradients(config, masters, part, **options)), None

    first = jax.tree.map(lambda array: array[0], parts)
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        jax.eval_shape(partial(gradients, config, **options), masters, first),
    )
    return jax.lax.scan(add, zeros, parts)[0]


def set_biases(config: K3Config, masters: Tree, routed: balance.Routed, balanced: Bool[Array, ""]) -> Tree:
    """The parameters with the next correction bias of every MoE layer, if `balanced`."""
    layers = dict(masters["layers"])
    for i, layer in enumerate(config.moe_layers):
        entry = dict(layers[str(layer)])
        ffn = dict(entry["ffn"])
        part = jax.tree.map(lambda counts, i=i: counts[i], routed)
        bias = ffn["correction_bias"]
        ffn["correction_bias"] = jnp.where(balanced, balance.next_bias(part, bias), bias)
        layers[str(layer)] = entry | {"ffn": ffn}
    return masters | {"layers": layers}


def make_step(
    config: K3Config,
    mesh: Mesh,
    *,
    dtype: Any = jnp.bfloat16,
    remat: bool = True,
    micro_batches: int = 1,
    **options: Any,
) -> Step:
    """The compiled step (state, batch, controls) -> (state, metrics). Donates the state.

    The batch is split over the mesh axis "data".
    """
    transformation = optimizer(specs.training_specs(config), **options)
    rows = PartitionSpec(AXIS)
    whole = PartitionSpec()

    @partial(jax.shard_map, mesh=mesh, in_specs=(whole, rows), out_specs=whole, check_vma=False)
    def sums(masters: Tree, batch: Batch) -> tuple[Losses, Tree]:
        return jax.lax.psum(accumulate(config, masters, batch, micro_batches, dtype=dtype, remat=remat), AXIS)

    @partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: Batch, controls: Controls) -> tuple[TrainState, Metrics]:
        result, summed = sums(state.masters, batch)
        weight = jnp.maximum(result.weight, 1)
        gradient = jax.tree.map(lambda leaf: leaf / weight, summed)
        ascent, inner = transformation.update(gradient, state.optimizer, state.masters)
        masters = jax.tree.map(
            lambda master, direction: master - controls.learning_rate * direction, state.masters, ascent
        )
        masters = set_biases(config, masters, result.routed, controls.balanced)
        metrics = Metrics(
            result.nats / weight,
            jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient))),
            balance.imbalance(result.routed.load),
            result.routed.load,
        )
        return TrainState(state.step + 1, masters, inner), metrics

    return step


def data_mesh(devices: list[Any] | None = None) -> Mesh:
    """A one-axis mesh for data parallelism over `devices` (default: all)."""
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)


def state_leaves(state: TrainState) -> int:
    """Number of parameter values of a state."""
    return sum(leaf.size for _, leaf in flatten(state.masters))
