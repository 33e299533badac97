"""The grouped product of the Triton backend: Triton source, imported only where `triton` is installed.

Weights are the left operand, 2-bit exponents and 1-bit mantissas with a scale per 32 inputs as released; the compiler
turns `dot_scaled` into native block-scaled products where the GPU has them, and into bfloat16 ones elsewhere.
"""

import triton
import triton.language as tl


@triton.jit
def situ(gate, up, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """`pallas.activation.situ` on float32 blocks; tanh(x) = 2 sigmoid(2 x) - 1."""
    capped = BETA * (2.0 * tl.sigmoid(gate * (2.0 / BETA)) - 1.0) * tl.sigmoid(gate)
    return capped * (LINEAR_BETA * (2.0 * tl.sigmoid(up * (2.0 / LINEAR_BETA)) - 1.0))


@triton.jit
def grouped_product(
    rows,  # [R, K] bfloat16, or float8_e4m3fn under MXFP8
    row_scale,  # [R, K // 32] bytes under MXFP8, else anything
    weights,  # [E, PLANES, M, K // 2] bytes
    scale,  # [E, PLANES, M, K // 32] bytes
    expert,  # [blocks] int32
    used,  # [1] int32
    out,  # [R, M] bfloat16
    K: tl.constexpr,
    M: tl.constexpr,
    PLANES: tl.constexpr,
    MXFP8: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Each block of BLOCK_N rows times its expert's weights; two planes are gate and up of SiTU."""
    TILE: tl.constexpr = BLOCK_M // PLANES  # a tile has as many rows of each plane
    block = tl.program_id(0) // (M // TILE)
    tile = tl.program_id(0) % (M // TILE)
    if block >= tl.load(used):
        return
    index = tl.arange(0, BLOCK_M)
    row = (tl.load(expert + block).to(tl.int64) * PLANES + index // TILE) * M + tile * TILE + index % TILE
    token = (block * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    group = tl.arange(0, BLOCK_K // 32)
    codes = weights + row[:, None] * (K // 2) + tl.arange(0, BLOCK_K // 2)[None, :]
    scales = scale + row[:, None] * (K // 32) + group[None, :]
    inputs = rows + token[None, :] * K + tl.arange(0, BLOCK_K)[:, None]
    input_scales = row_scale + token[:, None] * (K // 32) + group[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(K // BLOCK_K):
        if MXFP8:
            x, s = tl.load(inputs), tl.load(input_scales)
            sums = tl.dot_scaled(tl.load(codes), tl.load(scales), "e2m1", x, s, "e4m3", sums)
        else:
            sums = tl.dot_scaled(tl.load(codes), tl.load(scales), "e2m1", tl.load(inputs), None, "bf16", sums)
        inputs += BLOCK_K
        input_scales += BLOCK_K // 32
        codes += BLOCK_K // 2
        scales += BLOCK_K // 32
    if PLANES == 2:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, TILE, BLOCK_N)), (1, 2, 0)))
        sums = situ(gate, up, BETA, LINEAR_BETA)
    column = tile * TILE + tl.arange(0, TILE)
    tl.store(out + token[None, :] * M + column[:, None], sums.to(tl.bfloat16))
