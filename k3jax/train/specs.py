"""What is trained: the model's parameters with dense experts, and how each one is seen by the optimizer."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from k3jax.config import K3Config
from k3jax.params import ParamSpec, Tree, flatten, model_specs
from k3jax.train.quantize import fake_quantize, pack
from pallas.moe import dequantize

Group = Literal["muon", "adam", "decayed_adam", "balanced"]

_STACKED = {"qkvz": 2, "f_b": 1, "q_up": 1, "key_up": 1, "value_up": 1, "gate": 1}
"""Leading axes that number heads (and streams): each head's block is orthogonalised on its own."""

_WHOLE = ("f_a", "in_proj", "out", "latent_down", "latent_up", "down")
_DECAYED = ("embedding", "head", "router", "beta")

_CONV_STD = 0.29
"""Standard deviation of the uniform(-1/2, 1/2) draw that is usual for four-tap depthwise convolutions."""


@dataclasses.dataclass(frozen=True, slots=True)
class Matrices:
    """A parameter as `stack` leading axes of matrices, the rest flattened to rows x columns at `split` rows."""

    stack: int
    rows: tuple[int, ...] = ()
    """Row counts of the projections that are stored as one array; empty for one matrix."""


def training_specs(config: K3Config) -> Tree:
    """`model_specs` with the routed experts as dense arrays."""
    specs = model_specs(config)
    moe = config.moe
    up, down = ("experts", None, "expert_ffn", "latent"), ("experts", "latent", "expert_ffn")
    for layer in config.moe_layers:
        specs["layers"][str(layer)]["ffn"]["experts"] = {
            "gate_up": ParamSpec(
                (moe.num_experts, 2, moe.intermediate_size, moe.latent_size), "model", up, "normal", ()
            ),
            "down": ParamSpec((moe.num_experts, moe.latent_size, moe.intermediate_size), "model", down, "normal", ()),
        }
    return specs


def matrices(path: tuple[str, ...], spec: ParamSpec) -> Matrices | None:
    """How Muon sees a parameter; None when it is not a matrix or belongs to AdamW."""
    name, expert = path[-1], "experts" in path
    if name in _STACKED:
        return Matrices(_STACKED[name])
    if name == "gate_up":
        return Matrices(2 if expert else 1)
    if name == "down" and expert:
        return Matrices(1)
    if name == "in_proj":  # the query and the key-value compression are two projections
        return Matrices(0, tuple(piece.shape[0] for piece in spec.pieces))
    return Matrices(0) if name in _WHOLE else None


def group(path: tuple[str, ...], spec: ParamSpec) -> Group:
    """The optimizer of a parameter; `balanced` ones are set by Quantile Balancing."""
    if path[-1] == "correction_bias":
        return "balanced"
    if matrices(path, spec) is not None:
        return "muon"
    return "decayed_adam" if path[-1] in _DECAYED else "adam"


def initialize(config: K3Config, key: jax.Array) -> Tree:
    """float32 master parameters."""
    specs = training_specs(config)
    keys = iter(jax.random.split(key, sum(1 for _ in flatten(specs))))

    def draw(path: tuple[str, ...], spec: ParamSpec) -> jax.Array:
        key = next(keys)
        if spec.init == "dt_bias":
            low, high = jnp.log(1e-3), jnp.log(1e-1)
            step = jnp.exp(jax.random.uniform(key, spec.shape, jnp.float32, low, high))
            return step + jnp.log(-jnp.expm1(-step))
        if spec.init == "normal":
            std = _CONV_STD if path[-1] == "conv" else config.initializer_range
            return jax.random.normal(key, spec.shape, jnp.float32) * std
        return jnp.full(spec.shape, 1.0 if spec.init == "ones" else 0.0, jnp.float32)

    return _map_with_path(draw, specs)


def compute_parameters(specs: Tree, masters: Tree, dtype: Any) -> Tree:
    """What the forward pass uses: experts rounded to MXFP4, then `dtype`; float32 parameters as they are."""

    def convert(path: tuple[str, ...], spec: ParamSpec) -> jax.Array:
        master = _at(masters, path)
        if "experts" in path:
            return fake_quantize(master).astype(dtype)
        return master.astype(spec.array_dtype(dtype))

    return _map_with_path(convert, specs)


def packed_parameters(config: K3Config, masters: Tree) -> Tree:
    """The tree of `params.model_specs`, bfloat16 with packed experts: what is shipped."""

    def pack_experts(experts: Tree) -> Tree:
        packed = {name: pack(array) for name, array in experts.items()}
        return {
            f"{name}_{part}": value[i] for name, value in packed.items() for i, part in enumerate(("packed", "scale"))
        }

    def convert(path: tuple[str, ...], spec: ParamSpec) -> jax.Array:
        if "experts" in path:
            return pack_experts(_at(masters, path[:-1]))[path[-1]]
        return _at(masters, path).astype(spec.array_dtype(jnp.bfloat16))

    return _map_with_path(convert, model_specs(config))


def master_parameters(config: K3Config, packed: Tree) -> Tree:
    """float32 masters with the values of a checkpoint's tree (packed experts): exporting them gives it back."""

    def convert(path: tuple[str, ...], spec: ParamSpec) -> jax.Array:
        if "experts" in path:
            experts = _at(packed, path[:-1])
            return dequantize(experts[f"{path[-1]}_packed"], experts[f"{path[-1]}_scale"])
        return _at(packed, path).astype(jnp.float32)

    return _map_with_path(convert, training_specs(config))


def dense_parameters(config: K3Config, packed: Tree, dtype: Any) -> Tree:
    """A checkpoint's tree with decoded experts: faster for large batches, the same values in bfloat16 and wider."""
    return compute_parameters(training_specs(config), master_parameters(config, packed), dtype)


def parameter_count(specs: Tree) -> int:
    """Number of values, a packed code counting as one."""
    return sum(math.prod(spec.shape) for _, spec in flatten(specs))


def labels(specs: Tree) -> Tree:
    """The `Group` of every parameter, as a tree."""
    return _map_with_path(group, specs)


def matrix_views(specs: Tree) -> dict[tuple[str, ...], Matrices]:
    """The `Matrices` of every Muon parameter."""
    views = ((path, matrices(path, spec)) for path, spec in flatten(specs))
    return {path: view for path, view in views if view is not None}


def _at(tree: Tree, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _map_with_path(function: Any, specs: Tree) -> Tree:
    leaves = {path: function(path, spec) for path, spec in flatten(specs)}
    return nest(leaves)


def nest(leaves: dict[tuple[str, ...], Any]) -> Tree:
    """The nested dict with these leaves, the inverse of `params.flatten`."""
    tree: Tree = {}
    for path, value in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree
