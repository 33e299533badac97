"""A larger draft that starts as a smaller one: what it has more of adds nothing at first."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from k3jax.dspark.config import DraftGqa, DSparkConfig
from k3jax.params import Tree, flatten
from k3jax.train.specs import nest


def misfits(small: DSparkConfig, large: DSparkConfig) -> list[str]:
    """Why a draft cannot grow from one shape to the other, one sentence each."""
    free = ("num_layers", "attention", "target_layer_ids")
    names = [name for name in small.__dataclass_fields__ if name not in free]
    pairs = [(name, getattr(small, name), getattr(large, name)) for name in names]
    problems = [f"{name} is {a}, expected {b}" for name, a, b in pairs if a != b]
    kinds = small.attention, large.attention
    if not all(isinstance(kind, DraftGqa) for kind in kinds):
        return [*problems, "only drafts with grouped-query attention grow"]
    problems += [
        f"{name} is {before}, expected {relation} {after}"
        for name, before, after, fits, relation in _relations(small, large)
        if not fits
    ]
    return problems


def _relations(small: DSparkConfig, large: DSparkConfig) -> list[tuple[str, Any, Any, bool, str]]:
    a, b = small.attention, large.attention
    assert isinstance(a, DraftGqa)
    assert isinstance(b, DraftGqa)
    layers, taps = (small.num_layers, large.num_layers), (len(small.target_layer_ids), len(large.target_layer_ids))
    return [
        ("num_layers", *layers, layers[0] <= layers[1], "at most"),
        ("number of taps", *taps, taps[0] <= taps[1], "at most"),
        ("num_heads", a.num_heads, b.num_heads, a.num_heads == b.num_heads, "exactly"),
        ("head_dim", a.head_dim, b.head_dim, a.head_dim == b.head_dim, "exactly"),
        ("num_kv_heads", a.num_kv_heads, b.num_kv_heads, b.num_kv_heads % a.num_kv_heads == 0, "a divisor of"),
    ]


def grow(small: DSparkConfig, parameters: Tree, large: DSparkConfig, fresh: Tree) -> Tree:
    """Parameters of shape `large` that compute what `parameters` do, if the taps are the same.

    New layers have random weights but for those that write to the stream, which are zero; key and value heads are
    repeated; the i-th tap is read like the i-th one of before, and further taps not at all. Raises `ValueError` for
    shapes that do not grow into each other.
    """
    if problems := misfits(small, large):
        raise ValueError("the draft cannot grow: " + "; ".join(problems))
    assert isinstance(small.attention, DraftGqa)
    assert isinstance(large.attention, DraftGqa)
    old = dict(flatten(parameters))
    copies = large.attention.num_kv_heads // small.attention.num_kv_heads

    def start(path: tuple[str, ...], new: Array) -> Array:
        if path not in old:
            return jnp.zeros_like(new) if path[-1] in ("out", "down") else new
        if path[-1] in ("k", "v"):
            return jnp.repeat(old[path], copies, axis=0)
        if path[-1] == "context_proj":
            return jnp.zeros_like(new).at[:, : old[path].shape[1]].set(old[path])
        return old[path]

    return nest({path: start(path, leaf) for path, leaf in flatten(fresh)})
