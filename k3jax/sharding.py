"""Meshes and the one place where logical axes meet mesh axes.

Parameters name their axes logically (`params.py`); a preset says which mesh axis splits which logical
axis. A dimension that its mesh axis does not divide stays whole.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from k3jax.cache import K3Cache, KdaCache, LayerCache, MlaCache
from k3jax.params import ParamSpec, Tree, map_tree


class ShardingError(ValueError):
    """A mesh, preset or rule that cannot be used."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Mesh axis of each logical axis; None keeps the axis whole on every device."""

    vocab: str | None = None
    embed: str | None = None
    embed_out: str | None = None
    heads: str | None = None
    kda_heads: str | None = None
    ffn: str | None = None
    experts: str | None = None
    expert_ffn: str | None = None
    latent: str | None = None

    def partition(self, axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
        """The partition of an array with these logical axes.

        Raises `ShardingError` when two of its axes would be split by the same mesh axis.
        """
        names: list[str | None] = []
        for axis, size in zip(axes, shape, strict=True):
            name = None if axis is None else getattr(self, axis)
            if name is not None and name in names:
                raise ShardingError(f"axes {tuple(axes)} would be split twice by mesh axis {name!r}; give one None")
            names.append(name if name is not None and size % mesh.shape[name] == 0 else None)
        return PartitionSpec(*names)


@dataclasses.dataclass(frozen=True, slots=True)
class Preset:
    """Mesh shape by axis name, and the rules on it."""

    mesh: tuple[tuple[str, int], ...]
    rules: Rules


_TENSOR = Rules(
    vocab="tensor", embed_out="tensor", heads="tensor", kda_heads="tensor", ffn="tensor", expert_ffn="tensor"
)

PRESETS: Mapping[str, Preset] = {
    "single": Preset((("tensor", 1),), Rules()),
    "tp2": Preset((("tensor", 2),), _TENSOR),
    "tp8": Preset((("tensor", 8),), _TENSOR),
    # Tokens are split over the same axis as the experts: see `k3jax.layers.moe.expert_parallel`.
    "dep8": Preset((("expert", 8),), Rules(experts="expert")),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """A mesh with its rules; places parameters and caches."""

    mesh: Mesh | AbstractMesh
    """Of devices, or of none: then sizes can be told and nothing placed."""
    rules: Rules

    def sharding(self, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        """Where an array with these logical axes lives."""
        return NamedSharding(self.mesh, self.rules.partition(axes, shape, self.mesh))

    def parameters(self, specs: Tree) -> Tree:
        """The shardings of a tree of `ParamSpec`."""

        def place(spec: ParamSpec) -> NamedSharding:
            return self.sharding(spec.axes, spec.shape)

        return map_tree(place, specs)

    def cache(self, cache: K3Cache) -> K3Cache:
        """The shardings of a cache (arrays or abstract values): states by head, latents whole."""
        return K3Cache(tuple(self._entry(entry) for entry in cache.layers))

    def _entry(self, entry: LayerCache) -> LayerCache:
        if isinstance(entry, MlaCache):
            return MlaCache(self._place((None,) * 3, entry.latent))
        return KdaCache(
            self._place((None, "kda_heads", None, None), entry.state),
            self._place((None, None, "kda_heads", None, None), entry.window),
        )

    def _place(self, axes: tuple[str | None, ...], array: Any) -> Any:
        return self.sharding(axes, array.shape)

    @property
    def replicated(self) -> NamedSharding:
        """A whole copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())


def layout(preset: str, devices: Sequence[Any] | None = None) -> Layout:
    """The mesh of `preset` on the first `devices` (default: all that JAX sees).

    Raises `ShardingError` for an unknown preset or too few devices.
    """
    if preset not in PRESETS:
        raise ShardingError(f"mesh preset {preset!r} is unknown, expected one of {', '.join(PRESETS)}")
    names, sizes = zip(*PRESETS[preset].mesh, strict=True)
    available = list(jax.devices() if devices is None else devices)
    needed = 1
    for size in sizes:
        needed *= size
    if len(available) < needed:
        raise ShardingError(f"mesh preset {preset!r} needs {needed} devices, {len(available)} are visible")
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=available[:needed])
    return Layout(mesh, PRESETS[preset].rules)
