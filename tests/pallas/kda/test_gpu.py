"""The Mosaic GPU kernels on a GPU, at sizes that interpretation cannot reach.

`JAX_PLATFORMS=cuda python -m pytest -m gpu tests/pallas/kda/test_gpu.py`, or as a script with a line per check, for all
parts or those named: order, regimes, packed, long, pools, tokens, layers.
Expected values are a float64 recurrence on the device; memory is poisoned with NaN before every call.
"""

import functools
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas import kda

BOUND = 1e-2
LENGTHS = np.arange(1, 131, dtype=np.int32)
TOKENS, HEADS, DIM = 130, 2, 128
STARTS = np.cumsum([0, *(-(-LENGTHS // 64) * 64)], dtype=np.int32)[:-1]
LINE = int(STARTS[-1]) + 256
"""Tokens of the line in which all rows are packed, some after the last row."""
CUTS = (1, 23, 64, 77)
SLOTS = 1400
"""Of 96 heads: 8.8 GB, so offsets pass 2^31 in bytes and in elements."""
FEW_AND_MANY = [(1, 12), (3, 96)]
LAYERS = 69
REGIMES = [
    *((gates, "random") for gates in ("random", "slow", "bound", "mixed")),
    ("random", "identical"),
    ("slow", "collinear"),
]


def logit(x):
    return np.log(x / (1 - x))


@functools.partial(jax.jit, static_argnums=range(5))
def draw(rows, tokens, heads, gates="random", keys="random", seed=0):
    """(qkvz, decay logits, beta logits, weights, state, window) on the device."""
    source = iter(jax.random.split(jax.random.key(seed), 12))
    normal = lambda *shape: jax.random.normal(next(source), shape, jnp.float32)  # noqa: E731
    shape = (rows, tokens, heads, DIM)
    qkvz, beta, conv = normal(rows, tokens, heads, 4, DIM), normal(rows, tokens, heads), 0.5 * normal(4, heads, 3, DIM)
    plain, slow = normal(*shape), jax.random.uniform(next(source), shape, jnp.float32, 1e-4, 0.05) / 5
    slow = jnp.log(slow / (1 - slow))
    fast = jnp.full(shape, 40.0)
    third = (jnp.arange(DIM) % 3 == 0)[None, None, None]
    logits = {"random": plain, "slow": slow, "bound": fast, "mixed": jnp.where(third, fast, slow)}[gates]
    bias = normal(heads, DIM) * (gates == "random")
    if keys != "random":
        conv = conv.at[:, :, 1].set(jnp.array([0, 0, 0, 1.0])[:, None, None])
        shared = normal(rows, 1, heads, DIM)
        noise = 0.05 if keys == "collinear" else 0.0
        qkvz = qkvz.at[..., 1, :].set(shared + noise * qkvz[..., 1, :])
        beta = 4 + jnp.abs(beta)
    weights = kda.KdaWeights(conv, 0.3 * normal(heads) * (gates == "random"), bias, 1 + 0.1 * normal(DIM))
    narrow = lambda x: x.astype(jnp.bfloat16)  # noqa: E731
    state, window = 0.3 * normal(rows, heads, DIM, DIM), normal(rows, 3, heads, 3, DIM)
    return narrow(qkvz), narrow(logits), narrow(beta), weights, state, narrow(window)


@functools.cache
def recurrence(operands):
    def run(call, length):
        call = jax.tree.map(lambda x: x.astype(jnp.float64), call)
        qkvz, decay, beta, weights, state, window = call
        rows = jnp.concatenate([window, qkvz[..., :3, :]], axis=1)
        mixed = sum(rows[:, tap : tap + qkvz.shape[1]] * weights.conv[tap][None, None] for tap in range(4))
        mixed = mixed * jax.nn.sigmoid(mixed)
        unit = lambda x: x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)  # noqa: E731
        query, key, value = unit(mixed[..., 0, :]), unit(mixed[..., 1, :]), mixed[..., 2, :]
        if operands is not None:
            query, key, value = (x.astype(operands).astype(jnp.float64) for x in (query, key, value))
        speed = jnp.exp(weights.a_log)[None, None, :, None]
        decay = jnp.exp(-5 * jax.nn.sigmoid(speed * (decay + weights.dt_bias[None, None])))
        beta = jax.nn.sigmoid(beta)

        def step(state, item):
            index, query, key, value, decay, beta = item
            new = decay[..., None] * state
            write = beta[..., None] * (value - jnp.einsum("bhkv,bhk->bhv", new, key, precision="highest"))
            new = new + key[..., None] * write[..., None, :]
            reading = jnp.einsum("bhkv,bhk->bhv", new, query, precision="highest") / np.sqrt(DIM)
            live = (index < length)[:, None, None]
            return jnp.where(live[..., None], new, state), jnp.where(live, reading, 0.0)

        tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (query, key, value, decay, beta))
        state, readings = jax.lax.scan(step, state, (jnp.arange(qkvz.shape[1]), *tokens))
        readings = jnp.moveaxis(readings, 0, 1)
        scale = jax.lax.rsqrt(jnp.mean(readings**2, axis=-1, keepdims=True) + 1e-5)
        return readings * scale * weights.norm[None, None, None] * jax.nn.sigmoid(qkvz[..., 3, :]), state

    return jax.jit(run)


def float64(call, length, operands=None):
    """(output, final state) token by token in float64; q, k, v rounded once to `operands` where given."""
    with jax.enable_x64(True):
        return jax.device_get(recurrence(operands)(call, length))


def relative(actual, expected):
    """Relative RMS; infinite when either side is not finite."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        return np.inf
    return float(np.sqrt(((actual - expected) ** 2).mean() / max((expected**2).mean(), 1e-30)))


def differing(actual, expected):
    """Number of elements that are not bit for bit equal."""
    return float(sum(np.sum(np.asarray(a) != np.asarray(b)) for a, b in zip(actual, expected)))


def poison():
    """Leaves NaN in the memory that the next call's results and workspaces will lie in."""
    blocks = [jnp.full((size,), jnp.nan, jnp.float32) for size in (1 << 29, 1 << 27, 1 << 27, 1 << 24, 1 << 24)]
    jax.block_until_ready(blocks)
    del blocks


def poisoned(run, *args):
    poison()
    return jax.block_until_ready(run(*args))


def prefill(*args):
    return kda.prefill(*args, implementation="mosaic")


def compile_all(programs):
    with ThreadPoolExecutor(12) as pool:
        made = pool.map(lambda item: jax.jit(item[0], **item[2]).lower(*item[1]).compile(), programs.values())
        return dict(zip(programs, made))


def abstract(*args):
    return jax.eval_shape(lambda: draw(*args))


def regime_checks(run):
    """Every length from 1 to 130 as a row of one call, in every regime, with NaN in all padding."""
    run, length = run["lengths"], jnp.asarray(LENGTHS)
    for gates, keys in REGIMES:
        call = draw(len(LENGTHS), TOKENS, HEADS, gates, keys)
        beyond = jnp.arange(TOKENS)[None] >= length[:, None]
        blank = lambda x: jnp.where(beyond.reshape(*beyond.shape, *(1,) * (x.ndim - 2)), jnp.nan, x)  # noqa: E731,B023
        result = poisoned(run, *(blank(x) for x in call[:3]), *call[3:], length)
        (output, state), (near, close) = float64(call, length), float64(call, length, jnp.bfloat16)
        for name, a, b, c in (("output", result.output, output, near), ("state", result.state, state, close)):
            # Twice what one rounding of the operands alone does to this input, or the usual bound if that is larger.
            yield f"lengths 1..130, {gates} gates, {keys} keys: {name}", relative(a, b), max(BOUND, 2 * relative(c, b))
        yield "  output past the length", float(jnp.abs(jnp.where(beyond[..., None, None], result.output, 0)).sum()), 0


def order_checks(run):
    """Rows in another order, rows without tokens, and continuation from a state at unaligned positions."""
    run, length = run["lengths"], jnp.asarray(LENGTHS)
    call = draw(len(LENGTHS), TOKENS, HEADS)
    straight = run(*call, length)
    order = jnp.asarray(np.random.default_rng(0).permutation(len(LENGTHS)))
    permuted = poisoned(run, *(x[order] for x in call[:3]), call[3], *(x[order] for x in call[4:]), length[order])
    yield "rows in another order", differing(permuted[:3], [x[order] for x in straight[:3]]), 0
    empty = poisoned(run, *call, jnp.where(length % 2 == 0, 0, length))
    kept = [
        jnp.where((length % 2 == 0).reshape(-1, *(1,) * (x.ndim - 1)), x, y) for x, y in zip(call[4:], straight[1:])
    ]
    yield "rows without tokens keep state and window", differing(empty[1:3], kept), 0
    whole = run(*call, jnp.full_like(length, TOKENS))
    for cut in CUTS:
        first = run(*call, jnp.full_like(length, cut))
        rest = (jnp.roll(x, -cut, axis=1) for x in call[:3])
        second = poisoned(run, *rest, call[3], first.state, first.window, jnp.full_like(length, TOKENS - cut))
        yield f"continued after {cut}: state", relative(second.state, whole.state), BOUND
        yield "  output", relative(second.output[:, : TOKENS - cut], whole.output[:, cut:]), BOUND
        yield "  window", differing([second.window], [whole.window]), 0


def packed_checks(run):
    """Rows of every length from 1 to 130 packed in one line, NaN between them, against the same rows padded."""
    call, length = draw(len(LENGTHS), TOKENS, HEADS), jnp.asarray(LENGTHS)
    apart = run["lengths"](*call, length)
    place = np.concatenate([start + np.arange(count) for start, count in zip(STARTS, LENGTHS)])
    row, token = np.repeat(np.arange(len(LENGTHS)), LENGTHS), np.concatenate([np.arange(x) for x in LENGTHS])
    line = (jnp.full((LINE, *x.shape[2:]), jnp.nan, x.dtype).at[place].set(x[row, token]) for x in call[:3])
    packed = poisoned(run["packed"], *line, *call[3:], jnp.asarray(STARTS), length)
    wanted = jnp.zeros(packed.output.shape, packed.output.dtype).at[place].set(apart.output[row, token])
    yield "packed rows: output", differing([packed.output], [wanted]), 0
    yield "  state and window", differing(packed[1:3], apart[1:3]), 0


def long_checks(run):
    """A rank's sequence in segments against float64; rows whose inputs pass 2^31 bytes against one row alone."""
    for gates in ("random", "slow"):
        call, length = draw(1, 8192, 12, gates), jnp.array([8190], jnp.int32)
        result, (output, state) = poisoned(run["rank"], *call, length), float64(call, length)
        yield f"8190 tokens in segments, 12 heads, {gates} gates: output", relative(result.output, output), BOUND
        yield "  state", relative(result.state, state), BOUND
    call, length = draw(3, 8192, 96), jnp.array([8192, 100, 8001], jnp.int32)
    whole = poisoned(run["rows"], *call, length)
    one = run["row"](*(x[2:] for x in call[:3]), call[3], *(x[2:] for x in call[4:]), length[2:])
    yield "row 2 of 3 x 8192 x 96 heads equals that row alone", differing([x[2:] for x in whole[:3]], one[:3]), 0


def token_checks(run):
    """Eight verified and committed tokens in every regime against float64, and as eight decode steps bit for bit.

    Few heads run as clusters of blocks, many as one block a head.
    """
    width = 8
    for rows, heads in FEW_AND_MANY:
        slot, length = jnp.arange(1, rows + 1, dtype=jnp.int32), jnp.full(rows, width, jnp.int32)
        for gates, keys in REGIMES:
            *tokens, weights, state, window = draw(rows, width, heads, gates, keys)
            call = (*tokens, weights, state, window)
            (output, final), (near, close) = float64(call, length), float64(call, length, jnp.bfloat16)
            held = tuple(jnp.concatenate([jnp.full_like(x[:1], jnp.nan), x]) for x in (state, window))
            verified = poisoned(run[f"verify {heads}"], *tokens, weights, *held, slot, length)
            committed = poisoned(run[f"commit {heads}"], verified.records, tokens[0], *held, slot, length)
            name = f"{width} tokens, {rows} x {heads} heads, {gates} gates, {keys} keys"
            for what, a, b, c in (
                ("verify output", verified.output, output, near),
                ("committed state", committed.state_pool[slot], final, close),
            ):
                yield f"{name}: {what}", relative(a, b), max(BOUND, 2 * relative(c, b))
            outputs = []
            for token in range(width):
                at = (x[:, token] for x in tokens)
                step = run[f"decode {heads}"](*at, weights, *held, slot, jnp.zeros(rows, bool))
                outputs, held = [*outputs, step.output], (step.state_pool, step.window_pool)
            yield "  decode output", differing([jnp.stack(outputs, axis=1)], [verified.output]), 0
            pools = [(x[slot], y[slot]) for x, y in zip(held, committed)]
            yield "  decode state and window", sum(differing([x], [y]) for x, y in pools), 0


def layer_checks(run):
    """Layers committed together against each alone, bit for bit."""
    width, heads, rows = 5, 12, 3
    slot, accepted = jnp.array([2, 0, 4], jnp.int32), jnp.array([5, 4, 1], jnp.int32)
    records, qkvz, pools = [], [], []
    for layer in range(LAYERS):
        *tokens, weights, state, window = draw(rows, width, heads, seed=layer)
        held = kda.Pools(*(jnp.concatenate([x, x]) for x in (state, window)))
        verified = run["verify"](*tokens, weights, *held, slot, jnp.full(rows, width, jnp.int32))
        records.append(verified.records)
        qkvz.append(tokens[0])
        pools.append(held)
    together = poisoned(run["layers"], records, qkvz, pools, slot, accepted)
    alone = [run["layer"](*layer, *pool, slot, accepted) for *layer, pool in zip(records, qkvz, pools)]
    yield f"{LAYERS} layers together equal each alone", differing(*map(jax.tree.leaves, (together, alone))), 0
    moved = sum(differing([x.state_pool[slot[0]]], [y.state_pool[slot[0]]]) > 0 for x, y in zip(together, pools))
    yield "  layers whose state did not change", LAYERS - moved, 0


def pool_checks(run):
    """Slots at the end of pools of more than 2^31 elements do what those of a small pool do; others keep their NaN."""
    width, heads, far = 8, 96, jnp.array([SLOTS - 1, 0, SLOTS - 7], jnp.int32)
    near, length = jnp.array([5, 0, 2], jnp.int32), jnp.array([8, 8, 5], jnp.int32)
    qkvz, decay, beta, weights, state, window = draw(3, width, heads)

    def pools(slots, slot):
        states = jnp.full((slots, *state.shape[1:]), jnp.nan).at[slot].set(state).at[0].set(jnp.nan)
        windows = jnp.full((slots, *window.shape[1:]), jnp.nan, window.dtype).at[slot].set(window).at[0].set(jnp.nan)
        return states, windows

    results = {}
    for name, slots, slot in (("far", SLOTS, far), ("near", 6, near)):
        place = jnp.where(slot == 0, 1, slot)  # verify reads the dummy slot, so a real one stands in
        held = pools(slots, place)
        verified = poisoned(run[f"verify {name}"], qkvz, decay, beta, weights, *held, slot, length)
        held = run[f"commit {name}"](verified.records, qkvz, *held, slot, length)
        fresh = jnp.array([False, False, True])
        stepped = run[f"decode {name}"](qkvz[:, 0], decay[:, 0], beta[:, 0], weights, *held, slot, fresh)
        live = slot[slot != 0]
        results[name] = [
            verified.output,
            *verified.records,
            stepped.output,
            stepped.state_pool[live],
            stepped.window_pool[live],
        ]
        others = np.setdiff1d(np.arange(slots), np.asarray(place))
        yield f"{name} slots: others keep their NaN", float(jnp.sum(~jnp.isnan(stepped.state_pool[others]))), 0
        finite = all(bool(jnp.isfinite(x).all()) for x in results[name])
        yield "  and results are finite", float(not finite), 0
        del held, stepped
    yield f"slots of {SLOTS} equal slots of 6", differing(results["far"], results["near"]), 0


def pool_programs():
    width, heads = 8, 96
    call = abstract(3, width, heads)
    array = jax.ShapeDtypeStruct
    ids, flags = array((3,), jnp.int32), array((3,), bool)
    record = array((3, width, heads, DIM), jnp.float32)
    named = {"implementation": "mosaic"}
    for name, slots in (("far", SLOTS), ("near", 6)):
        held = tuple(array((slots, *x.shape[1:]), x.dtype) for x in call[4:])
        first = tuple(array((x.shape[0], *x.shape[2:]), x.dtype) for x in call[:3])
        yield f"verify {name}", (functools.partial(kda.verify, **named), (*call[:4], *held, ids, ids), {})
        commit = (kda.Records(record, record, record), call[0], *held, ids, ids)
        yield f"commit {name}", (functools.partial(kda.commit, **named), commit, {"donate_argnums": (2, 3)})
        decode = (*first, call[3], *held, ids, flags)
        yield f"decode {name}", (functools.partial(kda.decode, **named), decode, {"donate_argnums": (4, 5)})


def token_arguments(rows, width, heads):
    call, ids = abstract(rows, width, heads), count(rows)
    held = tuple(jax.ShapeDtypeStruct((rows + 1, *x.shape[1:]), x.dtype) for x in call[4:])
    first = tuple(jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype) for x in call[:3])
    record = jax.ShapeDtypeStruct((rows, width, heads, DIM), jnp.float32)
    verify = (*call[:4], *held, ids, ids)
    commit = (kda.Records(record, record, record), call[0], *held, ids, ids)
    return verify, commit, (*first, call[3], *held, ids, jax.ShapeDtypeStruct((rows,), bool))


def token_programs():
    named = {"implementation": "mosaic"}
    for rows, heads in FEW_AND_MANY:
        verify, commit, decode = token_arguments(rows, 8, heads)
        yield f"verify {heads}", (functools.partial(kda.verify, **named), verify, {})
        yield f"commit {heads}", (functools.partial(kda.commit, **named), commit, {})
        yield f"decode {heads}", (functools.partial(kda.decode, **named), decode, {})


def layer_programs():
    named = {"implementation": "mosaic"}
    call, ids = abstract(3, 5, 12), count(3)
    held = kda.Pools(*(jax.ShapeDtypeStruct((6, *x.shape[1:]), x.dtype) for x in call[4:]))
    record = jax.ShapeDtypeStruct((3, 5, 12, DIM), jnp.float32)
    records = kda.Records(record, record, record)
    each = tuple([x] * LAYERS for x in (records, call[0], held))
    yield "verify", (functools.partial(kda.verify, **named), (*call[:4], *held, ids, ids), {})
    yield "layer", (functools.partial(kda.commit, **named), (records, call[0], *held, ids, ids), {})
    yield "layers", (functools.partial(kda.commit_layers, **named), (*each, ids, ids), {})


def row_programs():
    yield "lengths", (prefill, (*abstract(len(LENGTHS), TOKENS, HEADS), count(len(LENGTHS))), {})


def packed_programs():
    call, ids = abstract(len(LENGTHS), TOKENS, HEADS), count(len(LENGTHS))
    line = (jax.ShapeDtypeStruct((LINE, *x.shape[2:]), x.dtype) for x in call[:3])
    yield from row_programs()
    yield "packed", (functools.partial(kda.prefill_packed, implementation="mosaic"), (*line, *call[3:], ids, ids), {})


def long_programs():
    yield "rank", (prefill, (*abstract(1, 8192, 12), count(1)), {})
    yield "rows", (prefill, (*abstract(3, 8192, 96), count(3)), {})
    yield "row", (prefill, (*abstract(1, 8192, 96), count(1)), {})


def count(rows):
    return jax.ShapeDtypeStruct((rows,), jnp.int32)


PARTS = {
    "order": (row_programs, order_checks),
    "regimes": (row_programs, regime_checks),
    "packed": (packed_programs, packed_checks),
    "long": (long_programs, long_checks),
    "pools": (pool_programs, pool_checks),
    "tokens": (token_programs, token_checks),
    "layers": (layer_programs, layer_checks),
}


def checks(part):
    """(name, error, bound) of every check of a part, each part with programs of its own."""
    programs, run = PARTS[part]
    yield from run(compile_all(dict(programs())))


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS)
def test_kernels_on_a_gpu(part):
    failed = [f"{name}: {error:.2e} > {bound:.0e}" for name, error, bound in checks(part) if not error <= bound]
    assert not failed, "\n".join(failed)


if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        for name, error, bound in checks(part):
            print(f"{'ok  ' if error <= bound else 'FAIL'} {name}: {error:.2e} (bound {bound:.0e})", flush=True)
