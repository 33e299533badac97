"""Where all warpgroups of a grid meet after a token: the best of their scores, and its token, known to all."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas import inline
from pallas.layouts import WHOLE

SCALAR = plgpu.ShapeDtypeStruct((), jnp.int32, layout=WHOLE)


def words(steps: int) -> Any:
    """32-bit words of device memory, zero at the start: for each step a key of 64 bits, a count, and one unused."""
    return plgpu.SemaphoreType.REGULAR((4 * steps,))


def scratch(groups: int, steps: int, *, emulated: bool) -> dict[str, Any]:
    """Shared memory of a meeting."""
    if emulated:
        return {
            "scores": plgpu.SMEM((steps, groups), jnp.float32),
            "tokens": plgpu.SMEM((steps, groups), jnp.int32),
            "met": plgpu.Barrier(num_arrivals=groups, num_barriers=2),
        }
    return {"cells": plgpu.SMEM((2 * steps + groups,), jnp.int32)}


class Meeting:
    """Built inside a kernel; every warpgroup of every block comes to each step."""

    def __init__(self, cut: Any, steps: int, smem: dict[str, Any], shared: Any) -> None:
        self.cut, self.steps, self.smem, self.shared = cut, steps, smem, shared

    def prepare(self) -> None:
        """Before the first step."""
        if self.shared is not None:
            _clear(self.smem["cells"], 2 * self.steps)

    def best(self, step: jax.Array, score: jax.Array, token: jax.Array) -> jax.Array:
        """The token of the highest score in any first column, the lowest of equal ones."""
        if self.shared is None:
            return self._emulated(step, score[:, 0], token[:, 0])
        return _meet(self.cut, self.steps, self.smem["cells"], self.shared, step, score, token)

    def _emulated(self, step: jax.Array, score: jax.Array, token: jax.Array) -> jax.Array:
        group = lax.axis_index("group")
        top = jnp.max(score)
        self.smem["scores"][step, group] = top
        self.smem["tokens"][step, group] = jnp.min(jnp.where(score == top, token, 2**31 - 1))
        met = self.smem["met"].at[lax.rem(step, jnp.int32(2))]
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)
        scores, tokens = (self.smem[name][step] for name in ("scores", "tokens"))
        return jnp.min(jnp.where(scores == jnp.max(scores), tokens, 2**31 - 1))


def _clear(cells: Any, count: int) -> None:
    """Zeros, seen by all threads of the block."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_: Any, cells: ir.Value) -> None:
        text = f"""{{ .reg .pred p; .reg .b32 at, i; mov.u32 i, %tid.x; setp.lt.u32 p, i, {count};
            shl.b32 at, i, 2; add.u32 at, at, $0; @p st.shared.b32 [at], 0; barrier.cta.sync 0; }}"""
        mgpu.utils.inline_ptx(text, inline.shared_address(cells), has_side_effects=True, convergent=True)

    run(cells)


MEET = """{{
.reg .pred p, q; .reg .b32 m, u, t, lo, hi, i, cell; .reg .b64 key, other, place; .reg .b128 both;
mov.u32 i, %tid.x;
shr.s32 m, $1, 31; or.b32 m, m, 0x80000000; xor.b32 u, $1, m; not.b32 t, $3; mov.b64 key, {{t, u}};
shr.s32 m, $2, 31; or.b32 m, m, 0x80000000; xor.b32 u, $2, m; not.b32 t, $4; mov.b64 other, {{t, u}};
max.u64 key, key, other;
and.b32 t, i, 3; setp.ne.u32 p, t, 0; @p mov.b64 key, 0;
mov.b64 {{lo, hi}}, key; shfl.sync.bfly.b32 lo, lo, 4, 31, -1; shfl.sync.bfly.b32 hi, hi, 4, 31, -1;
mov.b64 other, {{lo, hi}}; max.u64 key, key, other;
mov.b64 {{lo, hi}}, key; shfl.sync.bfly.b32 lo, lo, 8, 31, -1; shfl.sync.bfly.b32 hi, hi, 8, 31, -1;
mov.b64 other, {{lo, hi}}; max.u64 key, key, other;
mov.b64 {{lo, hi}}, key; shfl.sync.bfly.b32 lo, lo, 16, 31, -1; shfl.sync.bfly.b32 hi, hi, 16, 31, -1;
mov.b64 other, {{lo, hi}}; max.u64 key, key, other;
shl.b32 t, $5, 3; add.u32 cell, $6, t;
and.b32 t, i, 31; setp.eq.u32 p, t, 0; @p red.shared.max.u64 [cell], key;
barrier.cta.sync 0;
setp.eq.u32 p, i, 0; cvt.u64.u32 place, $5; shl.b64 place, place, 4; add.u64 place, place, $7;
@p ld.shared.u64 key, [cell];
@p red.relaxed.gpu.global.max.u64 [place], key;
@p red.release.gpu.global.add.u32 [place+8], 1;
shr.u32 t, i, 7; shl.b32 t, t, 2; add.u32 cell, $6, t;
and.b32 t, i, 127; setp.ne.u32 q, t, 0; @q bra THERE;
WAIT: ld.acquire.gpu.global.b128 both, [place]; mov.b128 {{key, other}}, both;
cvt.u32.u64 t, other; setp.lt.u32 p, t, {blocks}; @p bra WAIT;
mov.b64 {{lo, hi}}, key; not.b32 lo, lo; st.shared.b32 [cell+{told}], lo;
THERE: bar.warp.sync 0xffffffff; barrier.cta.sync $8, 128; ld.shared.b32 $0, [cell+{told}];
}}"""
"""A score's bits, ordered as unsigned numbers, above the token's complement: the largest key is the best of all.

Lanes with the first column take the larger of their two, warps the largest of lanes, the block that of warps, and one
thread adds it to the grid's. Key and count are read at once, so the last count comes with the last key. $1 to $4:
scores and tokens; $5: step; $6, $7: shared and device memory; $8: barrier.
"""


def _meet(
    cut: Any, steps: int, cells: Any, shared: Any, step: jax.Array, score: jax.Array, token: jax.Array
) -> jax.Array:
    text = MEET.format(blocks=cut.blocks, told=8 * steps)
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), WHOLE, layout, layout), return_type=SCALAR)
    def run(_: Any, cells: ir.Value, shared: ir.Value, step: Any, score: Any, token: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        first = [
            vector.extract(register, dynamic_position=[], static_position=[0])
            for array in (score, token)
            for register in array.registers.flat
        ]
        assert len(first) == 4
        first[:2] = [arith.bitcast(i32, value) for value in first[:2]]
        where = [step.registers.item(), inline.shared_address(cells), mgpu.utils.memref_ptr(shared)]
        barrier = mgpu.utils.warpgroup_barrier_idx(sync=False)
        found = mgpu.utils.inline_ptx(
            text, *first, *where, barrier, result_types=i32, has_side_effects=True, convergent=True
        )
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return run(cells, shared, step, score, token)
