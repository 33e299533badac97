"""KDA commit as one Mosaic GPU kernel for all layers of a model: a block for 32 keys of a (layer, row, head).

A commit moves little (128 KB a head) and its states lie in one pool a layer, so a launch per layer costs far more than
the bytes. Here the arrays of all layers are operands of one kernel, of which a block takes those of its own. The state
goes from device memory to registers and back; u, k and exp(g) of the tokens wait in shared memory. Keys do not depend
on one another, so the split over them changes no rounding: the result is that of decode, bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas.kda.mosaic_cluster import CHANNEL
from pallas.kda.mosaic_decode import require_supported
from pallas.kda.mosaic_layers import Addresses, Branches, Piece
from pallas.kda.mosaic_token import CHANNELS, PARAMS, ROWS, pl_ds, spread, token_starts
from pallas.kda.mosaic_verify import require_tokens
from pallas.kda.types import WINDOW, Pools, Records

MOST_LAYERS = 80
"""Layers of one launch: six addresses each, and a kernel's parameters are held to 4 KB."""
KEYS = 32
"""Keys of a block."""
WRITE, KEY, DECAY, QKVZ, STATES, WINDOWS = range(6)
OPERANDS = 6
"""Of a layer, in the kernel's order."""

TILE = plgpu.Layout.TILED(
    plgpu.Tiling(((KEYS, CHANNELS), (KEYS // 4, CHANNELS), (4,))), warp_dims=(-5,), lane_dims=(-2,), vector_dim=-1
)
"""[32, 128] of a state: a warp has eight keys, a lane four values of each, so a warp reads whole rows."""
TOKEN_KEYS = plgpu.Layout.TILED(plgpu.Tiling(((ROWS, KEYS), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
"""[4, 32]: a token a warp."""


def spread_tile(ref: Any, token: jax.Array, axis: int) -> jax.Array:
    """A token's row of shared memory along `axis` of a state tile."""
    row = plgpu.load(ref.at[token], layout=TILE.reduce(1 - axis), optimized=False)
    return spread(row, axis, (KEYS, CHANNELS), TILE)


def widened(records: Records, qkvz: jax.Array) -> tuple[Records, jax.Array]:
    """At least four tokens a row; those added are never accepted."""
    missing = max(0, ROWS - qkvz.shape[1])
    return jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)), (records, qkvz))


def read_window(of: Branches, row: jax.Array, slot: jax.Array, head: jax.Array, count: jax.Array, tokens: int) -> list:
    """The last three raw rows after `count` > 0 tokens, a channel a thread, which overwrites only what it has read."""
    kept = [jnp.minimum(count + age, WINDOW - 1) for age in range(WINDOW)]
    token = [jnp.clip(count + age - WINDOW, 0, tokens - 1) for age in range(WINDOW)]
    old = [Piece(WINDOWS, (slot, at, head), CHANNEL) for at in kept]
    new = [Piece(QKVZ, (row, at, head, pl_ds(0, 3)), CHANNEL) for at in token]
    rows = of.read(*old, *new)
    return [jnp.where(count + age < WINDOW, rows[age], rows[WINDOW + age]) for age in range(WINDOW)]


def commit_group(
    layers: Sequence[tuple[Records, jax.Array]],
    pools: Sequence[Pools],
    slot: Int32[Array, "B"],
    accepted: Int32[Array, "B"],
    interpret: Any,
) -> list[Pools]:
    """One launch over layers whose arrays have the same shapes."""
    rows, tokens, heads, _, channels = layers[0][1].shape
    layers = [widened(*layer) for layer in layers]
    depth, parts, starts = len(layers), CHANNELS // KEYS, token_starts(max(tokens, ROWS))

    choose = Addresses if interpret is None else Branches

    def body(*refs: Any, writes: Any, keys: Any, retains: Any) -> None:
        slots, counts, *operands = refs
        row = lax.axis_index("rows")
        head, part = lax.axis_index("pieces") // parts, lax.axis_index("pieces") % parts
        slot = slots[row]
        count = jnp.where(slot == 0, 0, jnp.minimum(counts[row], tokens))
        layers = [operands[OPERANDS * index : OPERANDS * (index + 1)] for index in range(depth)]
        of, mine = choose(layers, lax.axis_index("layers")), pl.ds(part * KEYS, KEYS)
        place = Piece(STATES, (slot, head, mine), TILE)
        of_keys = [
            Piece(record, (row, pl_ds(start, ROWS), head, mine), TOKEN_KEYS)
            for record in (KEY, DECAY)
            for start in starts
        ]

        @pl.when(count > 0)
        def _live() -> None:
            state, write, *rest = of.read(place, Piece(WRITE, (row, slice(None), head), CHANNEL), *of_keys)
            writes[...] = write
            for start, key, decay in zip(starts, rest, rest[len(starts) :]):
                keys[pl_ds(start, ROWS), :] = key
                retains[pl_ds(start, ROWS), :] = jnp.exp(decay)
            plgpu.commit_smem()

            def replay(token: jax.Array, state: jax.Array) -> jax.Array:
                key, retain = (spread_tile(ref, token, 0) for ref in (keys, retains))
                # As in `mosaic_token.write_token`, so that it rounds as decode does.
                return lax.optimization_barrier(state * retain) + key * spread_tile(writes, token, 1)

            of.write((place, lax.fori_loop(0, count, replay, state)))

            @pl.when(part == 0)
            def _window() -> None:
                window = read_window(of, row, slot, head, count, tokens)
                of.write(*((Piece(WINDOWS, (slot, age, head), CHANNEL), raw) for age, raw in enumerate(window)))

    refs = [Pools(jax.new_ref(pool.state_pool), jax.new_ref(pool.window_pool)) for pool in pools]
    operands = [x for (records, qkvz), pool in zip(layers, refs) for x in (*records, qkvz, *pool)]
    plgpu.kernel(
        body,
        out_type=(),
        grid=(heads * parts, rows, depth),
        grid_names=("pieces", "rows", "layers"),
        scratch_types={
            "writes": plgpu.SMEM((max(tokens, ROWS), channels), jnp.float32),
            "keys": plgpu.SMEM((max(tokens, ROWS), KEYS), jnp.float32),
            "retains": plgpu.SMEM((max(tokens, ROWS), KEYS), jnp.float32),
        },
        compiler_params=PARAMS,
        interpret=interpret,
        kernel_name="kda_commit",
    )(slot, accepted, *operands)
    return [Pools(jax.freeze(pool.state_pool), jax.freeze(pool.window_pool)) for pool in refs]


def commit_layers(
    records: Sequence[Records],
    qkvz: Sequence[Float[Array, "B W H 4 D"]],
    pools: Sequence[Pools],
    slot: Int32[Array, "B"],
    accepted: Int32[Array, "B"],
    interpret: Any = None,
) -> list[Pools]:
    """`api.commit_layers`: layers of equal shapes share launches."""
    _, tokens, _, _, channels = qkvz[0].shape
    require_supported(channels, qkvz[0].dtype)
    require_tokens("commit", tokens)
    layers, committed = list(zip(records, qkvz)), []
    for first in range(0, len(layers), MOST_LAYERS):
        group = slice(first, first + MOST_LAYERS)
        committed += commit_group(layers[group], pools[group], slot, accepted, interpret)
    return committed


def commit(
    records: Records,
    qkvz: Float[Array, "B W H 4 D"],
    state_pool: Float32[Array, "S H D D"],
    window_pool: Float[Array, "S 3 H 3 D"],
    slot: Int32[Array, "B"],
    accepted: Int32[Array, "B"],
    interpret: Any = None,
) -> Pools:
    """`api.commit`."""
    (committed,) = commit_layers([records], [qkvz], [Pools(state_pool, window_pool)], slot, accepted, interpret)
    return committed
