"""The one-shot sum inside another kernel: threads that need a term's sum send and receive their own numbers.

As `mosaic` with one unit or two neighbouring ones a thread, so that a sum costs no kernel of its own. Between sending
and receiving the kernel may do whatever does not need the sum.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas import inline
from pallas.collectives import layout
from pallas.collectives.mosaic import POLLS, THREADS


def _names(name: str, first: int, count: int = 4) -> str:
    return ", ".join(f"{name}{index}" for index in range(first, first + count))


def send_program(devices: int, units: int, channel: int = 0) -> str:
    """PTX that sends a thread's units to all devices; operands: turns out, table, terms of all, terms of this block.

    A thread has one unit, or two side by side. The result has the turn's parity of unit i in bit i.
    """
    inbox, padded, words = channel * layout.channel_bytes(devices), devices + devices % 2, 4 * units
    lines = [
        f"{{ .reg .pred p; .reg .b32 t, u, count, rank; .reg .b32 v<{words}>, turn<{units}>, next<{units}>;",
        f".reg .b64 a, x, own, rank64, there; .reg .b64 peer<{padded}>;",
        f"mov.u32 t, %tid.x; mul.lo.u32 t, t, {units}; mad.wide.u32 x, t, {layout.UNIT}, $3;",
    ]
    for unit in range(units):
        lines.append(f"ld.global.v4.b32 {{{_names('v', 4 * unit)}}}, [x+{layout.UNIT * unit}];")
    lines.append("ld.global.nc.v2.b64 {own, rank64}, [$1];")
    for device in range(0, devices, 2):
        lines.append(f"ld.global.nc.v2.b64 {{peer{device}, peer{device + 1}}}, [$1+{16 + 8 * device}];")
    lines += [
        f"sub.s64 x, x, $2; cvt.u32.u64 u, x; shr.u32 u, u, 4; add.s64 own, own, {inbox}; mad.wide.u32 a, u, 4, own;",
    ]
    several = ".v2.b32" if units == 2 else ".b32"
    turns, following = (f"{{{_names(name, 0, units)}}}" if units == 2 else f"{name}0" for name in ("turn", "next"))
    lines.append(f"ld.relaxed.sys.global{several} {turns}, [a];")
    for unit in range(units):
        lines.append(f"add.u32 next{unit}, turn{unit}, 1; and.b32 turn{unit}, turn{unit}, 1;")
    lines.append(f"st.relaxed.sys.global{several} [a], {following}; cvt.u32.u64 rank, rank64;")
    for word in range(words):
        lines.append(f"setp.eq.b32 p, v{word}, {layout.EMPTY}; selp.b32 v{word}, {layout.NAN}, v{word}, p;")
    for unit in range(units):
        lines.append(f"mul.wide.u32 there, turn{unit}, {layout.turn_bytes(devices)};")
        lines.append(f"mad.wide.u32 there, u, {layout.UNIT}, there; mad.wide.u32 there, rank, {layout.RUN}, there;")
        lines.append(f"add.s64 there, there, {inbox + layout.COUNTERS + layout.UNIT * unit};")
        for device in range(devices):
            store = f"st.relaxed.sys.global.v4.b32 [a], {{{_names('v', 4 * unit)}}};"
            lines.append(f"add.s64 a, peer{device}, there; {store}")
    lines += [f"shl.b32 turn{unit}, turn{unit}, {unit}; or.b32 turn0, turn0, turn{unit};" for unit in range(1, units)]
    lines.append("mov.b32 $0, turn0; }")
    return "\n".join(lines)


def receive_program(devices: int, units: int, channel: int = 0, polls: int = POLLS) -> str:
    """PTX that adds up what all devices sent; after so many `polls` it traps, as `mosaic` does.

    Operands: two words of bfloat16 out for a unit, then table, terms of all and of this block, and the turns.
    """
    words = 4 * units
    count, table, terms, own, turns = devices * words, *(f"${words // 2 + place}" for place in range(4))
    lines = [
        f"{{ .reg .pred p, q; .reg .b32 t, u, turn, count, empty; .reg .b32 s<{count}>; .reg .f32 f<{words}>, g;",
        f".reg .b64 x, own; .reg .b64 here<{units}>;",
        f"mov.u32 t, %tid.x; mul.lo.u32 t, t, {units}; mad.wide.u32 x, t, {layout.UNIT}, {own}; sub.s64 x, x, {terms};",
        f"cvt.u32.u64 u, x; shr.u32 u, u, 4; ld.global.nc.b64 own, [{table}]; mov.b32 count, 0;",
        f"mov.b32 empty, {layout.EMPTY};",
    ]
    for unit in range(units):
        lines.append(f"shr.u32 turn, {turns}, {unit}; and.b32 turn, turn, 1;")
        lines.append(f"mul.wide.u32 here{unit}, turn, {layout.turn_bytes(devices)};")
        lines.append(f"mad.wide.u32 here{unit}, u, {layout.UNIT}, here{unit}; add.s64 here{unit}, here{unit}, own;")
        offset = channel * layout.channel_bytes(devices) + layout.COUNTERS + layout.UNIT * unit
        lines.append(f"add.s64 here{unit}, here{unit}, {offset};")
    lines.append("AGAIN_${:uid}:")
    slots = [(unit, device) for unit in range(units) for device in range(devices)]
    for unit, device in slots:
        slot = _names("s", 4 * (unit * devices + device))
        lines.append(f"ld.relaxed.sys.global.v4.b32 {{{slot}}}, [here{unit}+{device * layout.RUN}];")
    lines.append(f"setp.eq.b32 p, s0, {layout.EMPTY};")
    lines += [f"setp.eq.or.b32 p, s{word}, {layout.EMPTY}, p;" for word in range(1, count)]
    lines.append(f"add.u32 count, count, 1; setp.gt.u32 q, count, {polls}; @q trap; @p bra AGAIN_${{:uid}};")
    for unit, device in slots:
        store = "st.relaxed.sys.global.v4.b32"
        lines.append(f"{store} [here{unit}+{device * layout.RUN}], {{empty, empty, empty, empty}};")
    for unit, device in slots:
        for word in range(4):
            total, source = f"f{4 * unit + word}", f"s{4 * (unit * devices + device) + word}"
            add = f"mov.b32 g, {source}; add.rn.f32 {total}, {total}, g;"
            lines.append(f"mov.b32 {total}, {source};" if device == 0 else add)
    lines += [f"cvt.rn.bf16x2.f32 ${word}, f{2 * word + 1}, f{2 * word};" for word in range(words // 2)]
    return "\n".join([*lines, "}"])


def require_supported(terms: Any) -> None:
    """Raises `NotImplementedError` for terms that a site does not sum."""
    if terms.dtype != jnp.float32:
        raise NotImplementedError(f"a sum inside a kernel is of float32 terms, got {terms.dtype}")
    if (units := terms.size * 4 // layout.UNIT) > layout.CAPACITY:
        raise NotImplementedError(f"a sum of {units} units is too large, an inbox holds {layout.CAPACITY}")


class Site:
    """A sum in a kernel, of the terms `own` of this block, a part of `terms`.

    They are float32 [128, 4] or [128, 8], laid out as `numbers`: a row a thread.
    """

    def __init__(self, table: Any, terms: Any, own: Any, devices: int, numbers: Any) -> None:
        self.refs, self.devices, self.numbers = (table, terms, own), devices, numbers
        self.threads, self.width = numbers.reduce(1), own.shape[-1]
        self.turns: jax.Array | None = None

    def send(self) -> None:
        """Sends the terms to all devices."""
        form, text = self.threads.to_mgpu(), send_program(self.devices, self.width // 4)
        result = plgpu.ShapeDtypeStruct((THREADS,), jnp.int32, layout=self.threads)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3, return_type=result)
        def run(_: Any, *refs: Any) -> Any:
            kind = ir.IntegerType.get_signless(32)
            turns = utils.inline_ptx(text, *map(_address, refs), result_types=kind, has_side_effects=True)
            return _array(vector.from_elements(ir.VectorType.get((1,), kind), [turns]), (THREADS,), form, True)

        self.turns = run(*self.refs)

    def receive(self) -> jax.Array:
        """The sums in bfloat16, when all devices have sent."""
        form, text, width = self.numbers.to_mgpu(), receive_program(self.devices, self.width // 4), self.width
        result = plgpu.ShapeDtypeStruct((THREADS, width), jnp.bfloat16, layout=self.numbers)

        @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 3, self.threads), return_type=result)
        def run(_: Any, *args: Any) -> Any:
            *refs, turns = args
            kind = ir.IntegerType.get_signless(32)
            operands = (*map(_address, refs), *inline.elements(turns.registers))
            words = utils.inline_ptx(text, *operands, result_types=[kind] * (width // 2), has_side_effects=True)
            packed = vector.from_elements(ir.VectorType.get((width // 2,), kind), list(words))
            sums = vector.bitcast(ir.VectorType.get((width,), ir.BF16Type.get()), packed)
            return _array(sums, (THREADS, width), form, None)

        return run(*self.refs, self.turns)


def _address(ref: Any) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))


def _array(register: Any, shape: tuple[int, ...], form: Any, is_signed: bool | None) -> Any:
    """An array of which every thread has one register."""
    shaped = np.array([register], dtype=object).reshape(form.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=shaped, _layout=form, _is_signed=is_signed)
