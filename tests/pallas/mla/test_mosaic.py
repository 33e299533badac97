"""The Mosaic GPU kernels of latent attention: decode interpreted on the CPU, all of them lowered for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas import mla
from pallas.mla import bench, mosaic, mosaic_plan, mosaic_prefill, mosaic_roles
from pallas.mla.shapes import HEADS, LATENT, OWN, PAGE, PREFILL_TOKENS, RANK, RANK_HEADS, SCALE, SHARED, VALUE
from tests.pallas.comparison import relative

INTERPRET = plgpu.InterpretGPUParams()
SMALL_RANK, SMALL_WIDTH = 128, 192


def definition(query, latents, start, lengths, heads, scale=0.1):
    """Float64 attention over the latents; padding rows (length 0) give zeros."""
    query, latents = (np.asarray(x, np.float64) for x in (query, latents))
    output = np.zeros((*query.shape[:2], SMALL_RANK))
    for b, r in np.ndindex(*query.shape[:2]):
        seen = latents[b, : min(start[b] + r // heads + 1, lengths[b])]
        if len(seen):
            scores = scale * seen @ query[b, r]
            weights = np.exp(scores - scores.max())
            output[b, r] = weights @ seen[:, :SMALL_RANK] / weights.sum()
    return output


def draw(tokens, heads, lengths, page, seed=0, extra_pages=0):
    """(query, pool, table, start, length, latents): shuffled pages, NaN wherever no token is stored."""
    rng = np.random.default_rng(seed)
    count = -(-max(lengths) // page) + extra_pages
    latents = jnp.asarray(rng.standard_normal((len(lengths), count * page, SMALL_WIDTH)), jnp.bfloat16)
    table = (1 + rng.permutation(len(lengths) * count)).reshape(len(lengths), count).astype(np.int32)
    stored = np.arange(count * page)[None] < np.asarray(lengths)[:, None]
    pool = np.full((table.size + 1, page, SMALL_WIDTH), np.nan, np.float32)
    pool[table] = np.where(stored[..., None], latents.astype(np.float32), np.nan).reshape(*table.shape, page, -1)
    query = jnp.asarray(rng.standard_normal((len(lengths), tokens * heads, SMALL_WIDTH)), jnp.bfloat16)
    length = jnp.asarray(lengths, jnp.int32)
    start = jnp.maximum(length - tokens, 0)
    return query, jnp.asarray(pool, jnp.bfloat16), jnp.asarray(table), start, length, latents


def attend(query, pool, table, start, length, heads, least=1, blocks=3, page_scale=None):
    """The kernels on a query in two pieces: what meets the latent, and the shared key's part behind other channels."""
    settings = mosaic_plan.Settings(blocks=blocks, least=least)
    options = {"heads": heads, "rank": SMALL_RANK, "scale": 0.1, "settings": settings, "interpret": INTERPRET}
    absorbed, shared = query[..., :SMALL_RANK], query[..., SMALL_RANK:]
    shared = jnp.concatenate([jnp.full((*query.shape[:2], 32), jnp.nan, query.dtype), shared], axis=-1)
    run = jax.jit(lambda *args: mosaic.attend_pages(*args, **options))
    return np.asarray(run(absorbed, shared, pool, table, start, length, page_scale))


@pytest.mark.parametrize(("tokens", "page"), [(2, 16)])
def test_decode_interpreted(tokens, page):
    """Rows of very different lengths, one of them padding; several tiles a part and parts without tokens."""
    heads, lengths = 3, [100, 0, 300]
    *args, latents = draw(tokens, heads, lengths, page)
    actual = attend(*args, heads)
    expected = definition(args[0], latents, np.asarray(args[3]), lengths, heads)
    assert not actual[1].any()
    for row in (0, 2):
        assert relative(actual[row], expected[row]) < 1e-2


def test_decode_of_8_bit_latents_interpreted():
    """Against the definition on the very values that 8 bits hold, and within 6 % of the one on bfloat16 latents.

    Pages differ in scale by up to 32 times, and what no token has written is not a number.
    """
    heads, lengths = 3, [150]
    query, pool, table, start, length, latents = draw(1, heads, lengths, 64)
    smaller = jnp.asarray([1, 1, 1 / 2, 1 / 32], jnp.bfloat16)[:, None, None]
    stored = ~jnp.isnan(pool)
    narrow, scale = mla.quantize_pages(jnp.nan_to_num(pool) * smaller)
    narrow = jnp.where(stored, narrow, jnp.asarray(jnp.nan, narrow.dtype))
    actual = attend(query, narrow, table, start, length, heads, blocks=2, page_scale=scale)
    held = mla.gather_pages(jnp.nan_to_num(narrow), table, scale)
    assert relative(actual, definition(query, held, np.asarray(start), lengths, heads)) < 1e-2
    latents = latents * jnp.repeat(smaller[table], 64, axis=2).reshape(1, -1, 1)
    assert relative(actual, definition(query, latents, np.asarray(start), lengths, heads)) < 6e-2


@pytest.mark.slow
@pytest.mark.parametrize("page", [8, 64, 128])
@pytest.mark.parametrize("tokens", [1, 9])
def test_decode_interpreted_on_page_edges(tokens, page):
    heads, lengths = 2, [tokens, 63, 64, 65, 127, 128, 130]
    *args, latents = draw(tokens, heads, lengths, page, extra_pages=1)
    actual = attend(*args, heads)
    expected = definition(args[0], latents, np.asarray(args[3]), lengths, heads)
    for row in range(len(lengths)):
        assert relative(actual[row], expected[row]) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 9])
def test_rows_do_not_depend_on_their_neighbours_interpreted(tokens):
    heads, lengths = 2, [130, 5, 70]
    *args, _ = draw(tokens, heads, lengths, 64)
    together = attend(*args, heads)
    order = np.array([2, 0, 1])
    query, pool, table, start, length = args
    moved = attend(query[order], pool, table[order], start[order], length[order], heads)
    assert np.array_equal(moved, together[order])
    alone = attend(query[:1], pool, table[:1], start[:1], length[:1], heads)
    assert np.array_equal(alone[0], together[0])


@pytest.mark.slow
def test_blocks_of_several_parts_give_the_same_bits_interpreted():
    """Of eight rows a block takes three parts one after another; of one row, one."""
    heads, lengths = 3, [130, 5, 70, 0, 64, 65, 190, 1]
    query, pool, table, start, length, latents = draw(1, heads, lengths, 64)
    assert turns(query, pool, table, heads) == 3
    together = attend(query, pool, table, start, length, heads)
    expected = definition(query, latents, np.asarray(start), lengths, heads)
    for row in (0, 6):
        one = slice(row, row + 1)
        assert turns(query[one], pool, table, heads) == 1
        assert np.array_equal(attend(query[one], pool, table[one], start[one], length[one], heads)[0], together[row])
        assert relative(together[row], expected[row]) < 1e-2


def turns(query, pool, table, heads):
    options = {"heads": heads, "rank": SMALL_RANK, "scale": 0.1, "interpret": INTERPRET}
    return mosaic_plan.make(query.shape, pool, table.shape[1], mosaic_plan.Settings(blocks=3, least=1), **options).turns


@pytest.mark.slow
def test_several_tokens_equal_single_steps_interpreted():
    """Three tokens at once, and one after another: rounding of the weights is all that may differ."""
    heads, tokens, lengths = 2, 3, [90]
    query, pool, table, start, length, _ = draw(tokens, heads, lengths, 16)
    pool = jnp.nan_to_num(pool)
    together = attend(query, pool, table, start, length, heads)
    for token in range(tokens):
        here = slice(token * heads, (token + 1) * heads)
        single = attend(query[:, here], pool, table, start + token, start + token + 1, heads)
        assert relative(together[:, here], single) < 4e-3


@pytest.mark.slow
def test_tops_that_are_raised_at_once_or_late_give_the_same_bits(monkeypatch):
    """Scores that grow along the row, so that tops are raised again and again."""
    heads, lengths = 3, [330]
    query, pool, table, start, length, _ = draw(1, heads, lengths, 64)
    grown = pool * (1 + jnp.arange(pool.shape[0], dtype=jnp.float32)[:, None, None]).astype(jnp.bfloat16)
    late = attend(query, grown, table, start, length, heads, blocks=1)
    monkeypatch.setattr(mosaic_roles, "SLACK", 0.0)
    at_once = attend(query, grown, table, start, length, heads, blocks=1)
    assert np.array_equal(late, at_once)


@pytest.mark.slow
def test_a_wider_table_changes_no_bits():
    """Short tables have smaller groups of queries, and parts that begin at places known in advance."""
    heads, lengths = 56, [130]
    query, pool, table, start, length, _ = draw(1, heads, lengths, 64)
    short = attend(query, pool, table, start, length, heads, blocks=12)
    wide = attend(query, pool, jnp.pad(table, ((0, 0), (0, 40))), start, length, heads, blocks=12)
    assert np.array_equal(short, wide)


@pytest.mark.parametrize("queries", [1, 12, 48, 49, 96, 108, 864])
def test_groups_cover_the_queries(queries):
    groups, most = mosaic_plan.group_queries(queries)
    assert groups * most >= queries > (groups - 1) * most
    assert most % 8 == 0
    assert most <= mosaic_plan.MOST_QUERIES


def test_registers_of_all_roles_are_what_a_block_starts_with():
    """A warpgroup that asks for more than the others leave waits for ever."""
    for registers in (mosaic_roles.REGISTERS, mosaic_roles.REGISTERS_NARROW):
        assert sum(registers.values()) <= registers_at_start(len(registers))
    for groups, (compute, fetch) in mosaic_prefill.REGISTERS.items():
        assert groups * compute + fetch <= registers_at_start(groups + 1)


def registers_at_start(warpgroups):
    """Registers a thread of a block that fills a multiprocessor, a multiple of 8, times the warpgroups."""
    return 65536 // (128 * warpgroups) // 8 * 8 * warpgroups


@pytest.mark.parametrize("length", [0, 1, 64, 65, 8192, 131072, 1048576])
def test_parts_cover_a_row_and_depend_on_nothing_else(length):
    parts, least = 132, 4
    step = int(mosaic_plan.part_tiles(jnp.int32(length), parts, least))
    assert step >= least
    assert step * parts * mosaic_plan.TILE >= length


@pytest.mark.parametrize(
    ("rows", "groups", "parts", "step"), [(1, 4, 33, 4), (2, 1, 64, 2), (8, 1, 64, 2), (64, 1, 88, 24)]
)
def test_blocks_take_as_many_short_parts_as_end_soonest(rows, groups, parts, step):
    """Blocks all at once take one part each; no other number of parts ends sooner; long parts are for many rows."""
    settings = mosaic_plan.DEFAULT
    turns = mosaic_plan.parts_of_block(rows, groups, parts, step, settings)
    waves = {n: -(-rows * groups * -(-parts // n) // settings.blocks) for n in range(1, settings.turns + 1)}
    assert turns in waves
    if waves[1] == 1:
        assert turns == 1
    elif step < mosaic_plan.SHORT:
        assert all(waves[turns] * (turns * step + 2) <= waves[n] * (n * step + 2) for n in waves)
    else:
        assert waves[turns] >= 4


def lowers(function, *args):
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(
    ("rows", "heads", "dtype"),
    [(1, HEADS, jnp.bfloat16), (64, RANK_HEADS, jnp.bfloat16), (64, RANK_HEADS, jnp.float8_e4m3fn)],
)
def test_decode_lowers_for_cuda(rows, heads, dtype):
    """Rows of 1,048,576 tokens in pools of 1.2 to 77 GB: offsets pass 2^31."""
    array, pages = jax.ShapeDtypeStruct, 2**20 // PAGE
    args = (
        array((rows, heads, RANK), jnp.bfloat16),
        array((rows, heads, OWN + SHARED), jnp.bfloat16),
        array((rows * pages + 1, PAGE, LATENT), dtype),
        array((rows, pages), jnp.int32),
        *(array((rows,), jnp.int32),) * 2,
        array((rows * pages + 1,), jnp.float32),
    )
    lowers(lambda *args: mosaic.attend_pages(*args, heads=heads, rank=RANK, scale=SCALE), *args)


def test_prefill_lowers_for_cuda():
    array, tokens = jax.ShapeDtypeStruct, PREFILL_TOKENS
    args = (
        array((1, tokens - 3, HEADS, OWN + SHARED), jnp.bfloat16),
        array((1, 2 * tokens, LATENT), jnp.bfloat16),
        array((HEADS, OWN, RANK), jnp.bfloat16),
        array((HEADS, VALUE, RANK), jnp.bfloat16),
        *(array((1,), jnp.int32),) * 2,
    )
    lowers(lambda *args: mosaic.differentiable_prefill(*args, SCALE), *args)


@pytest.mark.parametrize(
    ("dtype", "rank", "page", "reason"),
    [
        (jnp.float32, RANK, 64, "float32"),
        (jnp.bfloat16, 384, 64, "multiples of 256 latent values in rows of multiples of 64, got 384 in 576"),
        (jnp.bfloat16, RANK, 24, "24"),
        (jnp.float8_e4m3fn, 256, 64, "8-bit latents of 512 values in rows of 576, got 256 in 576"),
    ],
)
def test_decode_refusals_carry_their_reason(dtype, rank, page, reason):
    array, query = jax.ShapeDtypeStruct, jnp.bfloat16 if dtype == jnp.float8_e4m3fn else dtype
    with pytest.raises(NotImplementedError, match=reason):
        mosaic_plan.require_supported(array((1, 12, LATENT), query), array((3, page, LATENT), dtype), rank)


@pytest.mark.parametrize(
    ("dtype", "own", "keys", "reason"),
    [(jnp.float32, 128, 64, "float32"), (jnp.bfloat16, 96, 64, "96"), (jnp.bfloat16, 128, 60, "60")],
)
def test_prefill_refusals_carry_their_reason(dtype, own, keys, reason):
    array = jax.ShapeDtypeStruct
    query, own_keys = array((1, 64, 2, own + 64), dtype), array((1, keys, 2, own), dtype)
    shared, value = array((1, keys, 64), dtype), array((1, keys, 2, 128), dtype)
    with pytest.raises(NotImplementedError, match=reason):
        mosaic_prefill.require_supported(query, own_keys, shared, value)


def test_gradients_are_the_portable_form_s(monkeypatch):
    """The kernel itself has no derivative; here the portable form stands for its values."""
    portable = lambda *args: mla.prefill(*args[:6], scale=args[6], implementation="xla")  # noqa: E731
    monkeypatch.setattr(mosaic, "expanded", portable)
    rng = np.random.default_rng(0)
    shapes = ((1, 5, 2, 24), (1, 8, 40), (2, 16, 32), (2, 24, 32))
    floats = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    span = jnp.asarray([3], jnp.int32), jnp.asarray([8], jnp.int32)

    def gradients(run):
        loss = lambda *floats: jnp.sum(run(*floats, *span, 0.2) ** 2)  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*floats)

    for a, b in zip(gradients(mosaic.differentiable_prefill), gradients(portable), strict=True):
        assert relative(a, b) < 1e-5


@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_a_named_kernel_refuses_without_a_gpu(op):
    zeros = lambda *shape: jnp.zeros(shape, jnp.bfloat16)  # noqa: E731
    ups = zeros(2, 128, 512), zeros(2, 128, 512)
    span = jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    memory = (zeros(1, 64, 576),) if op == "prefill" else (zeros(2, 64, 576), jnp.ones((1, 1), jnp.int32))
    with pytest.raises(NotImplementedError, match="GPU"):
        getattr(mla, op)(zeros(1, 1, 2, 192), *memory, *ups, *span, scale=0.1, implementation="mosaic")


@pytest.mark.slow
def test_the_gate_of_the_benchmark_is_green():
    assert all(check.passed for check in bench.gate("xla"))
