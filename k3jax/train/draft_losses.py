"""The loss of a DSpark draft: many blocks of a text in one pass, each seeing only the taps before its anchor.

    sum_k w_k (0.1 CE(x_k) + 0.9 |q_k - p_k|_1 + BCE(confidence_k, 1 - |q_k - p_k|_1 / 2)),   w_k = exp(-k / 4)

(DSpark paper, arXiv 2607.05147, section 4; `Objective` has variants.) The target is frozen; the previous token of
every row is the text's.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from k3jax.dspark.model import DSpark
from k3jax.layers.draft_attention import GqaDraftAttention
from k3jax.train.draft_attention import packed_attention
from pallas.moe.grouped import take_rows
from pallas.precision import einsum

NEIGHBOURS = 8
"""Anchors on each side that tell how long steps are near an anchor."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is minimised; the defaults are the paper's."""

    cross_entropy: float = 0.1
    variation: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    """Rows after which a row's weight has fallen by e."""
    soft: bool = False
    """Cross-entropy against the target's whole distribution, of which the token of its own text is one draw: the same
    on average, with less noise."""
    reach: bool = False
    """A row's weight also has the factor prod_{j<k} min(1, q_j(x_j) / p_j(x_j)), no gradient: on text drawn from p its
    mean is the chance that standard rejection gets to row k, so rows count as often as they will be used."""
    pace: bool = False
    """Rows weigh as much as the number of steps that the texts take depends on them: `pace_weights` in place of
    `decay` and `reach`."""


class Text(NamedTuple):
    """Sequences with what the target made of them."""

    ids: Int32[Array, "B S"]
    features: Float[Array, "B S F"]
    """Concatenated taps."""
    hidden: Float[Array, "B S D"]
    """Normalised final hidden states: the teacher's logits follow from them."""


class DraftLosses(NamedTuple):
    """Of one batch."""

    loss: Float32[Array, ""]
    cross_entropy: Float32[Array, ""]
    variation: Float32[Array, ""]
    """Weighted mean of the L1 distance between draft and target."""
    confidence: Float32[Array, ""]
    survival: Float32[Array, " G"]
    """Mean chance that each row is accepted together with all before it."""
    pace: Float32[Array, ""]
    """Expected steps per token: the mean of 1 / `local_length`."""

    @property
    def acceptance_length(self) -> Float32[Array, ""]:
        """Mean over anchors of the tokens that their step would give at temperature 1 under standard rejection.

        More than decoding gives, whose steps begin more often where blocks fall early: see `pace`.
        """
        return 1 + jnp.sum(self.survival)


def block_hidden(
    draft: DSpark,
    features: Float[Array, "B S F"],
    ids: Int32[Array, "B S"],
    anchors: Int32[Array, "B A"],
    embedding: Float[Array, "V D"],
) -> Float[Array, "B A G D"]:
    """Hidden states of the blocks that start at `anchors` (positions in the text)."""
    width, causal = draft.config.block_size, draft.config.causal
    position = anchors[:, :, None] + jnp.arange(width, dtype=jnp.int32)[None, None]
    masks = jnp.full(position.shape, draft.config.mask_token_id, jnp.int32)
    block = masks.at[:, :, 0].set(jnp.take_along_axis(ids, anchors, axis=1))
    x, context = embedding[block], draft.context(features)
    places = jnp.arange(context.shape[1], dtype=jnp.int32)
    at = jnp.broadcast_to(places[None], context.shape[:2])
    before = places[None, None] < anchors[:, :, None]
    for layer in draft.layers:
        attention, rows = layer.attention, layer.attention.rows(context, at)
        if isinstance(attention, GqaDraftAttention):
            normed = layer.attention_norm(x)
            x = layer.feed_forward(x + packed_attention(attention, normed, position, rows, before, causal=causal))
        else:
            flat = x.reshape(len(anchors), -1, x.shape[-1]), position.reshape(len(anchors), -1)
            visible = visible_keys(anchors, context.shape[1], width, causal=causal)
            x = layer(*flat, rows, visible).reshape(x.shape)
    return draft.norm(x)


def visible_keys(
    anchors: Int32[Array, "B A"], context: int, width: int, *, causal: bool
) -> Bool[Array, "B queries keys"]:
    """A row sees the context before its anchor and the rows of its own block (in causal drafts up to itself)."""
    batch, count = anchors.shape
    before = jnp.arange(context, dtype=jnp.int32)[None, None] < jnp.repeat(anchors, width, axis=1)[:, :, None]
    block = jnp.arange(count * width, dtype=jnp.int32) // width
    own = block[:, None] == block[None, :]
    own = jnp.tril(own) if causal else own
    return jnp.concatenate([before, jnp.broadcast_to(own[None], (batch, *own.shape))], axis=-1)


def losses(
    draft: DSpark,
    text: Text,
    anchors: Int32[Array, "B A"],
    embedding: Float[Array, "V D"],
    head: Float[Array, "V D"],
    objective: Objective | None = None,
) -> DraftLosses:
    """The loss over all blocks; rows whose label lies beyond the text do not count."""
    objective = objective or Objective()
    width, size = draft.config.block_size, text.ids.shape[1]
    hidden = block_hidden(draft, text.features, text.ids, anchors, embedding)
    at = anchors[:, :, None] + jnp.arange(width, dtype=jnp.int32)[None, None]
    valid = at + 1 < size
    previous, labels = (_gather(text.ids, jnp.minimum(at + shift, size - 1)) for shift in (0, 1))
    teacher = _gather(text.hidden, jnp.minimum(at, size - 1))
    target = jax.nn.softmax(_project(jax.lax.stop_gradient(teacher), head), axis=-1)
    logits, confidence = _teacher_forced(draft, hidden, previous, head)
    logp = jax.nn.log_softmax(logits, axis=-1)
    chosen = _chosen(logp, labels)
    entropy = -jnp.sum(target * logp, axis=-1) if objective.soft else -chosen
    variation = jnp.sum(jnp.abs(jnp.exp(logp) - target), axis=-1)
    accept = jax.lax.stop_gradient(1 - variation / 2)
    surprise = _binary_entropy(confidence, accept) if confidence is not None else jnp.zeros_like(entropy)
    chances = jnp.exp(chosen), _chosen(target, labels)
    local = local_length(accept, valid)
    if objective.pace:
        weight = pace_weights(accept, valid, _reached(*chances), local)
    else:
        weight = _row_weights(objective, valid, *chances)
    mean = [jnp.sum(weight * term) / jnp.sum(weight) for term in (entropy, variation, surprise)]
    loss = objective.cross_entropy * mean[0] + objective.variation * mean[1] + objective.confidence * mean[2]
    whole = jnp.all(valid, axis=-1).astype(jnp.float32)
    count = jnp.maximum(jnp.sum(whole), 1)
    survival = jnp.sum(jnp.cumprod(accept, axis=-1) * whole[..., None], axis=(0, 1)) / count
    pace = jnp.where(jnp.any(whole > 0), jnp.sum(whole / local) / count, 1.0)
    return DraftLosses(loss, *mean, survival, pace)


def local_length(accept: Float32[Array, "B A G"], valid: Bool[Array, "B A G"]) -> Float32[Array, "B A"]:
    """Expected tokens of a step that begins near each anchor: the mean over the anchors around it, which are ascending.

    Of those whose blocks lie inside the text; 1 where there are none. `accept` holds each row's chance to stand.
    """

    def around(values: Float32[Array, "B A"]) -> Float32[Array, "B A"]:
        return jax.lax.reduce_window(values, 0.0, jax.lax.add, (1, 2 * NEIGHBOURS + 1), (1, 1), "SAME")

    whole = jnp.all(valid, axis=-1).astype(jnp.float32)
    length = 1 + jnp.sum(jnp.cumprod(accept, axis=-1), axis=-1)
    count = around(whole)
    return jnp.where(count > 0, around(whole * length) / jnp.maximum(count, 1), 1.0)


def pace_weights(
    accept: Float32[Array, "B A G"],
    valid: Bool[Array, "B A G"],
    reached: Float32[Array, "B A G"],
    local: Float32[Array, "B A"],
) -> Float32[Array, "B A G"]:
    """How much fewer steps a text takes when a row's chance to stand grows.

    A text of T tokens takes about sum_t 1 / L(t) steps, where L is the expected length of a step that begins there:
    L = 1 + s_1 (1 + s_2 (1 + ...)), so dL/ds_k is the chance that row k is reached times the tokens that then follow,
    and the number of steps falls by that over L squared.
    """
    stands = accept * valid.astype(jnp.float32)
    ahead = [jnp.ones_like(stands[..., 0])]
    for k in range(stands.shape[-1] - 1, 0, -1):
        ahead.append(1 + stands[..., k] * ahead[-1])
    weight = reached * jnp.stack(ahead[::-1], axis=-1) / jnp.square(local)[..., None]
    return jax.lax.stop_gradient(weight * valid.astype(jnp.float32))


def _chosen(values: Float32[Array, "B A G V"], labels: Int32[Array, "B A G"]) -> Float32[Array, "B A G"]:
    return jnp.take_along_axis(values, labels[..., None], axis=-1)[..., 0]


def _row_weights(
    objective: Objective, valid: Bool[Array, "B A G"], q: Float32[Array, "B A G"], p: Float32[Array, "B A G"]
) -> Float32[Array, "B A G"]:
    """Weights of the rows; q and p are the chances that draft and target give to the text's tokens."""
    row = jnp.arange(valid.shape[-1], dtype=jnp.float32)[None, None]
    weight = jnp.exp(-row / objective.decay) * valid.astype(jnp.float32)
    if not objective.reach:
        return weight
    return weight * _reached(q, p)


def _reached(q: Float32[Array, "B A G"], p: Float32[Array, "B A G"]) -> Float32[Array, "B A G"]:
    """The chance that the rows before each row stand, given that the text's tokens follow."""
    stands = jax.lax.stop_gradient(jnp.minimum(1.0, q / jnp.maximum(p, 1e-30)))
    before = jnp.concatenate([jnp.ones_like(stands[..., :1]), stands[..., :-1]], axis=-1)
    return jnp.cumprod(before, axis=-1)


def _gather(values: Array, at: Int32[Array, "B A G"]) -> Array:
    """values[b, at[b, a, g]]."""
    return jax.vmap(lambda row, index: row[index])(values, at)


def _project(hidden: Float[Array, "*batch D"], head: Float[Array, "V D"]) -> Float32[Array, "*batch V"]:
    return einsum("...d,vd->...v", hidden, head, out=jnp.dtype(jnp.float32))


def _teacher_forced(
    draft: DSpark, hidden: Float[Array, "B A G D"], previous: Int32[Array, "B A G"], head: Float[Array, "V D"]
) -> tuple[Float32[Array, "B A G V"], Float32[Array, "B A G"] | None]:
    """Logits with the Markov bias of the text's own tokens, and confidence logits.

    Heads of all rows in one product, and token embeddings whose gradient is one: what is frequent in a text would
    make thousands of additions to one row wait for each other.
    """
    (batch, count, width, dim), rank = hidden.shape, draft.markov.rank
    rows, weights = hidden.reshape(-1, width, dim), draft.markov.weights
    embedding = take_rows(weights["embedding"][...], previous.reshape(-1)).reshape(-1, width, rank)
    state = jnp.zeros((len(rows), rank), rows.dtype)
    signals: list[Array] = []
    for k in range(width):
        signal, state = draft.markov.signal(rows[:, k], embedding[:, k], state)
        signals.append(signal)
    inputs = jnp.concatenate([rows, jnp.stack(signals, axis=1)], axis=-1)
    logits = _project(inputs, jnp.concatenate([head, weights["head"][...]], axis=-1))
    confidence = draft.confidence(rows.reshape(-1, dim), embedding.reshape(-1, rank))
    shape = (batch, count, width)
    return logits.reshape(*shape, -1), None if confidence is None else confidence.reshape(shape)


def _binary_entropy(logit: Float32[Array, "*batch"], chance: Float32[Array, "*batch"]) -> Float32[Array, "*batch"]:
    return -(chance * jax.nn.log_sigmoid(logit) + (1 - chance) * jax.nn.log_sigmoid(-logit))
