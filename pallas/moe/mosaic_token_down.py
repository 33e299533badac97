"""The second product of `mosaic_token`: a part of the depth of all outputs, for one token, in registers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf, vector

from pallas import inline
from pallas.moe import mosaic_pair
from pallas.moe.mosaic_expand import DEPTH, ROWS
from pallas.moe.mosaic_pair import CODE_UNIT, COLUMNS, ENDS, LOW, WIDE
from pallas.moe.mxfp4 import GROUP, dequantize

PIECE = 256
"""Most rows of a copy."""
AT_ONCE, AT_ONCE_OF_FEW = 4, 7
"""Scale groups whose sums wait in registers; more would spill. Where a tile has but two, several tiles run at once."""


class Down(NamedTuple):
    """How a block reads the weights of the second product."""

    part: int
    """Inputs: the block's part of the inner width."""
    outputs: int
    line: int
    """Bytes of a row that lie together in shared memory."""
    rows: int
    """Outputs of a buffer."""
    held: int
    """Rows for which a buffer has room."""
    room: int
    """Lines of a row for which a buffer has room."""
    at_once: int
    """Most scale groups whose sums wait in registers."""

    @property
    def lines(self) -> int:
        """Lines of a row."""
        return self.part // 2 // self.line

    @property
    def groups(self) -> int:
        """Scale groups of a line."""
        return 2 * self.line // GROUP

    @property
    def width(self) -> int:
        """Inputs for which the right operand has room."""
        return -(-self.part // DEPTH) * DEPTH

    @property
    def tiles(self) -> int:
        """Tiles of a buffer."""
        return self.rows // ROWS

    @property
    def stages(self) -> int:
        """Buffers that all outputs fill."""
        return self.outputs // self.rows

    @property
    def copies(self) -> int:
        """Copies of a line, of `PIECE` rows at most."""
        return next(count for count in range(-(-self.rows // PIECE), self.tiles + 1) if self.rows % (8 * count) == 0)

    @property
    def transforms(self) -> tuple[Any, ...]:
        """How lines lie in shared memory."""
        return plgpu.TilingTransform((8, self.line)), plgpu.SwizzleTransform(self.line)


def down_of(part: int, outputs: int, buffer: int, groups: int) -> Down | None:
    """As many outputs as a buffer of the first product holds, in whole tiles, or None where it holds no tile.

    `groups` warpgroups take buffers in turn.
    """
    line = next(size for size in (128, 64, 32) if part % (2 * size) == 0)
    room = 1 << (part // 2 // line - 1).bit_length()
    held = buffer // (room * line)
    usable = [rows for rows in range(ROWS, held + 1, ROWS) if outputs % rows == 0]
    even = [rows for rows in usable if outputs // rows % groups == 0]
    at_once = AT_ONCE if part > 2 * GROUP else AT_ONCE_OF_FEW
    return Down(part, outputs, line, max(even or usable), held, room, at_once) if usable else None


def scale_layout(groups: int) -> Any:
    """[64, groups] scales of a line: all of rows g and g + 8 of a warp in every lane 4 g .. 4 g + 3."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((ROWS, groups), (16, groups), (8, groups))),
        warp_dims=(-6,),
        lane_dims=(-2, plgpu.Replicated(4)),
        vector_dim=-1,
    )


def keep_pairs(hidden: Any, unit: Any, tile: jax.Array, value: jax.Array) -> None:
    """The pairs of value[r, 0], in `ENDS` layout, as inputs 64 `tile` + r of the right operand `hidden`."""
    column = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=ENDS) + tile * ROWS
    token = plgpu.broadcasted_iota(jnp.int32, value.shape, 1, layout=ENDS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(WIDE), plgpu.RefType(), ENDS, ENDS, ENDS))
    def run(_: Any, hidden: Any, unit: Any, token: Any, column: Any, value: Any) -> None:
        base, none = inline.shared_address(hidden), inline.i32(0)
        leads = arith.cmpi(arith.CmpIPredicate.eq, inline.warp_and_lane()[1], none)
        numbers = (inline.elements(x.registers) for x in (token, column, value))
        for n, c, v in zip(*numbers, strict=True):
            wanted = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, n, none))  # the same in a whole warp
            with ir.InsertionPoint(wanted.then_block):
                scale, one = mosaic_pair.scale_of_warp(v)
                writes = scf.IfOp(leads)
                with ir.InsertionPoint(writes.then_block):
                    group = arith.divui(c, inline.i32(GROUP))
                    memref.store(one, unit, [inline.index(none), inline.index(group)])
                    scf.yield_([])
                for part, byte in enumerate(mosaic_pair.parts_of(arith.mulf(v, scale))):
                    _store_byte(base, c, part, byte)
                scf.yield_([])

    run(hidden, unit, token, mosaic_pair.place(column), value)


def _store_byte(base: ir.Value, place: ir.Value, row: int, byte: ir.Value) -> None:
    """Byte `place` of `row` of a right operand in `WIDE` layout."""
    line, chunk = arith.shrui(place, inline.i32(7)), arith.andi(arith.shrui(place, inline.i32(4)), inline.i32(7))
    inside = arith.addi(arith.andi(place, inline.i32(15)), inline.i32(row * DEPTH))
    turned = arith.shli(arith.xori(chunk, inline.i32(row)), inline.i32(4))
    address = arith.addi(arith.addi(base, arith.shli(line, inline.i32(10))), arith.addi(turned, inside))
    bits = arith.extui(inline.word(), arith.bitcast(ir.IntegerType.get_signless(8), byte))
    inline.asm([], "st.shared.b8 [$0], $1;", "r,r", address, bits)


def product(
    left: Any,
    scales: tuple[jax.Array, ...],
    hidden: Any,
    unit: Any,
    out: Any,
    factor: jax.Array,
    exists: jax.Array,
    down: Down,
) -> None:
    """out[r] = `factor` times row r of a buffer times the hidden numbers; zero without an expert.

    `left` is shared memory [room, held, line] of bytes, `scales` are those of each tile and line in `scale_layout`,
    `hidden` is shared memory [8, inputs] in `WIDE` layout, `unit` [4, groups] of float32. Codes count `CODE_UNIT`.
    """
    scalar = plgpu.Layout.WG_SPLAT(())
    kinds = scalar, scalar, *(scale_layout(down.groups),) * len(scales)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(down.transforms), plgpu.RefType(WIDE), plgpu.RefType(), plgpu.RefType(), *kinds)
    )
    def run(_: Any, left: Any, hidden: Any, unit: Any, out: Any, factor: Any, exists: Any, *scales: Any) -> None:
        groups, pointer = down.lines * down.groups, inline.shared_address(left)
        indices = ((inline.index(inline.i32(0)), inline.index(inline.i32(group))) for group in range(groups))
        units = [memref.load(unit, list(place)) for place in indices]
        base = mosaic_pair.right_descriptor(hidden, down.width)
        weights = [_weights(pointer, tile, down) for tile in range(down.tiles)]
        work = [(tile, group) for tile in range(down.tiles) for group in range(groups)]
        batch = max(size for size in range(1, down.at_once + 1) if len(work) % size == 0)
        for start in range(0, len(work), batch):
            batched = work[start : start + batch]
            targets = [arith.addi(base, inline.i64(group // 4 * 64 + group % 4 * 2)) for _, group in batched]
            products = mosaic_pair.products([next(weights[tile]) for tile, _ in batched], targets, COLUMNS)
            for (tile, group), made in zip(batched, products):
                if group == 0:
                    factors = _factors(scales[tile * down.lines : (tile + 1) * down.lines], units, down)
                    sums = [arith.constant(ir.F32Type.get(), 0.0)] * len(made)
                for index, value in enumerate(made):
                    sums[index] = mosaic_pair.add_scaled(sums[index], value, factors[index // 2 % 2][group])
                if group == groups - 1:
                    _store(out, tile, sums, factor.registers.item(), exists.registers.item())

    run(left, hidden, unit, out, factor, exists, *scales)


def _factors(scales: tuple[Any, ...], units: list[ir.Value], down: Down) -> list[list[ir.Value]]:
    """What the sums of each scale group count, of rows g and g + 8."""
    each, rows = min(4, down.groups), []
    for row in range(2):
        words = [word for scale in scales for word in _words(scale.registers.flat[row])]
        found = [factor for word in words for factor in mosaic_pair.factors_of(word)[:each]]
        rows.append([arith.mulf(factor, unit) for factor, unit in zip(found, units, strict=True)])
    return rows


def _words(register: ir.Value) -> list[ir.Value]:
    """Scale bytes of a row as words of four, or of two."""
    count = ir.VectorType(register.type).shape[0]
    kind = inline.word() if count > 2 else ir.IntegerType.get_signless(16)
    held = vector.bitcast(ir.VectorType.get((max(1, count // 4),), kind), register)
    words = [vector.extract(held, dynamic_position=[], static_position=[i]) for i in range(max(1, count // 4))]
    return words if count > 2 else [arith.extui(inline.word(), word) for word in words]


def _weights(pointer: ir.Value, tile: int, down: Down) -> Any:
    """The registers of each scale group of a tile."""
    for line in range(down.lines):
        start = arith.addi(pointer, inline.i32((line * down.held + tile * ROWS) * down.line))
        yield from mosaic_pair.weights_of(start, down.line, swizzled=True)


def _store(out: ir.Value, tile: int, sums: list[ir.Value], factor: ir.Value, exists: ir.Value) -> None:
    """out[64 tile + r] = `factor` times what the first two columns of a product count, or zero."""
    f32 = ir.F32Type.get()
    warp, lane = inline.warp_and_lane()
    row = arith.addi(arith.muli(warp, inline.i32(16)), arith.divui(lane, inline.i32(4)))
    writes = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, arith.remui(lane, inline.i32(4)), inline.i32(0)))
    with ir.InsertionPoint(writes.then_block):
        for half in range(2):
            high, low = sums[2 * half : 2 * half + 2]
            joined = mosaic_pair.add_scaled(high, low, arith.constant(f32, 1 / LOW))
            number = arith.select(exists, arith.mulf(joined, factor), arith.constant(f32, 0.0))
            memref.store(number, out, [inline.index(arith.addi(row, inline.i32(tile * ROWS + 8 * half)))])
        scf.yield_([])


def emulated_product(
    left: Any,
    scales: tuple[jax.Array, ...],
    hidden: Any,
    unit: Any,
    out: Any,
    factor: jax.Array,
    exists: jax.Array,
    down: Down,
) -> None:
    """`product` for interpretation on a CPU."""
    for tile in range(down.tiles):
        total = jnp.zeros((ROWS, COLUMNS), jnp.float32)
        for line, scale in enumerate(scales[tile * down.lines : (tile + 1) * down.lines]):
            codes = dequantize(left[line, tile * ROWS : (tile + 1) * ROWS], scale, jnp.float32)
            inputs = hidden[:, line * 2 * down.line : (line + 1) * 2 * down.line].astype(jnp.float32)
            units = unit[:, line * down.groups : (line + 1) * down.groups]
            inputs = inputs * jnp.repeat(jnp.repeat(units, 2, axis=0), GROUP, axis=1)
            total += jnp.dot(mosaic_pair.interleave(codes), inputs.T, precision=lax.Precision.HIGHEST)
        joined = (total[:, 0] + total[:, 1] / LOW) / CODE_UNIT
        out[tile * ROWS : (tile + 1) * ROWS] = jnp.where(exists, joined * factor, 0.0)
