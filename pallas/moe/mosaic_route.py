"""Routing as one kernel: sigmoid, bias, the best experts of every token and their weights.

A warpgroup serves a token. Its thread t holds E / 128 neighbouring experts, so an order by lane and register is one by
id. Each warp takes the k best of its quarter one by one: a maximum over the warp, then the lowest lane that has it.
The place of such a candidate among those of all four warps is the number that come before it: equal scores go to the
lower id. Scores are compared as integers of the same order, so that NaNs have a place as well.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf
from jaxtyping import Array, Float32

from pallas import inline
from pallas.dispatch import require_hopper
from pallas.moe import xla
from pallas.moe.types import Routing

THREADS = 128
WARPS = 4
MOST_CHOSEN = 32
MOST_EXPERTS = 2048
WORDS_OF_CANDIDATE = 2
"""32-bit words of a candidate in shared memory: its key and its expert."""
LOWEST = -(1 << 31)
"""A key below that of every number, also of a NaN as the GPU makes them."""


def require_supported(experts: int, k: int) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernel does not serve."""
    if experts % THREADS or experts > MOST_EXPERTS:
        raise NotImplementedError(
            f"the routing kernel serves up to {MOST_EXPERTS} experts in multiples of {THREADS}, got {experts}"
        )
    if not 0 < k <= min(MOST_CHOSEN, experts // WARPS):
        raise NotImplementedError(f"the routing kernel serves 1 to {MOST_CHOSEN} experts a token, got {k}")


def on_gpu(logits: Float32[Array, "N E"], correction_bias: Float32[Array, " E"], *, k: int, scaling: float) -> Routing:
    """See `pallas.moe.choose`. Refuses with `NotImplementedError` what the kernel does not serve."""
    require_hopper("moe routing")
    require_supported(logits.shape[1], k)
    return differentiable(logits, correction_bias, k, scaling)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def differentiable(logits: Array, correction_bias: Array, k: int, scaling: float) -> Routing:
    """The kernel's values; gradients are those of the portable form, with the choice as it was made."""
    return choose(logits, correction_bias, k=k, scaling=scaling)


def _forward(logits: Array, correction_bias: Array, k: int, scaling: float) -> tuple:
    routing = choose(logits, correction_bias, k=k, scaling=scaling)
    return routing, (logits, correction_bias, routing.ids)


def _backward(k: int, scaling: float, saved: tuple, gradient: Routing) -> tuple:
    logits, correction_bias, ids = saved
    _, pull_back = jax.vjp(partial(xla.weights_of, ids=ids, scaling=scaling), logits)
    return *pull_back(gradient.weights), jnp.zeros_like(correction_bias)


differentiable.defvjp(_forward, _backward)


def choose(
    logits: Float32[Array, "N E"],
    correction_bias: Float32[Array, " E"],
    *,
    k: int,
    scaling: float,
    interpret: Any = None,
) -> Routing:
    """`api.choose` in one launch, a block for each token."""
    tokens, experts = logits.shape
    run = partial(select if interpret is None else emulated_select, k=k, scaling=scaling)

    def body(logits: Any, bias: Any, ids: Any, weights: Any, *scratch: Any) -> None:
        token = lax.axis_index("token")
        run(logits.at[token], bias, ids.at[token], weights.at[token], *scratch)

    smem = plgpu.SMEM
    kernel = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((tokens, k), jnp.int32), jax.ShapeDtypeStruct((tokens, k), jnp.float32)),
        grid=(tokens,),
        grid_names=("token",),
        num_threads=1,
        thread_name="group",
        scratch_types=(
            smem((experts,), jnp.float32),
            smem((WORDS_OF_CANDIDATE, WARPS * k), jnp.int32),
            smem((MOST_CHOSEN,), jnp.int32),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="moe_route",
    )
    return Routing(*kernel(logits, correction_bias))


def emulated_select(
    logits: Any, bias: Any, ids: Any, weights: Any, scores: Any, candidates: Any, best: Any, *, k: int, scaling: float
) -> None:
    """`select` for interpretation on a CPU."""
    made = xla.choose(logits[...][None], bias[...], k=k, scaling=scaling)
    ids[...], weights[...] = made.ids[0], made.weights[0]


def select(
    logits: Any, bias: Any, ids: Any, weights: Any, scores: Any, candidates: Any, best: Any, *, k: int, scaling: float
) -> None:
    """Writes `ids` and `weights` [k] of one token, whose `logits` are [E]."""
    refs = logits, bias, ids, weights, scores, candidates, best
    experts = bias.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
    def run(_: Any, *refs: Any) -> None:
        logits, bias, ids, weights = (mgpu.utils.memref_ptr(ref) for ref in refs[:4])
        scores, candidates, best = (inline.shared_address(ref) for ref in refs[4:])
        thread = arith.remui(mgpu.utils.thread_idx(), inline.i32(THREADS))
        each = experts // THREADS
        keys = _keys(logits, bias, scores, thread, each)
        _candidates(keys, candidates, thread, k)
        mgpu.utils.warpgroup_barrier()
        _merge(candidates, best, thread, k)
        mgpu.utils.warpgroup_barrier()
        _write(scores, best, ids, weights, thread, k, scaling)

    run(*refs)


def _asm(results: list[ir.Type], text: str, constraints: str, *operands: ir.Value) -> list[ir.Value]:
    if not results:
        llvm.inline_asm(None, operands, "{" + text + "}", constraints, asm_dialect=0, has_side_effects=True)
        return []
    kind = llvm.StructType.get_literal(results) if len(results) > 1 else results[0]
    made = llvm.inline_asm(kind, operands, "{" + text + "}", constraints, asm_dialect=0, has_side_effects=True)
    return [llvm.extractvalue(one, made, [i]) for i, one in enumerate(results)] if len(results) > 1 else [made]


SIGMOID = """
    max.NaN.f32 x, x, 0fC2F00000; min.NaN.f32 x, x, 0f42F00000;
    mul.rn.f32 t, x, 0fBFB8AA3B; cvt.rni.f32.f32 n, t;
    neg.f32 f, n; fma.rn.f32 f, x, 0fBFB8AA3B, f; fma.rn.f32 f, x, 0fB2A57060, f;
    ex2.approx.f32 f, f; ex2.approx.f32 n, n;
    mul.rn.f32 t, f, n; add.rn.f32 t, t, 0f3F800000; rcp.rn.f32 s, t;
"""
"""s = 1 / (1 + exp(-x)), x clipped to 120: log2(e) in two parts, so that the exponent's error does not grow with x."""


def _keys(logits: ir.Value, bias: ir.Value, scores: ir.Value, thread: ir.Value, each: int) -> list[ir.Value]:
    """Biased scores of the thread's experts as integers of the same order; plain ones go to shared memory."""
    i32 = ir.IntegerType.get_signless(32)
    first = arith.muli(thread, inline.i32(4 * each))
    lines = [".reg .f32 x, b, s, t, n, f; .reg .b64 o, l, c; .reg .b32 k, m;"]
    lines.append(f"cvt.u64.u32 o, ${each + 3}; add.s64 l, ${each}, o; add.s64 c, ${each + 1}, o;")
    lines += [f".reg .f32 x{i}, b{i};" for i in range(each)]
    lines += [f"ld.global.f32 x{i}, [l+{4 * i}]; ld.global.f32 b{i}, [c+{4 * i}];" for i in range(each)]
    lines.append(f".reg .b32 a; add.s32 a, ${each + 2}, ${each + 3};")
    for i in range(each):
        lines.append(f"mov.f32 x, x{i}; {SIGMOID} st.shared.f32 [a+{4 * i}], s;")
        lines.append(f"add.rn.f32 t, s, b{i}; add.rn.f32 t, t, 0f00000000; mov.b32 k, t;")
        lines.append(f"shr.s32 m, k, 31; and.b32 m, m, 0x7fffffff; xor.b32 ${i}, k, m;")
    constraints = ",".join(["=&r"] * each + ["l", "l", "r", "r"])
    return _asm([i32] * each, " ".join(lines), constraints, logits, bias, scores, first)


def _candidates(keys: list[ir.Value], candidates: ir.Value, thread: ir.Value, k: int) -> None:
    """The k best of each warp, in order: keys, and behind those of all warps their experts."""
    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    each, warp = len(keys), arith.divui(thread, inline.i32(32))
    lane, first = arith.remui(thread, inline.i32(32)), arith.muli(thread, inline.i32(each))
    start = arith.addi(candidates, arith.muli(warp, inline.i32(4 * k)))
    zero, one, last = (arith.constant(index, ir.IntegerAttr.get(index, x)) for x in (0, 1, k))
    loop = scf.ForOp(zero, last, one, [start, *keys])
    with ir.InsertionPoint(loop.body):
        place, *held = loop.inner_iter_args
        constraints = ",".join(["=&r"] * each + ["r"] * (each + 3))
        left = _asm([i32] * each, _take(each, 4 * WARPS * k), constraints, *held, place, lane, first)
        scf.yield_([arith.addi(place, inline.i32(4)), *left])


def _take(each: int, experts_at: int) -> str:
    """One turn: `$0 ..` are the keys without the warp's best one, then come keys, place, lane and first expert."""
    held, place, lane, first = each, f"${2 * each}", f"${2 * each + 1}", f"${2 * each + 2}"
    lines = [".reg .b32 m, g, b, i, e; .reg .pred p, q, u;"]
    lines.append(f"mov.b32 m, ${held};" + "".join(f"max.s32 m, m, ${held + i};" for i in range(1, each)))
    lines.append("redux.sync.max.s32 g, m, 0xffffffff; setp.eq.s32 p, m, g; vote.sync.ballot.b32 b, p, 0xffffffff;")
    lines.append(f"brev.b32 b, b; clz.b32 b, b; setp.eq.u32 q, b, {lane}; mov.b32 i, {each};")
    for i in reversed(range(each)):  # the lowest of equal ones is found last
        lines.append(f"setp.eq.and.s32 u, ${held + i}, g, q; selp.b32 i, {i}, i, u;")
    for i in range(each):
        lines.append(f"setp.eq.s32 u, i, {i}; selp.b32 ${i}, {LOWEST}, ${held + i}, u;")
    lines.append(f"add.s32 e, {first}, i; @q st.shared.b32 [{place}], g; @q st.shared.b32 [{place}+{experts_at}], e;")
    return " ".join(lines)


def _merge(candidates: ir.Value, best: ir.Value, thread: ir.Value, k: int) -> None:
    """Puts the expert of each candidate before which fewer than k come at its place; the list is in order of ids."""
    count = WARPS * k
    lines = [".reg .b32 a, mine, below, limit, key, rank, e; .reg .pred p, q;"]
    lines.append(f"setp.lt.u32 q, $2, {count}; selp.b32 a, $2, 0, q; shl.b32 a, a, 2; add.s32 a, a, $0;")
    lines.append(f"ld.shared.b32 mine, [a]; ld.shared.b32 e, [a+{4 * count}];")
    lines.append("add.s32 below, mine, -1; mov.b32 rank, 0;")
    for other in range(count):
        lines.append(f"ld.shared.b32 key, [$0+{4 * other}]; setp.gt.u32 p, $2, {other};")
        lines.append("selp.b32 limit, below, mine, p; setp.gt.s32 p, key, limit; @p add.s32 rank, rank, 1;")
    lines.append(f"setp.lt.and.u32 q, rank, {k}, q; shl.b32 rank, rank, 2; add.s32 rank, rank, $1;")
    lines.append("@q st.shared.b32 [rank], e;")
    _asm([], " ".join(lines), "r,r,r", candidates, best, thread)


def _write(
    scores: ir.Value, best: ir.Value, ids: ir.Value, weights: ir.Value, thread: ir.Value, k: int, scaling: float
) -> None:
    """Ids and weights by the first warp, a lane for each; weights are scores over their sum, times `scaling`."""
    bits = int(jnp.float32(scaling).view(jnp.int32))
    lines = [".reg .b32 a, e; .reg .f32 s, sum, other; .reg .b64 o, p; .reg .pred q;"]
    lines.append(f"setp.lt.u32 q, $4, {k}; mov.f32 s, 0f00000000;")
    lines.append("shl.b32 a, $4, 2; cvt.u64.u32 o, a; add.s32 a, a, $1;")
    lines.append("@q ld.shared.b32 e, [a]; @q shl.b32 a, e, 2; @q add.s32 a, a, $0; @q ld.shared.f32 s, [a];")
    lines.append("mov.f32 sum, s;")
    for distance in (16, 8, 4, 2, 1):
        lines.append(f"shfl.sync.bfly.b32 other, sum, {distance}, 31, 0xffffffff; add.rn.f32 sum, sum, other;")
    lines.append(f"add.rn.f32 sum, sum, 0f1E3CE508; div.rn.f32 s, s, sum; mul.rn.f32 s, s, 0f{bits & 0xFFFFFFFF:08X};")
    lines.append("add.s64 p, $2, o; @q st.global.b32 [p], e; add.s64 p, $3, o; @q st.global.f32 [p], s;")
    _asm([], " ".join(lines), "r,r,l,l,r", scores, best, ids, weights, thread)
