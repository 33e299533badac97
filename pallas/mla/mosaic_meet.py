"""Where the blocks of a decode launch meet that share a row and its group of queries.

When a block has written its sums, it counts itself in device memory and waits until all blocks of its row and group
have. All of them must be resident at once, one a multiprocessor. The counts lie in the kernel's own module and are
never cleared: a launch adds 2^31 to each, whatever the number of blocks, and a block waits until the highest bit
differs from what it found. So a launch leaves a count as the next one needs it, inside captured graphs and loops too.

The first warp of the last warpgroup, which has no part in joining, counts and waits for the block.
"""

from typing import Any

import jax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas.layouts import WHOLE

WARPGROUPS = 3
"""That join."""
JOINING = 128 * WARPGROUPS
THREADS = JOINING + 32
"""At the two barriers of a block: those that join, and the warp that counts."""
WRITTEN, MET = 0, 15
"""Numbers of these barriers: the block has written its sums; all have."""
POLLS = 1 << 28
"""After so many looks at a count the kernel gives up, with an error in place of a hang."""


def steps(blocks: int) -> tuple[int, int]:
    """What the first block adds to a count, and what each of the others does: 2^31 together."""
    return (1 << 31) - (blocks - 1), 1


def wait_program(counts: int, blocks: int) -> str:
    """PTX; operands: number of the count, of the block."""
    first, other = steps(blocks)
    return f"""{{ .reg .pred p; .reg .b32 i, old, now, step, polls; .reg .b64 place;
        .global .align 4 .b32 met[{counts}];
        mov.u32 i, %tid.x; sub.u32 i, i, {JOINING}; setp.ge.u32 p, i, 32; @p bra OUT;
        barrier.cta.sync {WRITTEN}, {THREADS}; setp.ne.u32 p, i, 0; @p bra THERE;
        mov.u64 place, met; mad.wide.u32 place, $0, 4, place; mov.b32 polls, 0;
        setp.eq.u32 p, $1, 0; selp.b32 step, {first}, {other}, p;
        atom.add.acq_rel.gpu.global.u32 old, [place], step; add.u32 now, old, step;
        AGAIN: xor.b32 now, now, old; setp.lt.s32 p, now, 0; @p bra THERE;
        add.u32 polls, polls, 1; setp.gt.u32 p, polls, {POLLS}; @p trap;
        ld.acquire.gpu.global.u32 now, [place]; bra AGAIN;
        THERE: bar.warp.sync 0xffffffff; barrier.cta.sync {MET}, {THREADS};
        OUT: }}"""


def wait(count: jax.Array, block: jax.Array, counts: int, blocks: int) -> None:
    """The last warpgroup: until `blocks` blocks have come to count `count` of `counts`."""
    text = wait_program(counts, blocks)

    @plgpu.inline_mgpu(arg_types=(WHOLE, WHOLE))
    def run(_: Any, *numbers: Any) -> None:
        operands = [number.registers.item() for number in numbers]
        utils.inline_ptx(text, *operands, has_side_effects=True, convergent=True)

    run(count, block)
