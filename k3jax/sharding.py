"""Meshes and the one place where logical axes meet mesh axes.

Parameters name their axes logically (`params.py`); a preset says which mesh axis splits which logical
axis. A dimension that its mesh axis does not divide stays whole. The model runs inside `jax.shard_map` with these
partitions, so that kernels see one device's part: `sharding_local.py` has what happens between devices.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from k3jax.cache import K3Cache, KdaCache, KdaSpeculative, LayerCache, MlaCache
from k3jax.params import ParamSpec, Tree
from pallas import collectives, kda

NOTES = logging.getLogger("k3jax.sharding")
"""Gets the notes on meshes whose sums could be faster."""

Sums = Literal["auto", "nccl", "one-hop"]
"""How a preset adds up a few rows over its devices: see `Preset.sums`."""


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
    sums: Sums = "nccl"
    """Of a few rows. nccl: by the runtime; one-hop: through inboxes of our own, which takes GPUs that reach one
    another's memory; auto: in one hop where trial sums of these devices come out right, else by the runtime."""


_TENSOR = Rules(
    vocab="tensor", embed_out="tensor", heads="tensor", kda_heads="tensor", ffn="tensor", expert_ffn="tensor"
)

PRESETS: Mapping[str, Preset] = {
    "single": Preset((("tensor", 1),), Rules()),
    **{f"tp{devices}": Preset((("tensor", devices),), _TENSOR, "auto") for devices in (2, 4, 8)},
    "tp16": Preset((("tensor", 16),), _TENSOR),
    # Long chunks are split by token over the same axis as the experts, and tokens travel to their experts and back.
    "dep8": Preset((("expert", 8),), Rules(experts="expert")),
    **{f"tp{n}-{sums}": Preset((("tensor", n),), _TENSOR, sums) for sums in ("nccl", "one-hop") for n in (2, 4, 8)},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """A mesh with its rules; places parameters and caches."""

    mesh: Mesh | AbstractMesh
    """Of devices, or of none: then sizes can be told and nothing placed."""
    rules: Rules
    inboxes: collectives.Inboxes | None = None
    """Of the mesh's devices, for sums of a few rows in one hop; without them the runtime adds up."""

    def sharding(self, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        """Where an array with these logical axes lives."""
        return NamedSharding(self.mesh, self.rules.partition(axes, shape, self.mesh))

    def parameters(self, specs: Tree) -> Tree:
        """The shardings of a tree of `ParamSpec`."""

        def place(tree: Tree) -> Tree:
            return {
                key: place(value) if isinstance(value, dict) else NamedSharding(self.mesh, value)
                for key, value in tree.items()
            }

        return place(self.partitions(specs))

    def partitions(self, specs: Tree) -> Tree:
        """The partitions of a tree of `ParamSpec`.

        Parameters of one dict that share a logical axis are split along it together or not at all: codes and scales of
        an expert have different lengths, of which the mesh may divide one alone.
        """
        own = [spec for spec in specs.values() if isinstance(spec, ParamSpec)]
        whole: dict[str, None] = {}
        for spec in own:
            for axis, part in zip(spec.axes, self.rules.partition(spec.axes, spec.shape, self.mesh), strict=True):
                if axis is not None and part is None:
                    whole[axis] = None
        rules = dataclasses.replace(self.rules, **whole)
        return {
            key: rules.partition(value.axes, value.shape, self.mesh)
            if isinstance(value, ParamSpec)
            else self.partitions(value)
            for key, value in specs.items()
        }

    def cache(self, cache: K3Cache) -> K3Cache:
        """The shardings of a cache (arrays or abstract values): states by head, latents whole."""
        return jax.tree.map(lambda part: NamedSharding(self.mesh, part), self.cache_partitions(cache))

    def cache_partitions(self, cache: K3Cache, *, pending: bool = False) -> K3Cache:
        """The partitions of a cache; `pending`: after a speculative step, with what waits to be committed."""
        return K3Cache(tuple(self._entry(entry, pending) for entry in cache.layers))

    def _entry(self, entry: LayerCache, pending: bool) -> LayerCache:
        if isinstance(entry, MlaCache):
            return MlaCache(PartitionSpec())
        heads = self.rules.partition((None, "kda_heads", None, None), entry.state.shape, self.mesh)[1]
        pools = PartitionSpec(None, heads), PartitionSpec(None, None, heads)
        if isinstance(entry, KdaCache):
            return KdaCache(*pools)
        by_head = PartitionSpec(None, None, heads)
        records = kda.Records(*[by_head] * len(kda.Records._fields))
        return KdaSpeculative(*pools, (records, by_head) if pending else None)

    def on_devices(self, function: Callable[..., Any], before: tuple[Any, ...], after: Any) -> Callable[..., Any]:
        """`function` on every device's part of its arguments, which `before` divides; `after` puts results together.

        Both are trees of `PartitionSpec`. What `after` calls whole must be equal on all devices.
        """
        return jax.shard_map(function, mesh=self.mesh, in_specs=before, out_specs=after, check_vma=False)

    @property
    def axis(self) -> str:
        """The mesh axis that the residual stream may be split over."""
        return self.mesh.axis_names[0]

    @property
    def replicated(self) -> NamedSharding:
        """A whole copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())


def layout(preset: str, devices: Sequence[Any] | None = None) -> Layout:
    """The mesh of `preset` on the first `devices` (default: all that JAX sees).

    On GPUs tp2, tp4 and tp8 try sums in one hop, once in a process, and note why they are not used where they are not.
    Raises `ShardingError` for an unknown preset, too few devices or devices that do not fit it, and
    `collectives.StuckError` where that trial leaves GPUs of no use.
    """
    if preset not in PRESETS:
        raise ShardingError(f"mesh preset {preset!r} is unknown, expected one of {', '.join(PRESETS)}")
    chosen = PRESETS[preset]
    names, sizes = zip(*chosen.mesh, strict=True)
    available = list(jax.devices() if devices is None else devices)
    needed = 1
    for size in sizes:
        needed *= size
    if len(available) < needed:
        raise ShardingError(f"mesh preset {preset!r} needs {needed} devices, {len(available)} are visible")
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=available[:needed])
    return Layout(mesh, chosen.rules, None if chosen.sums == "nccl" else _inboxes(preset, chosen.sums, mesh))


def _inboxes(preset: str, sums: Sums, mesh: Mesh) -> collectives.Inboxes | None:
    """For sums in one hop where they are right on these devices; else None, unless they were asked for by name."""
    plain = preset.removesuffix("-one-hop")
    try:
        group = collectives.proved(mesh)
    except collectives.StuckError as error:
        raise collectives.StuckError(f"mesh preset {preset!r}: {error}; start anew with {plain}-nccl") from error
    if isinstance(group, collectives.Inboxes):
        return group
    if sums == "one-hop":
        raise ShardingError(f"mesh preset {preset!r} does not fit these devices: {group}; use {plain}") from group
    if jax.default_backend() == "gpu":
        NOTES.warning("note mesh %s: sums are NCCL's, which are slower than in one hop: %s", preset, group)
    return None
