"""Reductions over the tokens of a tile of scores, [64, N] as products lie: a maximum or a sum for each query.

Lanes reduce by shuffles, warps meet in shared memory once, and a thread finishes one or two queries: far fewer
instructions than a reduction of whole layouts, which count where nothing else runs and none has run before.
"""

import struct
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas import inline
from pallas.layouts import WHOLE
from pallas.mla.mosaic_plan import PER_QUERY, PRODUCT, WARPS, Plan


def _to_memory(plan: Plan, registers: np.ndarray, combine: str, cells: ir.Value) -> None:
    """Of each warp its reduction, at cells[warp][query]; the warpgroup sees them all."""
    eights = plan.most // 8
    values = np.empty((eights, 2, 2), dtype=object)
    values.flat = list(inline.elements(registers))
    pairs = [tuple(values[eight, :, place]) for eight, place in np.ndindex(eights, 2)]
    names = [f"x{index}" for index in range(len(pairs))]
    lines = [f"{{ .reg .pred p; .reg .b32 i, w, at; .reg .f32 y, {', '.join(names)};"]
    lines += [f"{combine} {name}, ${2 + 2 * i}, ${3 + 2 * i};" for i, name in enumerate(names)]
    for step in (4, 8, 16):
        lines += [f"shfl.sync.bfly.b32 y, {name}, {step}, 31, -1; {combine} {name}, {name}, y;" for name in names]
    lines.append("mov.u32 i, %tid.x; shr.u32 w, i, 5; and.b32 w, w, 3; and.b32 i, i, 31; setp.lt.u32 p, i, 4;")
    lines.append(f"mad.lo.u32 at, w, {4 * plan.most}, $0; mad.lo.u32 at, i, 8, at;")
    lines += [f"@p st.shared.v2.f32 [at+{32 * i}], {{x{2 * i}, x{2 * i + 1}}};" for i in range(eights)]
    own = [value for both in pairs for value in both]
    operands = inline.shared_address(cells), utils.warpgroup_barrier_idx(sync=False), *own
    text = " ".join([*lines, "barrier.cta.sync $1, 128; }"])
    utils.inline_ptx(text, *operands, has_side_effects=True, convergent=True)


def store_sums(plan: Plan, stats: Any, part: jax.Array, tops: Any, total: jax.Array, cells: Any) -> None:
    """stats[pair, part] = (two tops, two sums), of pairs of queries."""
    most = plan.most
    loads = (f"@p ld.shared.v2.f32 {{a{warp}, b{warp}}}, [at+{4 * most * warp}];" for warp in range(WARPS))
    sums = " ".join(f"add.f32 {x}0, {x}0, {x}1; add.f32 {x}2, {x}2, {x}3; add.f32 {x}0, {x}0, {x}2;" for x in "ab")
    text = f"""{{ .reg .pred p; .reg .b32 i, at, to; .reg .b64 there; .reg .f32 a<4>, b<4>, t, u;
        mov.u32 i, %tid.x; and.b32 i, i, 127; setp.lt.u32 p, i, {most // 2};
        mad.lo.u32 at, i, 8, $2; mad.lo.u32 to, i, 8, $1;
        mad.lo.u32 i, i, {plan.parts}, $3; mad.wide.u32 there, i, 16, $0;
        @p ld.shared.v2.f32 {{t, u}}, [to]; {" ".join(loads)} {sums}
        @p st.global.v4.f32 [there], {{t, u, a0, b0}}; }}"""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), PRODUCT, plgpu.RefType(), WHOLE))
    def run(_: Any, stats: ir.Value, tops: ir.Value, total: Any, cells: ir.Value, part: Any) -> None:
        _to_memory(plan, total.registers, "add.f32", cells)
        places = utils.memref_ptr(stats), inline.shared_address(tops), inline.shared_address(cells)
        utils.inline_ptx(text, *places, part.registers.item(), has_side_effects=True)

    run(stats, tops, total, cells, part)


def float_text(value: float) -> str:
    """A constant in PTX."""
    return "0f" + struct.pack(">f", value).hex().upper()


def _raise_program(plan: Plan, shift: float, slack: float) -> str:
    """PTX that raises tops by the warps' maxima and reads a thread's own.

    Results: a thread's tops; operands: addresses of tops, of what sums shrink by, of maxima, then a barrier's number.
    """
    eights, most = plan.most // 8, plan.most
    tops, shrinks, cells, barrier = (f"${2 * eights + i}" for i in range(4))
    loads = (f"@p ld.shared.f32 m{warp}, [at+{4 * most * warp}];" for warp in range(WARPS))
    own = (f"ld.shared.v2.f32 {{${2 * i}, ${2 * i + 1}}}, [to+{32 * i}];" for i in range(eights))
    return f"""{{ .reg .pred p, q; .reg .b32 i, at, to, sh; .reg .f32 m<4>, old, new, limit;
        mov.u32 i, %tid.x; and.b32 i, i, 127; setp.lt.u32 p, i, {most};
        mad.lo.u32 at, i, 4, {cells}; mad.lo.u32 to, i, 4, {tops}; mad.lo.u32 sh, i, 4, {shrinks};
        @p ld.shared.f32 old, [to]; {" ".join(loads)} max.f32 m0, m0, m1; max.f32 m2, m2, m3; max.f32 m0, m0, m2;
        add.f32 limit, old, {float_text(shift + slack)}; setp.gt.f32 q, m0, limit;
        sub.f32 new, m0, {float_text(shift)}; cvt.rni.f32.f32 new, new; selp.f32 new, new, old, q;
        sub.f32 old, old, new; ex2.approx.ftz.f32 old, old; @p st.shared.f32 [to], new; @p st.shared.f32 [sh], old;
        barrier.cta.sync {barrier}, 128; and.b32 i, i, 3; mad.lo.u32 to, i, 8, {tops}; {" ".join(own)} }}"""


def raise_tops(
    plan: Plan, scores: jax.Array, before: jax.Array, tops: Any, shrinks: Any, cells: Any, shift: float, slack: float
) -> jax.Array:
    """New tops, in memory too, beside what sums shrink by: whole numbers, raised where scores - shift pass by slack."""
    text = _raise_program(plan, shift, slack)
    types = (PRODUCT, PER_QUERY, plgpu.RefType(), plgpu.RefType(), plgpu.RefType())

    @plgpu.inline_mgpu(arg_types=types, return_type=plgpu.ShapeDtypeStruct((plan.most,), jnp.float32, layout=PER_QUERY))
    def run(_: Any, scores: Any, before: Any, tops: ir.Value, shrinks: ir.Value, cells: ir.Value) -> FragmentedArray:
        _to_memory(plan, scores.registers, "max.f32", cells)
        places = [inline.shared_address(ref) for ref in (tops, shrinks, cells)]
        kinds, barrier = [ir.F32Type.get()] * (plan.most // 4), utils.warpgroup_barrier_idx(sync=False)
        found = utils.inline_ptx(text, *places, barrier, result_types=kinds, has_side_effects=True, convergent=True)
        return _like(before, iter(found))

    return run(scores, before, tops, shrinks, cells)


def _like(array: FragmentedArray, values: Any) -> FragmentedArray:
    """Values of a thread in the registers of an array's layout."""
    registers = np.empty_like(array.registers)
    for place, old in np.ndenumerate(array.registers):
        if isinstance(old.type, ir.VectorType):
            many = [next(values) for _ in range(ir.VectorType(old.type).shape[0])]
            registers[place] = vector.from_elements(old.type, many)
        else:
            registers[place] = next(values)
    return FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=array.is_signed)
