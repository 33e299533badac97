"""The DSpark draft model: one parallel pass over a block of masks, then a sequential head (arXiv 2607.05147).

Context keys and values come from the target's taps alone and are cached for committed tokens; the block
`[anchor, mask, ...]` starts at the position after them, and its rows live only within the step.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from k3jax.cache import Rows
from k3jax.dspark import block_kernels, context_rows
from k3jax.dspark.config import DSparkConfig
from k3jax.layers.draft_attention import Pool, Pools, draft_attention
from k3jax.layers.markov import MarkovHead
from k3jax.layers.norm import RmsNorm
from k3jax.layers.weight import Weight, param
from k3jax.params import Tree
from k3jax.sharding_local import add_up, look_up
from pallas import gemv, mla
from pallas.dispatch import Implementation, select
from pallas.precision import einsum

"""Context rows of each draft layer, paged like the target's latents."""


def empty_pools(config: DSparkConfig, *, pages: int, page_size: int, dtype: Any) -> Pools:
    """Zeroed context rows for every draft layer."""
    shape = (pages, page_size, config.attention.row_width)
    return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))


TARGET_IDS = "target_ids"
"""Parameter of a draft with a vocabulary of its own: int32 [draft vocabulary], the target's id of each token."""


class Draft(NamedTuple):
    """What a block was drafted from; row k predicts the token k + 1 places after the anchor."""

    hidden: Float[Array, "B G D"]
    padded: Float[Array, "B P V"]
    """Logits before the Markov bias; rows behind the block mean nothing, and need not be cut off for the walk."""
    pools: Pools
    """As given, but for rows behind `rows.length`, which mean nothing."""

    @property
    def logits(self) -> Float[Array, "B G V"]:
        """Those of the block's rows."""
        return self.padded[:, : self.hidden.shape[1]]


class Drafted(NamedTuple):
    """A drafted block."""

    token: Int32[Array, "B G"]
    logits: Float[Array, "B G V"]
    """Of the distribution that each token was drawn from, before temperature."""
    confidence: Float[Array, "B G"] | None
    """Logits of the chance that each token is accepted, given that those before it are."""


class DraftLayer(nnx.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, config: DSparkConfig, parameters: Tree) -> None:
        self.attention_norm = RmsNorm(parameters["attention_norm"], config.norm_eps)
        self.attention = draft_attention(config, parameters["attention"])
        self.mlp_norm = RmsNorm(parameters["mlp_norm"], config.norm_eps)
        self.gate_up, self.down = param(parameters["gate_up"]), param(parameters["down"])

    def __call__(
        self,
        x: Float[Array, "B G D"],
        position: Int32[Array, "B G"],
        context: Float[Array, "B S L"],
        visible: Bool[Array, "B G S+G"],
    ) -> Float[Array, "B G D"]:
        """The block's rows see the context and each other."""
        normed = self.attention_norm(x)
        rows = jnp.concatenate([context, self.attention.rows(normed, position)], axis=1)
        return self.feed_forward(x + self.attention(normed, position, rows, visible))

    def attend(
        self, x: Float[Array, "B G D"], position: Int32[Array, "B G"], pool: Pool, block: Rows, *, causal: bool
    ) -> tuple[Float[Array, "B G D"], Pool]:
        """The same over a paged context, and the pool afterwards. Donates the pool."""
        attended, pool = self.attention.attend(self.attention_norm(x), position, pool, block, causal=causal)
        return self.feed_forward(x + attended), pool

    def feed_forward(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """The layer's second half, residual included."""
        matrix = self.gate_up[...]
        (hidden,) = gemv.project(self.mlp_norm(x), matrix)
        gate, up = jnp.unstack(hidden, axis=-1 if isinstance(matrix, gemv.Int8Matrix) else -2)
        activation = nnx.silu(gate) * up
        (output,) = gemv.project(activation, self.down[...])
        return x + output


class DSpark(nnx.Module):
    """A draft. Without an embedding and head of its own it uses the target's, given at each call.

    With a reduced vocabulary its logits are over its own ids; tokens that come in and go out have the target's.
    """

    def __init__(self, config: DSparkConfig, parameters: Tree) -> None:
        self.config = config
        self.context_proj = param(parameters["context_proj"])
        self.context_norm = RmsNorm(parameters["context_norm"], config.norm_eps)
        norms = parameters.get("tap_norms", {})
        self.tap_norms = nnx.List([RmsNorm(norms[str(i)], config.norm_eps) for i in range(len(norms))])
        layers = parameters["layers"]
        self.layers = nnx.List([DraftLayer(config, layers[str(i)]) for i in range(config.num_layers)])
        self.norm = RmsNorm(parameters["norm"], config.norm_eps)
        self.markov = MarkovHead(config, parameters["markov"])
        names = ("embedding", "head", "confidence", "confidence_bias", TARGET_IDS)
        optional = {name: parameters.get(name) for name in names}
        self.optional: nnx.Dict[Any] = nnx.Dict(
            {name: param(weight) for name, weight in optional.items() if weight is not None}
        )

    @property
    def reduced(self) -> bool:
        """Whether it has a vocabulary of its own."""
        return TARGET_IDS in self.optional

    @property
    def borrows(self) -> tuple[str, ...]:
        """What it takes from the target: embedding, head, or both."""
        return tuple(name for name in ("embedding", "head") if name not in self.optional)

    def context(self, taps: Float[Array, "B T F"]) -> Float[Array, "B T D"]:
        """Concatenated taps as the input of every layer's context keys and values."""
        if self.tap_norms:
            parts = jnp.split(taps, len(self.tap_norms), axis=-1)
            taps = jnp.concatenate([norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)], axis=-1)
        (context,) = gemv.project(taps, self.context_proj[...])
        return self.context_norm(context)

    def extend(self, pools: Pools, taps: Float[Array, "B T F"], rows: Rows) -> Pools:
        """Stores the context rows of committed tokens at `rows.length` onwards. Donates the pools."""
        return select(None, mosaic=context_rows.store, xla=stored_by_layer)(self, pools, self.context(taps), rows)

    def draft(
        self,
        pools: Pools,
        anchor: Int32[Array, " B"],
        rows: Rows,
        embedding: Float[Array, "V D"] | None = None,
        head: Float[Array, "V D"] | None = None,
        *,
        vocab_axis: str | None = None,
        implementation: Implementation = None,
    ) -> Draft:
        """The parallel pass; `rows.length` tokens have context rows and the anchor follows them.

        `vocab_axis`: the mesh axis that the target's tables are split over, inside `jax.shard_map`; `implementation`:
        mosaic for layers of finished products, xla for layers one by one, whose parts have kernels of their own.

        Rows with `query_length` 0 are padding, whose drafts mean nothing. Two rows must not share pages from
        `rows.length` on. Donates the pools.
        """
        width, batch = self.config.block_size, anchor.shape[0]
        # As many rows as the skinny product takes at a time, so that nothing has to be padded for it again and again.
        padded = -(-width // 8) * 8
        padded = padded if batch * padded <= gemv.FEW_ROWS else width
        first = jnp.arange(padded, dtype=jnp.int32)[None] == 0
        ids = jnp.where(first, anchor[:, None], jnp.int32(self.config.mask_token_id))
        position = rows.length[:, None] + jnp.arange(padded, dtype=jnp.int32)[None]
        block = dataclasses.replace(rows, query_length=jnp.where(rows.query_length > 0, width, 0).astype(jnp.int32))
        axis = None if "embedding" in self.optional else vocab_axis
        table = self._own("embedding", embedding)
        assert not isinstance(table, gemv.Int8Matrix)
        x = add_up(axis, look_up(axis, table, ids), table.dtype)
        layers, table = select(implementation, mosaic=block_kernels.run, xla=one_by_one), self._own("head", head)
        narrow = table if isinstance(table, gemv.Int8Matrix) else None
        hidden, logits, after = layers(self, x, position, pools, block, narrow)
        if logits is None:
            (logits,) = gemv.project(hidden, table, dtypes=(jnp.float32,))
        if vocab_axis is not None and "head" not in self.optional:
            logits = jax.lax.all_gather(logits, vocab_axis, axis=2, tiled=True)
        return Draft(hidden[:, :width], logits, after)

    def _own(self, name: str, targets: Float[Array, "_ _"] | None) -> Weight:
        """The draft's own table, otherwise the target's."""
        if name in self.optional:
            return self.optional[name][...]
        if targets is None:
            raise ValueError(f"the draft has no {name} of its own and none was given, expected the target's")
        return targets

    def sample(
        self,
        draft: Draft,
        anchor: Int32[Array, " B"],
        choose: Callable[[int, Float[Array, "B V"]], Int32[Array, " B"]],
    ) -> Drafted:
        """Draws the block left to right; `choose(k, logits)` picks the token of row k, by the draft's own ids."""
        previous = anchor
        state = jnp.zeros((anchor.shape[0], self.markov.rank), draft.hidden.dtype)
        tokens, logits, confidence = [], [], []
        for k in range(self.config.block_size):
            step = self.markov(draft.hidden[:, k], previous, state)
            biased = draft.logits[:, k] + step.bias
            previous, state = self.target_id(choose(k, biased)), step.state
            tokens.append(previous)
            logits.append(biased)
            confidence.append(self.confidence(draft.hidden[:, k], step.embedding))
        sure = None if confidence[0] is None else jnp.stack(confidence, axis=1)
        return Drafted(jnp.stack(tokens, axis=1), jnp.stack(logits, axis=1), sure)

    def walk(
        self, draft: Draft, anchor: Int32[Array, " B"], noise: Float32[Array, "G V"], scale: Float32[Array, " B"]
    ) -> Drafted:
        """Tokens of the highest `logits + noise` of one row, in one launch; `logits`: those of `sample` times `scale`.

        Raises `NotImplementedError` with the reason for what that does not serve.
        """
        if TARGET_IDS in self.optional:
            raise NotImplementedError("the walk serves drafts with the target's vocabulary")
        token, score = (x[None] for x in self.markov.walk(anchor, draft.padded, noise, scale))
        before = jnp.concatenate([anchor[:, None], token[:, :-1]], axis=1)[0]
        confidence = self.confidence(draft.hidden[0], self.markov.weights["embedding"][...][before])
        return Drafted(token, score, None if confidence is None else confidence[None])

    def target_id(self, token: Int32[Array, "*batch"]) -> Int32[Array, "*batch"]:
        """The target's ids of the draft's."""
        return self.optional[TARGET_IDS][...][token] if TARGET_IDS in self.optional else token

    def over_target_ids(self, probability: Float[Array, "*batch own"]) -> Float[Array, "*batch V"]:
        """A distribution over the draft's ids as one over the target's; ids that the draft lacks get nothing."""
        if TARGET_IDS not in self.optional:
            return probability
        shape = (*probability.shape[:-1], self.config.vocab_size)
        return jnp.zeros(shape, probability.dtype).at[..., self.optional[TARGET_IDS][...]].set(probability)

    def confidence(self, hidden: Float[Array, "B D"], embedding: Float[Array, "B r"]) -> Float[Array, " B"] | None:
        """Logit of the chance that a row's token is accepted, given the embedding of the token before it."""
        if "confidence" not in self.optional:
            return None
        inputs = jnp.concatenate([hidden, embedding], axis=-1) if self.config.confidence_with_markov else hidden
        score = einsum("bi,oi->bo", inputs.astype(jnp.float32), self.optional["confidence"][...].astype(jnp.float32))
        if "confidence_bias" in self.optional:
            score = score + self.optional["confidence_bias"][...].astype(jnp.float32)[None]
        return score[:, 0]


def stored_by_layer(draft: DSpark, pools: Pools, context: Float[Array, "B T D"], rows: Rows) -> Pools:
    """The pools with the rows of `context` at `rows.length` onwards."""
    tokens = context.shape[1]
    position = rows.length[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
    # All layers in one product: each alone is too small to fill the device.
    matrices = [layer.attention.row_matrices() for layer in draft.layers]
    products = iter(gemv.project(context, *itertools.chain(*matrices)))
    cached = (
        layer.attention.cached(position, *itertools.islice(products, len(own)))
        for layer, own in zip(draft.layers, matrices, strict=True)
    )
    return tuple(
        mla.write_pages(pool, new, rows.page_table, rows.length, rows.valid(tokens))
        for pool, new in zip(pools, cached, strict=True)
    )


def one_by_one(
    draft: DSpark,
    x: Float[Array, "B G D"],
    position: Int32[Array, "B G"],
    pools: Pools,
    block: Rows,
    head: gemv.Int8Matrix | None,
) -> tuple[Float[Array, "B G D"], None, Pools]:
    """The layers over a block of tokens: what its logits are made of, None for these, and the pools afterwards."""
    del head
    after = []
    for layer, pool in zip(draft.layers, pools, strict=True):
        x, pool = layer.attend(x, position, pool, block, causal=draft.config.causal)
        after.append(pool)
    return draft.norm(x), None, tuple(after)


def greedy(_: int, logits: Float[Array, "B V"]) -> Int32[Array, " B"]:
    """The most likely token."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
