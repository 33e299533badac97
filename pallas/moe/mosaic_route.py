"""Routing as one kernel: sigmoid, bias, the best experts of every token and their weights.

A warpgroup serves a token. Its thread t holds E / 128 neighbouring experts, so an order by thread and register is one
by id. The k-th best of the threads' best scores bounds the k best of all from below, and whatever reaches it in one of
those k threads, rarely more than a few above k, is put in order by counting what comes before it: equal scores go to
the lower id. Scores are compared as integers of the same order, so that NaNs have a place as well.
"""

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf
from jaxtyping import Array, Float32

from pallas import inline
from pallas.dispatch import BLACKWELL, HOPPER, require_capability
from pallas.moe import xla
from pallas.moe.types import Routing

THREADS = 128
WARPS = 4
MOST_CHOSEN = 32
MOST_EXPERTS = 2048
LIMIT, COUNT, LIST = 4 * THREADS, 4 * THREADS + 4, 4 * THREADS + 16
"""Bytes in shared memory behind the threads' best: the bound, the number of those that reach it, their keys and ids."""


def require_supported(experts: int, k: int) -> None:
    """Raises `NotImplementedError` with the reason for a call that the kernel does not serve."""
    if experts % THREADS or experts > MOST_EXPERTS:
        raise NotImplementedError(
            f"the routing kernel serves up to {MOST_EXPERTS} experts in multiples of {THREADS}, got {experts}"
        )
    if not 0 < k <= min(MOST_CHOSEN, experts // WARPS):
        raise NotImplementedError(f"the routing kernel serves 1 to {MOST_CHOSEN} experts a token, got {k}")


def words(experts: int, k: int) -> int:
    """32-bit words of shared memory that `select` works in."""
    return LIST // 4 + 2 * k * (experts // THREADS)


def on_gpu(logits: Float32[Array, "N E"], correction_bias: Float32[Array, " E"], *, k: int, scaling: float) -> Routing:
    """See `pallas.moe.choose`. Refuses with `NotImplementedError` what the kernel does not serve."""
    require_capability("moe routing", HOPPER, BLACKWELL)
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
            smem((words(experts, k),), jnp.int32),
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
    logits: Any, bias: Any, ids: Any, weights: Any, scores: Any, work: Any, best: Any, *, k: int, scaling: float
) -> None:
    """`select` for interpretation on a CPU."""
    made = xla.choose(logits[...][None], bias[...], k=k, scaling=scaling)
    ids[...], weights[...] = made.ids[0], made.weights[0]


def select(
    logits: Any, bias: Any, ids: Any, weights: Any, scores: Any, work: Any, best: Any, *, k: int, scaling: float
) -> None:
    """Writes `ids` and `weights` [k] of one token, whose `logits` are [E]; the last three are shared memory."""
    refs = logits, bias, ids, weights, scores, work, best
    experts = bias.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
    def run(_: Any, *refs: Any) -> None:
        logits, bias, ids, weights = (mgpu.utils.memref_ptr(ref) for ref in refs[:4])
        scores, work, best = (inline.shared_address(ref) for ref in refs[4:])
        thread = arith.remui(mgpu.utils.thread_idx(), inline.i32(THREADS))
        keys = _keys(logits, bias, scores, thread, experts // THREADS)
        own = functools.reduce(arith.maxsi, keys)
        _leave(own, work, thread)
        mgpu.utils.warpgroup_barrier()
        rank = _rank(own, work, thread, k)
        mgpu.utils.warpgroup_barrier()
        _list(keys, rank, work, thread, k)
        mgpu.utils.warpgroup_barrier()
        _order(work, best, thread, k)
        mgpu.utils.warpgroup_barrier()
        _write(scores, best, ids, weights, thread, k, scaling)

    run(*refs)


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
    return inline.asm([i32] * each, " ".join(lines), constraints, logits, bias, scores, first)


def _leave(own: ir.Value, work: ir.Value, thread: ir.Value) -> None:
    """Each thread's best key; nothing is listed yet."""
    start = arith.addi(work, arith.shli(thread, inline.i32(2)))
    text = f".reg .pred p; st.shared.b32 [$0], $1; setp.eq.u32 p, $3, 0; @p st.shared.b32 [$2+{COUNT}], 0;"
    inline.asm([], text, "r,r,r,r", start, own, work, thread)


def _rank(own: ir.Value, work: ir.Value, thread: ir.Value, k: int) -> ir.Value:
    """How many threads' best come before this one's, of equal ones the lower thread; the k-th leaves its key."""
    lines = [".reg .b32 w, below, limit, rank, a, b, c, d, m, l; .reg .pred p;"]
    lines.append("shr.u32 w, $3, 5; add.s32 below, $1, -1;")
    lines.append("match.any.sync.b32 m, $1, 0xffffffff; mov.u32 l, %lanemask_lt; and.b32 m, m, l; popc.b32 rank, m;")
    for warp in range(WARPS):
        lines.append(f"setp.gt.u32 p, w, {warp}; selp.b32 limit, below, $1, p;")  # of earlier warps equal ones count
        for four in range(8):
            lines.append(f"ld.shared.v4.b32 {{a, b, c, d}}, [$2+{128 * warp + 16 * four}];")
            lines += [f"setp.gt.s32 p, {x}, limit; @p add.s32 rank, rank, 1;" for x in "abcd"]
    lines.append(f"setp.eq.u32 p, rank, {k - 1}; @p st.shared.b32 [$2+{LIMIT}], $1; mov.b32 $0, rank;")
    return inline.asm([inline.word()], " ".join(lines), "=&r,r,r,r", own, work, thread)[0]


def _list(keys: list[ir.Value], rank: ir.Value, work: ir.Value, thread: ir.Value, k: int) -> None:
    """Keys and ids, in any order, of what reaches the bound in the threads of the k best."""
    each = len(keys)
    place, work_at, thread_at = (f"${each + i}" for i in range(3))
    lines = [".reg .b32 limit, n, at, e; .reg .pred q;" + "".join(f".reg .pred p{i};" for i in range(each))]
    lines.append(f"setp.lt.u32 q, {place}, {k}; ld.shared.b32 limit, [{work_at}+{LIMIT}]; mov.b32 n, 0;")
    lines += [f"setp.ge.and.s32 p{i}, ${i}, limit, q; @p{i} add.s32 n, n, 1;" for i in range(each)]
    lines.append(f"@q atom.shared.add.u32 at, [{work_at}+{COUNT}], n; mul.lo.s32 e, {thread_at}, {each};")
    lines.append(f"shl.b32 at, at, 3; add.s32 at, at, {work_at};")
    for i in range(each):
        lines.append(f"@p{i} st.shared.v2.b32 [at+{LIST}], {{${i}, e}}; @p{i} add.s32 at, at, 8; add.s32 e, e, 1;")
    inline.asm([], " ".join(lines), ",".join(["r"] * (each + 3)), *keys, rank, work, thread)


def _order(work: ir.Value, best: ir.Value, thread: ir.Value, k: int) -> None:
    """Puts each listed expert before which fewer than k come at its place."""
    word = inline.word()
    (count,) = inline.asm([word], f"ld.shared.b32 $0, [$1+{COUNT}];", "=r,r", work)
    mine = scf.ForOp(thread, count, inline.i32(THREADS))
    with ir.InsertionPoint(mine.body):
        key, turned = _listed(work, mine.induction_variable)
        others = scf.ForOp(inline.i32(0), count, inline.i32(1), [inline.i32(0)])
        with ir.InsertionPoint(others.body):
            other = _listed(work, others.induction_variable)
            text = ".reg .b64 a, b; .reg .pred p; mov.b64 a, {$3, $2}; mov.b64 b, {$5, $4};"
            text += "setp.gt.s64 p, a, b; mov.b32 $0, $1; @p add.s32 $0, $0, 1;"
            scf.yield_(inline.asm([word], text, "=&r,r,r,r,r,r", others.inner_iter_args[0], *other, key, turned))
        text = f".reg .pred p; .reg .b32 a, e; setp.lt.u32 p, $0, {k}; shl.b32 a, $0, 2; add.s32 a, a, $2;"
        inline.asm([], text + "not.b32 e, $1; @p st.shared.b32 [a], e;", "r,r,r", others.results[0], turned, best)
        scf.yield_([])


def _listed(work: ir.Value, number: ir.Value) -> list[ir.Value]:
    """Key of a listed expert, and its id with all bits turned: lower ids are larger."""
    start = arith.addi(work, arith.shli(number, inline.i32(3)))
    text = f".reg .b32 e; ld.shared.v2.b32 {{$0, e}}, [$2+{LIST}]; not.b32 $1, e;"
    return inline.asm([inline.word()] * 2, text, "=&r,=&r,r", start)


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
    inline.asm([], " ".join(lines), "r,r,l,l,r", scores, best, ids, weights, thread)
