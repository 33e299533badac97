"""The state of running sequences: KDA states by slot, MLA latents by page. Everything is functional."""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from k3jax.config import K3Config
from pallas import kda
from pallas.dispatch import Implementation

KvCacheDtype = Literal["auto", "fp8"]
"""Of cached latents: the model's dtype, or float8_e4m3fn."""

NARROW = jnp.float8_e4m3fn
NARROW_SCALE = 0.25
"""Of latents in 8 bits, in every page: so rows are stored alike whatever shares their page, and moves with no scale.

Holds up to 112: a normalised latent of rank 512 stays below 22.6 times its largest norm weight. Values from 1/256 on
keep three bits of mantissa.
"""

Leaf = Any
"""An array, or what a transformation puts in its place: a tracer, an abstract value, a sharding."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Which cached sequence each row of a batch continues. Shapes are static, values are arrays.

    A row with `query_length` 0 is padding: it uses slot 0 and page 0 and changes nothing.
    """

    slot: Leaf
    """int32 [B]: KDA slot; slot 0 is the dummy slot."""
    page_table: Leaf
    """int32 [B, P]: MLA pages in order of position; page 0 is the dummy page."""
    length: Leaf
    """int32 [B]: tokens already in the cache."""
    query_length: Leaf
    """int32 [B]: valid tokens of this step."""
    source: Leaf = None
    """int32 [B]: where a chunk finds the state to start from, which stays as it is; None stands for `slot`."""
    boundary: Leaf = None
    """int32 [B, N]: tokens of a chunk after which its state is stored apart; None stands for no such boundaries."""
    boundary_slot: Leaf = None
    """int32 [B, N]: the slots for those states; slot 0 drops them."""

    @property
    def fresh(self) -> Bool[Array, " B"]:
        """Rows that start a sequence; whatever their slot holds is ignored."""
        return self.length == 0

    @property
    def active_slot(self) -> Int32[Array, " B"]:
        """The slot of real rows and the dummy slot for padding."""
        return jnp.where(self.query_length > 0, self.slot, 0)

    def valid(self, tokens: int) -> Bool[Array, "B T"]:
        """Which of `tokens` columns hold a token."""
        return jnp.arange(tokens, dtype=jnp.int32)[None, :] < self.query_length[:, None]

    def advance(self) -> "Rows":
        """The same rows after their tokens have been stored."""
        return dataclasses.replace(self, length=self.length + self.query_length)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class KdaCache:
    """Recurrent states and convolution windows of one KDA layer, by slot."""

    state: Leaf
    """float32 [slots, H, D, D]: key by value."""
    window: Leaf
    """[slots, 3, H, 3, D]: last three raw q, k, v rows, oldest first."""

    def read(self, rows: Rows) -> "KdaCache":
        """State and window of each row; zeros for rows that start a sequence."""
        source = rows.active_slot if rows.source is None else rows.source

        def take(pool: Array) -> Array:
            values = pool[source]
            fresh = rows.fresh.reshape(-1, *[1] * (pool.ndim - 1))
            return jnp.where(fresh, jnp.zeros((), pool.dtype), values)

        return KdaCache(take(self.state), take(self.window))

    def write(self, rows: Rows, new: kda.Prefill) -> "KdaCache":
        """The pools with each row's state and window stored, and those at its boundaries; padding stores nothing.

        Donates the pools.
        """
        stored = self._put(rows.active_slot, new.state, new.window)
        if rows.boundary_slot is None:
            return stored
        assert new.boundary_states is not None
        assert new.boundary_windows is not None
        for n in range(rows.boundary_slot.shape[1]):
            slot = rows.boundary_slot[:, n]
            stored = stored._put(slot, new.boundary_states[:, n], new.boundary_windows[:, n])
        return stored

    def _put(self, slot: Int32[Array, " B"], state: Array, window: Array) -> "KdaCache":
        place = jnp.where(slot > 0, slot, self.state.shape[0])

        def put(pool: Array, values: Array) -> Array:
            return pool.at[place].set(values.astype(pool.dtype), mode="drop")

        return KdaCache(put(self.state, state), put(self.window, window))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class KdaSpeculative:
    """A KDA layer that a step reads and does not write: what its tokens would change waits in `pending`."""

    state: Leaf
    window: Leaf
    pending: tuple[kda.Records, Leaf] | None = None
    """Records of `kda.verify` and the raw projections of the tokens; None before the step."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class MlaCache:
    """Latent rows of one MLA layer, by page."""

    latent: Leaf
    """[pages, page, L]: normalised latent and raw shared key."""

    @property
    def page_scale(self) -> Float32[Array, " pages"] | None:
        """What stored values are multiplied by, for each page; None where they are as they were."""
        return jnp.full(self.latent.shape[0], NARROW_SCALE) if self.latent.dtype == NARROW else None


LayerCache = KdaCache | KdaSpeculative | MlaCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class K3Cache:
    """One entry per layer of the model. Every operation returns a new cache and donates the old one."""

    layers: tuple[LayerCache, ...]

    @property
    def capacity(self) -> tuple[int, int, int]:
        """(slots, pages, page size), dummies included; 0 where the model has no such layer."""
        slots = next((entry.state.shape[0] for entry in self.layers if isinstance(entry, KdaCache)), 0)
        pages, page = next((entry.latent.shape[:2] for entry in self.layers if isinstance(entry, MlaCache)), (0, 0))
        return slots, pages, page

    def speculative(self) -> "K3Cache":
        """The same pools, for a step whose tokens may be rejected: see `commit`."""

        def protect(entry: LayerCache) -> LayerCache:
            return KdaSpeculative(entry.state, entry.window) if isinstance(entry, KdaCache) else entry

        return K3Cache(tuple(map(protect, self.layers)))

    def commit(self, rows: Rows, accepted: Int32[Array, " B"], implementation: Implementation = None) -> "K3Cache":
        """The cache with the first `accepted` tokens of each row's speculative step. Donates the pools.

        Latent rows need nothing: those behind a row's length are overwritten before they are seen.
        """
        waiting = [entry for entry in self.layers if isinstance(entry, KdaSpeculative)]
        if not waiting:
            return self
        records, qkvz = zip(*(entry.pending for entry in waiting if entry.pending is not None), strict=True)
        pools = [kda.Pools(entry.state, entry.window) for entry in waiting]
        # All layers in one op: a launch each would cost more than what they move.
        committed = iter(
            kda.commit_layers(records, qkvz, pools, rows.active_slot, accepted, implementation=implementation)
        )
        return K3Cache(
            tuple(KdaCache(*next(committed)) if isinstance(entry, KdaSpeculative) else entry for entry in self.layers)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


def latent_dtype(kind: str, dtype: Any) -> Any:
    """The dtype of cached latents in a model of `dtype`; raises ValueError for an unknown kind."""
    if kind not in get_args(KvCacheDtype):
        raise ValueError(f"kv_cache_dtype is {kind!r}, expected one of {', '.join(get_args(KvCacheDtype))}")
    return NARROW if kind == "fp8" else dtype


def layer_cache(
    config: K3Config,
    layer: int,
    slots: int,
    pages: int,
    page_size: int,
    dtype: Any,
    kv_cache_dtype: KvCacheDtype = "auto",
) -> LayerCache:
    """A zeroed entry for `layer`."""
    if config.is_mla(layer):
        return MlaCache(jnp.zeros((pages, page_size, config.mla.latent_width), latent_dtype(kv_cache_dtype, dtype)))
    heads, dim = config.kda.num_heads, config.kda.head_dim
    window = (slots, config.kda.conv_kernel_size - 1, heads, 3, dim)
    return KdaCache(jnp.zeros((slots, heads, dim, dim), jnp.float32), jnp.zeros(window, dtype))


def create(
    config: K3Config,
    *,
    slots: int,
    pages: int,
    page_size: int,
    dtype: Any = jnp.bfloat16,
    kv_cache_dtype: KvCacheDtype = "auto",
) -> K3Cache:
    """Zeroed pools for `slots` states and `pages` pages of `page_size` tokens, dummies included."""
    for name, value, least in (("slots", slots, 2), ("pages", pages, 2), ("page_size", page_size, 1)):
        if value < least:
            raise ValueError(f"{name} is {value}, expected at least {least} (number 0 is the dummy)")
    sizes = slots, pages, page_size, dtype, kv_cache_dtype
    return K3Cache(tuple(layer_cache(config, layer, *sizes) for layer in range(config.num_layers)))
