"""The KDA ops. Each is its own `jax.jit`, so a model that calls one 69 times traces and compiles it once.

`qkvz` holds a head's raw projections side by side (query, key, value before the convolution, output-gate logits), so a
token of a head is one contiguous block and tensor parallelism splits the head axis. States are float32 [key, value].
`implementation`: None (best for the device), "xla" or "mosaic"; a named one never falls back.
"""

from collections.abc import Sequence
from functools import partial

import jax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas.dispatch import Implementation, select
from pallas.kda import mosaic, reference, xla
from pallas.kda.types import Affine, Decode, KdaWeights, Pools, Prefill, Records, Verify

LOWEST_BOUND = -8.0
"""Sixteen tokens at the bound, seen from the middle of their tile, must stay finite in float32 gradients too."""


def check_bound(lower_bound: float) -> None:
    """Raises `ValueError` unless the decay bound is one that the chunked form can represent."""
    if not LOWEST_BOUND <= lower_bound < 0:
        raise ValueError(f"kda: lower_bound is {lower_bound}, expected a value in [{LOWEST_BOUND}, 0); K3 uses -5.0")


@partial(jax.jit, static_argnames=("lower_bound", "norm_eps", "implementation"))
def prefill(
    qkvz: Float[Array, "B T H 4 D"],
    decay_logits: Float[Array, "B T H D"],
    beta_logits: Float[Array, "B T H"],
    weights: KdaWeights,
    state: Float32[Array, "B H D D"],
    window: Float[Array, "B 3 H 3 D"],
    length: Int32[Array, "B"],
    *,
    boundaries: Int32[Array, "B N"] | None = None,
    lower_bound: float = -5.0,
    norm_eps: float = 1e-5,
    implementation: Implementation = None,
) -> Prefill:
    """Many tokens per row from a given state, in chunks.

    `window` holds the three raw rows before the call, oldest first; the first `length` tokens of a row are valid, the
    rest change nothing and get output 0. `boundaries` asks for the state and window after that many tokens of this
    call (0: as given; beyond `length`: final).
    """
    check_bound(lower_bound)
    args = (qkvz, decay_logits, beta_logits, weights, state, window, length, boundaries, lower_bound, norm_eps)
    return select(implementation, mosaic=mosaic.prefill, xla=xla.prefill)(*args)


@partial(jax.jit, static_argnames=("lower_bound", "norm_eps", "implementation"))
def prefill_packed(
    qkvz: Float[Array, "T H 4 D"],
    decay_logits: Float[Array, "T H D"],
    beta_logits: Float[Array, "T H"],
    weights: KdaWeights,
    state: Float32[Array, "R H D D"],
    window: Float[Array, "R 3 H 3 D"],
    start: Int32[Array, "R"],
    length: Int32[Array, "R"],
    *,
    lower_bound: float = -5.0,
    norm_eps: float = 1e-5,
    implementation: Implementation = None,
) -> Prefill:
    """`prefill` of rows of different lengths that lie one after another, without boundaries and gradients.

    Row r's tokens are `start[r]` to `start[r] + length[r]`; starts ascend from 0 in multiples of 64, which is what a
    row's last block is filled up to. What lies between rows changes nothing and gets output 0.
    """
    check_bound(lower_bound)
    args = (qkvz, decay_logits, beta_logits, weights, state, window, start, length, lower_bound, norm_eps)
    return select(implementation, mosaic=mosaic.prefill_packed, xla=xla.prefill_packed)(*args)


@partial(jax.jit, static_argnames=("lower_bound", "norm_eps"))
def recurrent(
    qkvz: Float[Array, "B T H 4 D"],
    decay_logits: Float[Array, "B T H D"],
    beta_logits: Float[Array, "B T H"],
    weights: KdaWeights,
    state: Float32[Array, "B H D D"],
    window: Float[Array, "B 3 H 3 D"],
    length: Int32[Array, "B"],
    *,
    boundaries: Int32[Array, "B N"] | None = None,
    lower_bound: float = -5.0,
    norm_eps: float = 1e-5,
) -> Prefill:
    """`prefill` token by token: the definition, slow."""
    return reference.recurrent(
        qkvz, decay_logits, beta_logits, weights, state, window, length, boundaries, lower_bound, norm_eps
    )


@partial(jax.jit, static_argnames=("lower_bound", "norm_eps", "implementation"))
def decode(
    qkvz: Float[Array, "B H 4 D"],
    decay_logits: Float[Array, "B H D"],
    beta_logits: Float[Array, "B H"],
    weights: KdaWeights,
    state_pool: Float32[Array, "S H D D"],
    window_pool: Float[Array, "S 3 H 3 D"],
    slot: Int32[Array, "B"],
    fresh: Bool[Array, "B"],
    *,
    lower_bound: float = -5.0,
    norm_eps: float = 1e-5,
    implementation: Implementation = None,
) -> Decode:
    """One token per row, state and window updated in the row's slot (in place when the caller donates the pools).

    Rows on slot 0 are inert: output 0, slot 0 unchanged. `fresh` rows start from zero, whatever the slot holds. Two
    rows must not share another slot.
    """
    check_bound(lower_bound)
    args = (qkvz, decay_logits, beta_logits, weights, state_pool, window_pool, slot, fresh, lower_bound, norm_eps)
    return select(implementation, mosaic=mosaic.decode, xla=xla.decode)(*args)


@partial(jax.jit, static_argnames=("lower_bound", "norm_eps", "implementation"))
def verify(
    qkvz: Float[Array, "B W H 4 D"],
    decay_logits: Float[Array, "B W H D"],
    beta_logits: Float[Array, "B W H"],
    weights: KdaWeights,
    state_pool: Float32[Array, "S H D D"],
    window_pool: Float[Array, "S 3 H 3 D"],
    slot: Int32[Array, "B"],
    length: Int32[Array, "B"],
    *,
    lower_bound: float = -5.0,
    norm_eps: float = 1e-5,
    implementation: Implementation = None,
) -> Verify:
    """A few draft tokens per row against the stored state, which is read and never written.

    Outputs equal those of `length` decode steps; the records let `commit` apply any accepted prefix. Tokens past
    `length` and rows on slot 0 give output 0 and zero records.
    """
    check_bound(lower_bound)
    args = (qkvz, decay_logits, beta_logits, weights, state_pool, window_pool, slot, length, lower_bound, norm_eps)
    return select(implementation, mosaic=mosaic.verify, xla=xla.verify)(*args)


@partial(jax.jit, static_argnames=("implementation",))
def commit(
    records: Records,
    qkvz: Float[Array, "B W H 4 D"],
    state_pool: Float32[Array, "S H D D"],
    window_pool: Float[Array, "S 3 H 3 D"],
    slot: Int32[Array, "B"],
    accepted: Int32[Array, "B"],
    *,
    implementation: Implementation = None,
) -> Pools:
    """Applies the first `accepted` verified tokens of a row to its slot, bit for bit as that many decode steps would.

    `records` and `qkvz` are those of the `verify` call. Rows on slot 0 are inert.
    """
    args = (records, qkvz, state_pool, window_pool, slot, accepted)
    return select(implementation, mosaic=mosaic.commit, xla=xla.commit)(*args)


@partial(jax.jit, static_argnames=("implementation",))
def commit_layers(
    records: Sequence[Records],
    qkvz: Sequence[Float[Array, "B W H 4 D"]],
    pools: Sequence[Pools],
    slot: Int32[Array, "B"],
    accepted: Int32[Array, "B"],
    *,
    implementation: Implementation = None,
) -> list[Pools]:
    """`commit` of several layers of equal shapes at once: on a GPU, a launch a layer would cost most of the time.

    Item n of each sequence is layer n's; the slots and accepted counts are those of the step, the same for all.
    """
    args = (records, qkvz, pools, slot, accepted)
    return select(implementation, mosaic=mosaic.commit_layers, xla=xla.commit_layers)(*args)


@partial(jax.jit, static_argnames=("lower_bound", "implementation"))
def affine(
    qkvz: Float[Array, "B T H 4 D"],
    decay_logits: Float[Array, "B T H D"],
    beta_logits: Float[Array, "B T H"],
    weights: KdaWeights,
    window: Float[Array, "B 3 H 3 D"],
    length: Int32[Array, "B"],
    *,
    lower_bound: float = -5.0,
    implementation: Implementation = None,
) -> Affine:
    """A piece of a sequence as a map of the state, for context parallelism: S_out = transition @ S_in + local_state."""
    check_bound(lower_bound)
    args = (qkvz, decay_logits, beta_logits, weights, window, length, lower_bound)
    return select(implementation, mosaic=mosaic.affine, xla=xla.affine)(*args)


@jax.jit
def compose(first: Affine, second: Affine) -> Affine:
    """The map of two consecutive pieces. Associative, so it may run in `jax.lax.associative_scan`."""
    return xla.compose(first, second)
