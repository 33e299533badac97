"""The one-shot sum on NVIDIA GPUs that reach one another's memory: one store to every peer, then wait, add and leave.

A thread has 16 bytes. It stores them in the inbox of every device, its own too, and polls its own inbox until those of
all devices have come; it adds them up in the order of devices, so that all devices get the same bits, and empties what
it read. There is neither a flag nor a fence nor a barrier: a word that is not `EMPTY` is the message.

A unit is always handled by the same thread of the same block, and two runs of slots take turns. A peer writes to a slot
again two turns later, which it begins after it has got what this device sent in the turn between, thus after this
device's kernel that emptied the slot has ended. Kernels on one channel must follow one another, in the same order on
all devices: sums that depend on one another do.

The addresses of the peers' inboxes come from a table, so that the runtime need not exchange any for a call.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas.collectives import layout
from pallas.dispatch import BLACKWELL, HOPPER, require_capability

THREADS = 128
"""Threads of a block, units that it sums."""
POLLS = 1 << 29
"""Polls, of about a microsecond, before a kernel gives up its peers and takes the process down.

Not fewer: who suspends a process may do so between the launches of two devices.
"""


def _words(name: str) -> str:
    return ", ".join(f"{name}{index}" for index in range(4))


def _send(devices: int) -> list[str]:
    """Stores the unit in v0 to v3 in the slot of this rank in every inbox."""
    lines = []
    for word in range(4):
        lines.append(f"setp.eq.b32 p, v{word}, {layout.EMPTY}; selp.b32 v{word}, {layout.NAN}, v{word}, p;")
    for device in range(devices):
        lines.append(f"add.s64 a, peer{device}, there; st.relaxed.sys.global.v4.b32 [a], {{{_words('v')}}};")
    return lines


def _receive(devices: int, polls: int, trap: bool) -> list[str]:
    """Loads the slots of all senders until none has an empty word, then empties them.

    After so many `polls` it traps, or goes on with what came: an empty word makes a sum that is NaN.
    """
    lines = ["mov.b32 count, 0;", "AGAIN_${:uid}:"]
    for device in range(devices):
        lines.append(f"ld.relaxed.sys.global.v4.b32 {{{_words(f's{device}w')}}}, [here+{device * layout.RUN}];")
    lines.append(f"setp.eq.b32 p, s0w0, {layout.EMPTY};")
    for device in range(devices):
        for word in range(4):
            lines.append(f"setp.eq.or.b32 p, s{device}w{word}, {layout.EMPTY}, p;")
    enough = f"setp.gt.u32 q, count, {polls}; @q trap;" if trap else f"setp.le.and.u32 p, count, {polls}, p;"
    lines.append(f"add.u32 count, count, 1; {enough} @p bra AGAIN_${{:uid}};")
    empty = ", ".join(["empty"] * 4)
    lines.append(f"mov.b32 empty, {layout.EMPTY};")
    for device in range(devices):
        lines.append(f"st.relaxed.sys.global.v4.b32 [here+{device * layout.RUN}], {{{empty}}};")
    return lines


def _sum(devices: int, narrow: bool) -> list[str]:
    """Adds up in f0 to f3, or f0 to f7 of bfloat16 words."""
    lines = []
    for device in range(devices):
        for word in range(4):
            source = f"s{device}w{word}"
            halves = (f"shl.b32 half, {source}, 16;", f"and.b32 half, {source}, 0xffff0000;")
            for index, line in enumerate(halves if narrow else (f"mov.b32 half, {source};",)):
                total = f"f{2 * word + index if narrow else word}"
                first = f"mov.b32 {total}, half;"
                lines.append(f"{line} {first if device == 0 else f'mov.b32 g, half; add.rn.f32 {total}, {total}, g;'}")
    return lines


def _store(narrow: bool, to_narrow: bool) -> list[str]:
    """Writes the sums to `out`, four words a store."""
    values = 8 if narrow else 4
    if not to_narrow:
        stores = range(0, values, 4)
        return [f"st.global.v4.f32 [out+{4 * n}], {{{', '.join(f'f{n + i}' for i in range(4))}}};" for n in stores]
    words = values // 2
    lines = [f"cvt.rn.bf16x2.f32 v{index}, f{2 * index + 1}, f{2 * index};" for index in range(words)]
    return [*lines, f"st.global.v{words}.b32 [out], {{{', '.join(f'v{index}' for index in range(words))}}};"]


def program(
    devices: int, units: int, channel: int, narrow: bool, to_narrow: bool, polls: int = POLLS, trap: bool = True
) -> str:
    """What a thread does, in PTX; its operands are the addresses of table, input and output.

    `narrow` and `to_narrow`: input and output are bfloat16 and not float32. The grid may play several devices: then
    block b belongs to row b // (blocks of a device) of each operand.
    """
    blocks = -(-units // THREADS)
    inbox = channel * layout.channel_bytes(devices)
    out_bytes = layout.UNIT * (1 + (narrow > to_narrow)) // (1 + (to_narrow > narrow))
    peers = ", ".join(f"peer{device}" for device in range(devices + devices % 2))
    received = ", ".join(f"s{device}w<4>" for device in range(devices))
    lines = [
        "{ .reg .pred p, q; .reg .b32 t, u, r, turn, rank, count, empty, half; .reg .f32 g;",
        f".reg .b32 v<4>, {received}; .reg .f32 f<8>;",
        f".reg .b64 a, x, out, row, own, rank64, here, there, {peers};",
        f"mov.u32 t, %tid.x; mov.u32 u, %ctaid.x; div.u32 r, u, {blocks}; rem.u32 u, u, {blocks};",
        f"mad.lo.u32 u, u, {THREADS}, t; setp.ge.u32 p, u, {units}; @p bra DONE_${{:uid}};",
        f"mad.lo.u32 t, r, {units}, u; mad.wide.u32 x, t, {layout.UNIT}, $1; mad.wide.u32 out, t, {out_bytes}, $2;",
        f"ld.global.v4.b32 {{{_words('v')}}}, [x];",
        f"mad.wide.u32 row, r, {4 * layout.row_words(devices)}, $0; ld.global.nc.v2.b64 {{own, rank64}}, [row];",
    ]
    for device in range(0, devices, 2):
        lines.append(f"ld.global.nc.v2.b64 {{peer{device}, peer{device + 1}}}, [row+{16 + 8 * device}];")
    lines += [
        f"add.s64 own, own, {inbox}; mad.wide.u32 a, u, 4, own; ld.relaxed.sys.global.b32 turn, [a];",
        "add.u32 count, turn, 1; st.relaxed.sys.global.b32 [a], count;",
        f"and.b32 turn, turn, 1; mul.wide.u32 there, turn, {layout.turn_bytes(devices)};",
        f"mad.wide.u32 there, u, {layout.UNIT}, there; add.s64 here, own, there;",
        f"add.s64 here, here, {layout.COUNTERS}; cvt.u32.u64 rank, rank64;",
        f"mad.wide.u32 there, rank, {layout.RUN}, there; add.s64 there, there, {inbox + layout.COUNTERS};",
    ]
    body = [*_send(devices), *_receive(devices, polls, trap), *_sum(devices, narrow), *_store(narrow, to_narrow)]
    return "\n".join([*lines, *body, "DONE_${:uid}: }"])


def all_reduce(
    table: jax.Array,
    x: jax.Array,
    dtype: Any,
    *,
    devices: int,
    channel: int = 0,
    polls: int = POLLS,
    trap: bool = True,
) -> jax.Array:
    """Sums of `x` [R, N] over `devices` devices in `dtype`, for the R of them whose rows of the table are given.

    R is one in a mesh; all of them on one GPU is a way to try the kernel. After so many `polls` without an answer it
    traps, which ends the process, or else gives NaN for what has not come. Raises `NotImplementedError` for types other
    than float32 and bfloat16 and for sums that an inbox does not hold or that are not whole units.
    """
    narrow, to_narrow = (jnp.dtype(kind) == jnp.bfloat16 for kind in (x.dtype, dtype))
    rows, size = x.shape
    if {jnp.dtype(x.dtype), jnp.dtype(dtype)} - {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}:
        raise NotImplementedError(f"a sum of {x.dtype} in {jnp.dtype(dtype)}: float32 and bfloat16 are served")
    units, rest = divmod(size * x.dtype.itemsize, layout.UNIT)
    if rest or not 0 < units <= layout.CAPACITY or devices > layout.MOST_DEVICES:
        raise NotImplementedError(
            f"a sum of {size} {x.dtype} over {devices} devices: not whole units, or too large; served are 1 to "
            f"{layout.CAPACITY} units of {layout.UNIT} bytes and up to {layout.MOST_DEVICES} devices"
        )
    asm = program(devices, units, channel, narrow, to_narrow, polls, trap)

    def body(table: Any, x: Any, out: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
        def run(_: Any, *refs: Any) -> None:
            wide = ir.IntegerType.get_signless(64)
            addresses = (llvm.ptrtoint(wide, utils.memref_ptr(ref)) for ref in refs)
            utils.inline_ptx(asm, *addresses, has_side_effects=True)

        run(table, x, out)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, size), dtype),
        grid=(rows * -(-units // THREADS),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name="all_reduce",
    )(table, x)


def on_gpu(x: jax.Array, axis: str, table: jax.Array | None, dtype: jnp.dtype, channel: int) -> jax.Array:
    """See `pallas.collectives.all_reduce`; refuses with `NotImplementedError` where this kernel does not serve."""
    require_capability("one-shot sum", HOPPER, BLACKWELL)
    if table is None:
        raise NotImplementedError("the one-shot sum needs a table of inboxes (`collectives.connect`), there is none")
    if not 0 <= channel < layout.CHANNELS:
        raise ValueError(f"channel {channel} is unknown, expected 0 to {layout.CHANNELS - 1}")
    devices = jax.lax.axis_size(axis)
    return all_reduce(table, x.reshape(1, x.size), dtype, devices=devices, channel=channel).reshape(x.shape)
