"""The draft's layers as finished products: the same as the layers one by one, with stand-ins for the kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import params
from k3jax.cache import Rows
from k3jax.dspark import block_kernels, quantized
from k3jax.dspark.config import DraftGqa, DraftMla, Rope
from k3jax.dspark.model import DSpark, one_by_one
from k3jax.dspark.tensors import draft_specs
from k3jax.speculation import draft_bench
from pallas.draft import latents
from pallas.gemv import finish, finished
from pallas.gemv.int8 import restore
from tests import small_draft
from tests.pallas.comparison import relative

TOKENS, HEADS, PAGE = 8, 4, 8


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_compilation: None) -> None:
    """For all tests of this file."""


def half(x):
    return (x / 16).astype(jnp.float16)


def normed(x, squares, channels, eps):
    return x * jax.lax.rsqrt(jnp.sum(squares, axis=0) / channels + eps)[:, None]


def rotated(x, angles):
    """The last axis in pairs; angles are of the token, the first axis."""
    shape = (TOKENS, *[1] * (x.ndim - 2), -1)
    cos, sin = (part.reshape(shape) for part in (angles[:TOKENS], angles[TOKENS:]))
    first, second = x[..., 0::2], x[..., 1::2]
    return jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)


def multiplied(x, matrix):
    return x.astype(jnp.float32) * 16 @ (restore(matrix.codes).astype(jnp.float32) * matrix.scale[:, None]).T


def slices(x, matrices):
    return tuple(jnp.stack([multiplied(x, matrix) / 2] * 2) for matrix in matrices)


def by_head(x, matrices, dtype):
    heads, _, depth = matrices.shape
    own = x.reshape(TOKENS, heads, -1)[..., :depth].astype(jnp.float32)
    product = jnp.einsum("thk,hnk->thn", own, matrices.astype(jnp.float32)).reshape(TOKENS, -1)
    return half(product) if dtype == jnp.float16 else product.astype(dtype)


def finish_product(x, matrix, kind, operands):
    """What a finished product gives."""
    product, depth = multiplied(x, matrix), x.shape[1]
    match kind:
        case finish.Residual():
            stream = (operands[0] + product).astype(jnp.bfloat16)
            wide = stream.astype(jnp.float32)
            squares = jnp.zeros((4, TOKENS)).at[2].set(jnp.sum(wide**2, axis=1))
            return stream, half(wide * operands[1].astype(jnp.float32)), squares
        case finish.Gated(eps):
            gate, up = jnp.unstack(normed(product, operands[0], depth, eps).reshape(TOKENS, -1, 2), axis=-1)
            return (half(jax.nn.silu(gate) * up),)
        case finish.Normed(eps):
            return (normed(product, operands[0], depth, eps),)
        case finish.Rotated(own, width):
            heads = product.reshape(TOKENS, -1, width)
            turned = jnp.concatenate([heads[..., :own], rotated(heads[..., own:], operands[0])], axis=-1)
            return (turned.reshape(TOKENS, -1).astype(jnp.bfloat16),)


def store(query, latent, squares, channels, norms, angles, pool, places, eps):
    """Tokens that the sequence has no page for are the test's to leave out."""
    query, latent = (normed(x.sum(axis=0), squares, channels, eps) for x in (query, latent))
    rank = norms.latent.size
    own = [normed(x, jnp.sum(x**2, axis=1)[None], x.shape[1], eps) for x in (query, latent[:, :rank])]
    row = jnp.concatenate([own[1] * norms.latent.astype(jnp.float32), rotated(latent[:, rank:], angles)], axis=1)
    for token in range(TOKENS - 1):
        position = places.length[0] + token
        page = places.page_table[position // PAGE]
        pool = pool.at[page, position % PAGE].set(row[token].astype(pool.dtype))
    return half(own[0] * norms.query.astype(jnp.float32)), pool


def values(absorbed, query, pool, table, start, length, value_up, *, heads, rank, scale):
    rows = pool[table[0]].reshape(-1, pool.shape[2]).astype(jnp.float32)
    shared = pool.shape[2] - rank
    full = jnp.concatenate([absorbed[0], query[0, :, -shared:]], axis=-1).astype(jnp.float32)
    scores = full @ rows.T * scale
    last = jnp.minimum(start[0] + jnp.arange(full.shape[0]) // heads, length[0] - 1)
    seen = jnp.arange(rows.shape[0])[None] <= last[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return by_head((weights @ rows[:, :rank]).reshape(TOKENS, -1), value_up, jnp.float16)


@pytest.fixture
def config(tiny_config):
    sizes = {"q_lora_rank": 512, "kv_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    return dataclasses.replace(
        small_draft.settings(tiny_config, taps=(0,), mask=3, confidence=False),
        hidden_size=512,
        intermediate_size=512,
        num_layers=2,
        block_size=TOKENS - 1,
        attention=DraftMla(num_heads=HEADS, v_head_dim=128, **sizes),
        rope=Rope(theta=1e4, interleaved=True),
    )


def build(config):
    rng = np.random.default_rng(4)

    def fill(spec):
        values = rng.standard_normal(spec.shape) / (5 if spec.init == "ones" else np.sqrt(spec.shape[-1]))
        return jnp.asarray(1 + values if spec.init == "ones" else values, jnp.bfloat16)

    tree = params.map_tree(fill, draft_specs(config))
    return DSpark(config, quantized.quantize(tree, jnp.asarray(rng.standard_normal((72, 512)), jnp.bfloat16)))


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr(block_kernels, "require_capability", lambda *_: None)
    for name, stand_in in (("finished", finish_product), ("by_head", by_head), ("slices", slices)):
        monkeypatch.setattr(finished, name, stand_in)
    monkeypatch.setattr(latents, "store", store)
    monkeypatch.setattr(block_kernels, "_values", values)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_layers_are_the_same(config, causal):
    draft = build(dataclasses.replace(config, causal=causal))
    x = jax.random.normal(jax.random.key(0), (1, TOKENS, 512), jnp.bfloat16)
    pools = tuple(jax.random.normal(jax.random.key(i), (6, PAGE, 320), jnp.bfloat16) for i in range(2))
    rows = Rows(*(jnp.asarray(v, jnp.int32) for v in ([1], [[2, 5]], [6], [TOKENS - 1])))
    position = rows.length[:, None] + jnp.arange(TOKENS, dtype=jnp.int32)[None]
    head = draft.optional["head"][...]
    hidden, none, after = jax.jit(lambda x, pools: one_by_one(draft, x, position, pools, rows, head))(x, pools)
    assert none is None
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        actual, logits, pools = jax.jit(lambda x, pools: block_kernels.run(draft, x, position, pools, rows, head))(
            x, pools
        )
    assert relative(actual[:, :-1], hidden[:, :-1]) < 0.02
    for one, other in zip(pools, after, strict=True):
        assert relative(one, other) < 0.02
    codes = restore(head.codes).astype(jnp.float32) * head.scale[:, None]
    assert relative(logits[0, :-1], hidden[0, :-1].astype(jnp.float32) @ codes.T) < 0.02


@pytest.mark.slow
def test_lowers_for_cuda(config, monkeypatch):
    monkeypatch.setattr(block_kernels, "require_capability", lambda *_: None)
    draft, rows = build(config), Rows(*(jnp.zeros(shape, jnp.int32) for shape in (1, (1, 2), 1, 1)))
    x, pools = jnp.zeros((1, TOKENS, 512), jnp.bfloat16), (jnp.zeros((6, PAGE, 320), jnp.bfloat16),) * 2
    head, position = draft.optional["head"][...], jnp.zeros((1, TOKENS), jnp.int32)
    run = jax.jit(lambda x, pools: block_kernels.run(draft, x, position, pools, rows, head))
    lowered = run.trace(x, pools).lower(lowering_platforms=("cuda",)).as_text()
    for name in ("gemv", "draft_latents", "mla_decode"):
        assert name in lowered


@pytest.mark.usefixtures("stand_ins")
def test_other_drafts_are_refused(config):
    x = jnp.zeros((1, TOKENS, 512), jnp.bfloat16)
    pool = jnp.zeros((3, PAGE, 320), jnp.bfloat16)
    two = jnp.zeros((2, TOKENS, 512), jnp.bfloat16)
    whole = DSpark(config, params.map_tree(lambda spec: jnp.zeros(spec.shape, jnp.bfloat16), draft_specs(config)))
    grouped = dataclasses.replace(config, attention=DraftGqa(num_heads=4, num_kv_heads=2, head_dim=128))
    split = dataclasses.replace(config, rope=Rope(theta=1e4, interleaved=False))
    cases = (
        (build(config), two, "tokens of one row"),
        (whole, x, "8 bits"),
        (build(grouped), x, "MLA"),
        (build(split), x, "MLA"),
    )
    for draft, given, reason in cases:
        with pytest.raises(NotImplementedError, match=reason):
            block_kernels.require_supported(draft, given, pool)


@pytest.mark.slow
def test_benchmark_of_the_pass_has_a_green_gate():
    assert all(check.passed for check in draft_bench.gate())
