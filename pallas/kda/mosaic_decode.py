"""KDA decode as one Mosaic GPU kernel per call: raw projections in, gated output out.

A block walks over heads of rows. States go through a ring of three buffers in shared memory by bulk copies, so each is
read and written once, and while one is updated the next arrives and the last leaves; conv, norms and gates of a token
are computed before its state is there. Pools are updated in place by slot.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas.kda.mosaic_token import (
    CHANNELS,
    GATE,
    MULTIPROCESSORS,
    PARAMS,
    ROW_LAYOUT,
    ROWS,
    STATE_LAYOUT,
    VALUE,
    VALUE_LAYOUT,
    fetch_inputs,
    fetch_slot,
    gate_vectors,
    gated_norm,
    overlap_vectors,
    pl_ds,
    scratch,
    sigmoid,
    spread,
    step,
    token_vectors,
)
from pallas.kda.types import WINDOW, Decode, KdaWeights

STATES, INPUTS = 3, 2
"""Buffers of a block: one state is updated while another arrives and a third leaves; inputs of this item and the next
one."""


def require_supported(channels: int, dtype: jnp.dtype) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernels do not serve."""
    if channels != CHANNELS:
        raise NotImplementedError(f"kda mosaic kernels serve head dimension {CHANNELS}, got {channels}")
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"kda mosaic kernels serve bfloat16 activations, got {dtype}")


def ring_scratch(dtype: jnp.dtype) -> dict[str, Any]:
    """`scratch` for one token with a leading axis: states and inputs of several items, vectors of one."""
    few = {"state": STATES, "state_ready": STATES, "vectors": 1}

    def repeat(name: str, buffer: Any) -> Any:
        count = few.get(name, INPUTS)
        if isinstance(buffer, plgpu.Barrier):
            return dataclasses.replace(buffer, num_barriers=count)
        return plgpu.SMEM((count, *buffer.shape), buffer.dtype)

    return {name: repeat(name, buffer) for name, buffer in scratch(1, dtype).items() if name != "overlaps"}


@dataclasses.dataclass(frozen=True)
class Walk:
    """A block's way over heads of rows; the arrays are those of `decode` in device memory."""

    rows: int
    heads: int
    workers: int
    lower_bound: float
    norm_eps: float
    qkvz: Any
    decay: Any
    beta: Any
    conv: Any
    a_log: Any
    dt_bias: Any
    weight: jax.Array
    code: Any
    state_pool: Any
    window_pool: Any
    output: Any
    ring: dict[str, Any]

    def place(self, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Row and head of a turn; the row may lie beyond the last."""
        item = lax.axis_index("workers") + turn * self.workers
        return item // self.heads, item % self.heads

    def parameters(self, turn: jax.Array) -> tuple[jax.Array, ...]:
        """What is read straight into registers, a turn ahead: dt_bias, a_log, beta logit, the row's code."""
        row, head = self.place(turn)
        row = jnp.minimum(row, self.rows - 1)
        bias = plgpu.load(self.dt_bias.at[head], layout=ROW_LAYOUT.reduce(0), optimized=False)
        return bias, self.a_log[head], self.beta[row, head].astype(jnp.float32), self.code[row]

    def mark(self, turn: jax.Array) -> jax.Array:
        """The code of the turn's row."""
        return self.code[jnp.minimum(self.place(turn)[0], self.rows - 1)]

    def buffers(self, turn: jax.Array) -> dict[str, Any]:
        """The turn's part of the ring."""
        index = {"state": turn % STATES, "state_ready": turn % STATES, "vectors": 0}
        # The vectors' rows beyond the only token are free: one of them takes <k, q>.
        overlaps = self.ring["vectors"].at[0, VALUE, 1, pl_ds(0, ROWS)]
        return {name: ref.at[index.get(name, turn % INPUTS)] for name, ref in self.ring.items()} | {
            "overlaps": overlaps
        }

    def fetch(self, turn: jax.Array, mark: jax.Array) -> None:
        """Starts the copies of a turn, if there is one."""
        row, head = self.place(turn)

        @pl.when(row < self.rows)
        def _fetch() -> None:
            buffers = self.buffers(turn)
            fetch_inputs([(self.qkvz.at[row, head], self.decay.at[row, head])], self.conv, head, buffers)
            pl.when(mark != 0)(lambda: fetch_slot(self.state_pool, self.window_pool, jnp.abs(mark), head, buffers))

    def run(self, turn: jax.Array, current: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """A turn of the loop, given its parameters; returns those of the next."""
        following, later = self.parameters(turn + 1), self.mark(turn + INPUTS)
        row, head = self.place(turn)
        pl.when(row < self.rows)(lambda: self.work(turn, row, head, *current))
        self.fetch(turn + INPUTS, later)
        return following

    def work(self, turn: jax.Array, row: jax.Array, head: jax.Array, *parameters: jax.Array) -> None:
        """One head of one row."""
        bias, speed, logit, mark = parameters
        buffers = self.buffers(turn)
        slot, fresh = jnp.abs(mark), mark < 0
        strength = sigmoid(logit)
        plgpu.barrier_wait(buffers["inputs_ready"])
        gates = jnp.exp(speed), spread(bias, 1, (ROWS, CHANNELS), ROW_LAYOUT)
        gate_vectors(buffers, gates, self.lower_bound)

        @pl.when(mark == 0)
        def _inert() -> None:
            self.output[row, head] = jnp.zeros((CHANNELS,), self.output.dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(mark != 0)
        def _live() -> None:
            self.advance(buffers, row, head, slot, fresh, strength)

    def window(self, buffers: dict[str, Any], head: jax.Array, slot: jax.Array, fresh: jax.Array) -> None:
        """The token's q, k, v and z from the slot's window, which moves on."""
        raw = buffers["raw"]
        plgpu.barrier_wait(buffers["window_ready"])

        @pl.when(fresh)
        def _forget() -> None:
            raw[pl_ds(0, 4 * WINDOW), :] = jnp.zeros((4 * WINDOW, CHANNELS), raw.dtype)
            plgpu.commit_smem()

        token_vectors(buffers, 0)
        plgpu.commit_smem()
        for age in range(WINDOW):
            plgpu.copy_smem_to_gmem(raw.at[pl_ds(4 * age + 4, 3)], self.window_pool.at[slot, age, head])

    def advance(
        self,
        buffers: dict[str, Any],
        row: jax.Array,
        head: jax.Array,
        slot: jax.Array,
        fresh: jax.Array,
        strength: jax.Array,
    ) -> None:
        """Decays, predicts, writes and reads the slot's state."""
        state, vectors = buffers["state"], buffers["vectors"]
        self.window(buffers, head, slot, fresh)
        overlap_vectors(buffers)
        plgpu.commit_smem()
        gate = plgpu.load(vectors.at[GATE, 0], layout=VALUE_LAYOUT, optimized=False)
        plgpu.barrier_wait(buffers["state_ready"])
        before = jnp.where(fresh, 0.0, plgpu.load(state, layout=STATE_LAYOUT, optimized=False))
        after, reading, _ = step(before, vectors, 0, strength, buffers["overlaps"][0])
        state[...] = after
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(state, self.state_pool.at[slot, head])
        self.output[row, head] = gated_norm(reading, gate, self.weight, self.norm_eps, self.output.dtype)
        # All but this state have left: the buffers of the item after next are free.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)


def decode(
    qkvz: Float[Array, "B H 4 D"],
    decay_logits: Float[Array, "B H D"],
    beta_logits: Float[Array, "B H"],
    weights: KdaWeights,
    state_pool: Float32[Array, "S H D D"],
    window_pool: Float[Array, "S 3 H 3 D"],
    slot: Int32[Array, "B"],
    fresh: Bool[Array, "B"],
    lower_bound: float,
    norm_eps: float,
    interpret: Any = None,
) -> Decode:
    """`api.decode`."""
    rows, heads, _, channels = qkvz.shape
    require_supported(channels, qkvz.dtype)
    # One signed number per row: negative for fresh. The same for every layer, so XLA computes it once per step.
    code = jnp.where(fresh, -slot, slot)

    items = rows * heads
    workers = min(items, MULTIPROCESSORS)

    def body(qkvz, decay, beta, conv, a_log, dt_bias, norm, code, state_pool, window_pool, output, **ring: Any):
        weight = plgpu.load(norm, layout=VALUE_LAYOUT, optimized=False)
        sizes = (rows, heads, workers, lower_bound, norm_eps)
        walk = Walk(
            *sizes, qkvz, decay, beta, conv, a_log, dt_bias, weight, code, state_pool, window_pool, output, ring
        )
        first = walk.parameters(jnp.int32(0))
        walk.fetch(jnp.int32(0), first[-1])
        walk.fetch(jnp.int32(1), walk.mark(jnp.int32(1)))
        lax.fori_loop(0, -(-items // workers), walk.run, first)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    states, windows = jax.new_ref(state_pool), jax.new_ref(window_pool)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, heads, channels), qkvz.dtype),
        grid=(workers,),
        grid_names=("workers",),
        scratch_types=ring_scratch(qkvz.dtype),
        compiler_params=dataclasses.replace(PARAMS, reduction_scratch_bytes=512),
        interpret=interpret,
        kernel_name="kda_decode",
    )
    output = kernel(qkvz, decay_logits, beta_logits, *weights, code, states, windows)
    return Decode(output, jax.freeze(states), jax.freeze(windows))
