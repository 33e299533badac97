"""How much memory a model and its caches take on each device, and what fits: from shapes alone, nothing is allocated.

    weights       every parameter, divided as the mesh preset says
    slot          state and convolution window of all KDA layers: one per running request and per kept state
    page          latents of all MLA layers for `page_size` tokens, and a draft's rows of the same tokens
    row           what sampling keeps per running request: tokens seen, biases and masks over the vocabulary

A decode step reads the weights that its tokens need, and each request's state (and writes it back) and latents:

    seconds >= (dense + routed * (1 - (1 - k / E)^rows) + rows * (2 * slot + context * latents)) / bandwidth
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from k3jax import sharding
from k3jax.cache import KvCacheDtype, create
from k3jax.config import K3Config
from k3jax.dspark import quantized
from k3jax.dspark.config import DSparkConfig
from k3jax.dspark.tensors import draft_specs
from k3jax.logit_rules import mask_words
from k3jax.params import ParamSpec, flatten, map_tree, model_specs


class CapacityError(ValueError):
    """Something that does not fit."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator."""

    memory: int
    """Bytes."""
    bandwidth: int | float
    """Bytes a second."""


DEVICES = {
    "h200": Device(memory=150_109_880_320, bandwidth=4.814e12),
    "b200": Device(memory=191_000_000_000, bandwidth=8e12),
    "gb300": Device(memory=298_000_000_000, bandwidth=8e12),
}
"""Sizes of the target descriptions that programs are compiled for."""

ROW_BIASES = 300
"""Biases of a row, 8 bytes each."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes on each device."""

    devices: int
    weights: int
    """All of them, the draft's included."""
    routed: int
    """The part of the weights that are routed experts."""
    embedding: int
    """The part of which a step reads single rows."""
    touched: float
    """Part of the routed experts that one token needs."""
    slot: int
    page: int
    page_size: int
    row: int

    @property
    def token(self) -> float:
        """Bytes of a cached token's latents and draft rows."""
        return self.page / self.page_size

    def pools(self, pages: int, slots: int) -> int:
        """Bytes of both pools; `pages` and `slots` count the dummies."""
        return pages * self.page + slots * self.slot

    def request(self, context: int, states: int | float = 1) -> int | float:
        """Bytes of a running request at `context` tokens, with its own state and those that are kept of it."""
        return self.row + states * self.slot + -(-context // self.page_size) * self.page

    def decode_seconds(self, device: Device, rows: int, context: int) -> float:
        """Least time of a decode step, from bytes over bandwidth; transfers between devices take no time here."""
        dense = self.weights - self.routed - self.embedding
        experts = self.routed * (1 - (1 - self.touched) ** rows)
        return (dense + experts + rows * (2 * self.slot + context * self.token)) / device.bandwidth


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Members of the two pools, dummies included."""

    pages: int
    slots: int


def abstract_layout(preset: str) -> sharding.Layout:
    """The layout of a mesh preset without any device; `tpN` is known for every N.

    Raises `ShardingError` for an unknown preset.
    """
    known = sharding.PRESETS.get(preset)
    if known is None and preset.startswith("tp") and preset[2:].isdecimal() and int(preset[2:]) > 0:
        known = sharding.Preset((("tensor", int(preset[2:])),), sharding.PRESETS["tp8"].rules)
    if known is None:
        raise sharding.ShardingError(
            f"mesh preset {preset!r} is unknown, expected tpN or one of {', '.join(sharding.PRESETS)}"
        )
    names, sizes = zip(*known.mesh, strict=True)
    return sharding.Layout(AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes)), known.rules)


@functools.lru_cache(maxsize=32)
def footprint(
    config: K3Config,
    *,
    layout: sharding.Layout | None = None,
    dtype: Any = jnp.bfloat16,
    page_size: int = 64,
    draft: DSparkConfig | None = None,
    draft_weights: Literal["model", "int8"] = "model",
    kv_cache_dtype: KvCacheDtype = "auto",
) -> Footprint:
    """Bytes per device of `config` in `dtype`; None is one device. A draft lies whole on every device.

    In 8 bits it has a copy of the target's head on one device, as `api.load_draft` makes it.
    """
    layout = layout or abstract_layout("single")
    specs = model_specs(config)
    places = dict(flatten(layout.parameters(specs)))
    weights = {path: _parameter(spec, places[path], dtype) for path, spec in flatten(specs)}
    settings = {"page_size": page_size, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    least = _cache(config, layout, 2, 2, **settings)
    one_more_slot, one_more_page = _cache(config, layout, 3, 2, **settings), _cache(config, layout, 2, 3, **settings)
    item = jnp.dtype(dtype).itemsize
    row_width = 0 if draft is None else draft.num_layers * draft.attention.row_width
    count = math.prod(layout.mesh.shape.values())
    own = 0 if draft is None else _draft_bytes(draft, dtype, draft_weights, specs["head"] if count == 1 else None)
    # A mask for the next token, and with a draft one for each place of a block.
    masks = 1 if draft is None else draft.block_size + 2
    return Footprint(
        devices=count,
        weights=sum(weights.values()) + own,
        routed=sum(size for path, size in weights.items() if "experts" in path),
        embedding=weights["embedding",],
        touched=config.moe.num_experts_per_token / config.moe.num_experts,
        slot=one_more_slot - least,
        page=one_more_page - least + page_size * row_width * item,
        page_size=page_size,
        row=5 * config.vocab_size + 4 * masks * mask_words(config.vocab_size) + 8 * ROW_BIASES,
    )


def _draft_bytes(draft: DSparkConfig, dtype: Any, weights: str, head: ParamSpec | None) -> int:
    """Bytes of a draft's arrays; `head` is the target's, where it keeps a copy of it in 8 bits."""

    def shape(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, spec.array_dtype(dtype))

    tree = map_tree(shape, draft_specs(draft))
    if weights == "int8":
        tree = jax.eval_shape(quantized.quantize, tree, None if head is None else shape(head))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _parameter(spec: ParamSpec, place: NamedSharding, dtype: Any) -> int:
    local = place.shard_shape(spec.shape)
    return math.prod(local) * spec.array_dtype(dtype).itemsize


def _cache(config: K3Config, layout: sharding.Layout, slots: int, pages: int, **settings: Any) -> int:
    """Bytes per device of pools of that many members."""
    shapes = jax.eval_shape(lambda: create(config, slots=slots, pages=pages, **settings))
    places = layout.cache(shapes)

    def local(shape: jax.ShapeDtypeStruct, place: Any) -> int:
        return math.prod(place.shard_shape(shape.shape)) * np.dtype(shape.dtype).itemsize

    return sum(jax.tree.leaves(jax.tree.map(local, shapes, places)))


def divide(sizes: Footprint, budget: int | float, state_fraction: int | float) -> Pools:
    """Pools that together take `budget` bytes per device, `state_fraction` of them for states.

    Raises `CapacityError` if there is not even room for one page and one state.
    """
    pages = int(budget * (1 - state_fraction) // sizes.page)
    slots = int(budget * state_fraction // sizes.slot)
    if pages < 2 or slots < 2:
        raise CapacityError(
            f"{budget / 2**30:.2f} GiB per device hold {max(pages, 0)} pages and {max(slots, 0)} states, expected at "
            "least 2 of each (number 0 is the dummy); use more devices, or give less to weights and workspace"
        )
    return Pools(pages=pages, slots=slots)


def fit(sizes: Footprint, budget: int | float, context: int, states: int | float) -> tuple[int, Pools]:
    """Requests of `context` tokens with `states` states each that `budget` bytes hold, and pools for just those."""
    dummies = sizes.pools(1, 1)
    requests = max(0, int((budget - dummies) // sizes.request(context, states)))
    pages = requests * -(-context // sizes.page_size)
    return requests, Pools(pages=pages + 1, slots=int(requests * states) + 1)
