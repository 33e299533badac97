"""A checkpoint against itself: every pair of forms that must agree, layer by layer, on its own weights.

    KDA in chunks            one token at a time from the cached state
    MLA expanded             absorbed, over cached latents
    packed MXFP4 experts     the same experts as plain matrices
    no cache                 prefill into a cache, then decode

Inputs of the single layers are random and as large as a normalised hidden state.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from k3jax.cache import LayerCache, Rows, layer_cache
from k3jax.layers.kda import Kda
from k3jax.layers.mla import FEW_QUERIES, Mla
from k3jax.layers.moe import LatentMoe
from k3jax.runtime import Model
from k3jax.states import as_float
from k3jax.verification.compare import Comparison, compare
from k3jax.verification.observe import observe
from pallas import moe
from pallas.activation import situ
from pallas.precision import einsum

TOKENS = 80
"""More than one chunk of KDA, and no multiple of one."""

DECODED = 4
"""Tokens of the whole model that are fed one at a time."""

_E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def run(model: Model, tolerance: float, tokens: int = TOKENS) -> Iterator[Comparison]:
    """One comparison per layer and form, then the whole model with and without a cache.

    `tokens` is a multiple of `FEW_QUERIES`, so that it splits into calls of absorbed attention.
    """
    rng = np.random.default_rng(0)
    shape = (1, tokens, model.config.hidden_size)
    x = model.place(rng.standard_normal(shape, np.float32).astype(model.dtype))
    for layer, block in enumerate(model.graph.merge(model.leaves).layers):
        if model.config.is_mla(layer):
            yield _attention(model, layer, block.attention, x, FEW_QUERIES, "absorbed against expanded", tolerance)
        else:
            yield _attention(model, layer, block.attention, x, 1, "recurrent against chunked", tolerance)
        if isinstance(block.ffn, LatentMoe):
            yield _experts(layer, block.ffn, rng, model.dtype, tolerance)
    yield from _whole(model, rng, tokens, tolerance)


@functools.partial(jax.jit, static_argnames="graph")
def _whole_sequence(graph: nnx.GraphDef[Any], state: Any, x: Float[Array, "1 T D"]) -> Float[Array, "1 T D"]:
    """A layer's attention over all tokens at once, without a cache."""
    return nnx.merge(graph, state)(x, _rows(0, x.shape[1]), None)[0]


@functools.partial(jax.jit, static_argnames=("graph", "size"))
def _pieces(
    graph: nnx.GraphDef[Any], state: Any, x: Float[Array, "1 T D"], cache: LayerCache, size: int
) -> Float[Array, "1 T D"]:
    """The same in calls of `size` tokens that continue from a cache."""
    attention = nnx.merge(graph, state)

    def step(cache: LayerCache, item: tuple[Array, Array]) -> tuple[LayerCache, Array]:
        start, piece = item
        output, cache = attention(piece, _rows(start, size), cache)
        return cache, output

    starts = jnp.arange(0, x.shape[1], size, dtype=jnp.int32)
    pieces = jnp.moveaxis(x.reshape(1, -1, size, x.shape[2]), 1, 0)
    _, outputs = jax.lax.scan(step, cache, (starts, pieces))
    return jnp.moveaxis(outputs, 0, 1).reshape(x.shape)


def _rows(start: int | Array, count: int) -> Rows:
    """One sequence in slot 1 and page 1."""
    one = jnp.ones(1, jnp.int32)
    return Rows(one, one[:, None], one * start, one * count)


def _attention(
    model: Model, layer: int, module: Kda | Mla, x: Float[Array, "1 T D"], size: int, what: str, tolerance: float
) -> Comparison:
    module.axis = None  # on a mesh too it runs as one program over whole arrays
    graph, state = nnx.split(module)
    cache = layer_cache(model.config, layer, 2, 2, x.shape[1], model.dtype)
    ours = _pieces(graph, state, x, model.place(cache), size)
    return compare(f"layer {layer}: {what}", as_float(ours), as_float(_whole_sequence(graph, state, x)), tolerance)


def plain_matrix(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """MXFP4 by table: a sign and three bits of magnitude per code, times 2^(scale - 127) per 32 inputs."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values = np.where(codes & 8, -1.0, 1.0) * _E2M1[codes & 7]
    return values * np.repeat(np.exp2(scale.astype(np.float64) - 127), 32, axis=-1)


def _experts(layer: int, module: LatentMoe, rng: np.random.Generator, dtype: Any, tolerance: float) -> Comparison:
    """A few tokens through a few experts, packed and as plain matrices."""
    name = f"layer {layer}: packed against plain experts"
    experts = module.weights()
    if not isinstance(experts, moe.PackedExperts):
        return Comparison(name, 0.0, "the experts are not packed", True)
    few = min(8, experts.gate_up_packed.shape[0])
    chosen = jax.tree.map(lambda array: jnp.asarray(np.asarray(array[:few])), experts)
    latent = experts.down_packed.shape[1]
    x = jnp.asarray(rng.standard_normal((few, latent), np.float32).astype(dtype))
    ids = np.arange(few, dtype=np.int32)[:, None]
    ours = moe.experts(
        x,
        jnp.asarray(ids),
        jnp.ones((few, 1), jnp.float32),
        chosen,
        beta=module.beta,
        linear_beta=module.linear_beta,
        implementation=module.implementation,
    )
    gate_up, down = (
        jnp.asarray(plain_matrix(np.asarray(codes), np.asarray(scale)).astype(dtype))
        for codes, scale in (chosen[:2], chosen[2:])
    )
    hidden = einsum("nl,nifl->nif", x, gate_up)
    activation = situ(hidden[:, 0], hidden[:, 1], beta=module.beta, linear_beta=module.linear_beta)
    return compare(name, as_float(ours), as_float(einsum("nf,nlf->nl", activation, down)), tolerance)


def _whole(model: Model, rng: np.random.Generator, tokens: int, tolerance: float) -> Iterator[Comparison]:
    ids = rng.integers(0, model.config.vocab_size, tokens).tolist()
    uncached = model.logits(ids)
    states = observe(model, ids[:-DECODED], ids[-DECODED:])
    yield compare("model: prefill into a cache against none", states.logits, uncached[:-DECODED], tolerance)
    yield compare("model: decode against no cache", states.decode_logits, uncached[-DECODED:], tolerance)
