"""Attention of DSpark drafts: context rows come from the target's taps, block rows from the draft itself."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from k3jax.cache import Rows
from k3jax.dspark.config import DraftGqa, DraftMla, DSparkConfig
from k3jax.layers.norm import RmsNorm
from k3jax.layers.rope import rotate
from k3jax.layers.weight import Weight, param
from k3jax.params import Tree
from pallas import gemv, mla
from pallas.precision import einsum

Pool = Float[Array, "pages page L"]
"""Cached rows of a draft layer, by page."""
Pools = tuple[Pool, ...]


def masked_softmax(
    scores: Float[Array, "B heads Q S"], visible: Bool[Array, "B Q S"], scale: float
) -> Float[Array, "B heads Q S"]:
    """Softmax over the visible keys; every query sees at least itself."""
    return jax.nn.softmax(jnp.where(visible[:, None], scores * scale, -jnp.inf), axis=-1)


def visible_rows(block: Rows, context: int, width: int, *, causal: bool) -> Bool[Array, "B _ _"]:
    """Which of `context` cached rows and `width` rows of the block itself each row of the block sees.

    Rows behind the block's `query_length` are padding: no row sees them.
    """
    seen = jnp.arange(context, dtype=jnp.int32)[None] < block.length[:, None]
    own = jnp.broadcast_to(block.valid(width)[:, None], (seen.shape[0], width, width))
    own = own & jnp.tril(jnp.ones((width, width), bool))[None] if causal else own
    own = own | jnp.eye(width, dtype=bool)[None]
    return jnp.concatenate([jnp.broadcast_to(seen[:, None], (seen.shape[0], width, context)), own], axis=-1)


def first_and_length(block: Rows, pool: Pool, *, causal: bool) -> tuple[Int32[Array, " B"], Int32[Array, " B"]]:
    """Position of the first query as `mla.decode` wants it, and how many rows the pool has with the block's."""
    room = block.page_table.shape[1] * pool.shape[1]
    length = jnp.minimum(block.length + block.query_length, room)
    # A query at the last position or beyond it sees every row.
    return (block.length if causal else jnp.maximum(length - 1, 0)), length


class GqaDraftAttention(nnx.Module):
    """Grouped-query attention; a cached row is `[keys | values]` of all KV heads, keys normed and rotated."""

    def __init__(self, config: DSparkConfig, parameters: Tree) -> None:
        assert isinstance(config.attention, DraftGqa)
        self.q, self.k, self.v = (param(parameters[name]) for name in ("q", "k", "v"))
        self.out = param(parameters["out"])
        self.q_norm = RmsNorm(parameters["q_norm"], config.norm_eps)
        self.k_norm = RmsNorm(parameters["k_norm"], config.norm_eps)
        self.sizes, self.rope = config.attention, config.rope

    def rows(self, x: Float[Array, "B T D"], position: Int32[Array, "B T"]) -> Float[Array, "B T L"]:
        """What the cache holds of tokens at `position`."""
        return self.cached(position, *gemv.project(x, *self.row_matrices()))

    def row_matrices(self) -> tuple[Weight, ...]:
        """The weights that `rows` is made with."""
        return self.k[...], self.v[...]

    def cached(
        self, position: Int32[Array, "B T"], key: Float[Array, "B T H C"], value: Float[Array, "B T H C"]
    ) -> Float[Array, "B T L"]:
        """`rows` from the products with `row_matrices`."""
        key = rotate(self.k_norm(key), position, self.rope)
        return jnp.concatenate([key, value], axis=2).reshape(*position.shape, -1)

    def __call__(
        self,
        x: Float[Array, "B Q D"],
        position: Int32[Array, "B Q"],
        rows: Float[Array, "B S L"],
        visible: Bool[Array, "B Q S"],
    ) -> Float[Array, "B Q D"]:
        """Attention of the block's queries over `rows`."""
        kv_heads, dim = self.sizes.num_kv_heads, self.sizes.head_dim
        (query,) = gemv.project(x, self.q[...])
        query = rotate(self.q_norm(query), position, self.rope)
        query = query.reshape(*query.shape[:2], kv_heads, -1, dim)
        pair = rows.reshape(*rows.shape[:2], 2, kv_heads, dim)
        scores = einsum("bqkgc,bskc->bkgqs", query, pair[:, :, 0], out=jnp.dtype(jnp.float32))
        flat = scores.reshape(scores.shape[0], -1, *scores.shape[3:])
        weights = masked_softmax(flat, visible, dim**-0.5).astype(x.dtype).reshape(scores.shape)
        mixed = einsum("bkgqs,bskc->bqkgc", weights, pair[:, :, 1])
        (output,) = gemv.project(mixed.reshape(*x.shape[:2], -1, dim), self.out[...], contract=2)
        return output

    def attend(
        self, x: Float[Array, "B Q D"], position: Int32[Array, "B Q"], pool: Pool, block: Rows, *, causal: bool
    ) -> tuple[Float[Array, "B Q D"], Pool]:
        """Attention over `block.length` cached rows and the block, and the pool, which stays as it is."""
        context = mla.gather_pages(pool, block.page_table).astype(x.dtype)
        visible = visible_rows(block, context.shape[1], x.shape[1], causal=causal)
        context = jnp.where(visible[:, 0, : context.shape[1], None], context, jnp.zeros((), context.dtype))
        rows = jnp.concatenate([context, self.rows(x, position)], axis=1)
        return self(x, position, rows, visible), pool


class MlaDraftAttention(nnx.Module):
    """DeepSeek latent attention, absorbed; a cached row is `[latent | rotated shared key]`."""

    def __init__(self, config: DSparkConfig, parameters: Tree) -> None:
        assert isinstance(config.attention, DraftMla)
        self.q_down, self.q_up = param(parameters["q_down"]), param(parameters["q_up"])
        self.kv_down = param(parameters["kv_down"])
        self.turned = "key_up_turned" in parameters
        """Whether `lift` is [heads, latent, key], as drafts in 8 bits have it; otherwise [heads, key, latent]."""
        self.lift = nnx.Param(parameters["key_up_turned" if self.turned else "key_up"])
        self.value_up = nnx.Param(parameters["value_up"])
        self.out = param(parameters["out"])
        self.q_norm = RmsNorm(parameters["q_norm"], config.norm_eps)
        self.kv_norm = RmsNorm(parameters["kv_norm"], config.norm_eps)
        self.sizes, self.rope = config.attention, config.rope
        width = self.sizes.qk_nope_head_dim + self.sizes.qk_rope_head_dim
        self.scale = width**-0.5 * (config.rope.yarn.softmax_factor if config.rope.yarn else 1.0)

    @property
    def key_up(self) -> Float[Array, "H K R"]:
        """What makes a head's key of a latent."""
        return jnp.swapaxes(self.lift[...], 1, 2) if self.turned else self.lift[...]

    def rows(self, x: Float[Array, "B T D"], position: Int32[Array, "B T"]) -> Float[Array, "B T L"]:
        """What the cache holds of tokens at `position`."""
        return self.cached(position, *gemv.project(x, *self.row_matrices()))

    def row_matrices(self) -> tuple[Weight, ...]:
        """The weights that `rows` is made with."""
        return (self.kv_down[...],)

    def cached(self, position: Int32[Array, "B T"], projected: Float[Array, "B T L"]) -> Float[Array, "B T L"]:
        """`rows` from the products with `row_matrices`."""
        rank = self.sizes.kv_lora_rank
        shared = rotate(projected[..., rank:], position, self.rope)
        return jnp.concatenate([self.kv_norm(projected[..., :rank]), shared], axis=-1)

    def __call__(
        self,
        x: Float[Array, "B Q D"],
        position: Int32[Array, "B Q"],
        rows: Float[Array, "B S L"],
        visible: Bool[Array, "B Q S"],
    ) -> Float[Array, "B Q D"]:
        """Attention of the block's queries over `rows`."""
        own, rank = self.sizes.qk_nope_head_dim, self.sizes.kv_lora_rank
        (compressed,) = gemv.project(x, self.q_down[...])
        query = self.query(compressed, position)
        absorbed = einsum("bthk,hkr->bthr", query[..., :own], self.key_up)
        full = jnp.concatenate([absorbed, query[..., own:]], axis=-1)
        scores = einsum("bqhl,bsl->bhqs", full, rows, out=jnp.dtype(jnp.float32))
        weights = masked_softmax(scores, visible, self.scale).astype(x.dtype)
        mixed = einsum("bhqs,bsr->bqhr", weights, rows[..., :rank])
        values = einsum("bqhr,hvr->bqhv", mixed, self.value_up[...])
        (output,) = gemv.project(values, self.out[...], contract=2)
        return output

    def query(self, compressed: Float[Array, "B Q R"], position: Int32[Array, "B Q"]) -> Float[Array, "B Q H K"]:
        """Queries, the shared part rotated, from the products with `q_down`."""
        (query,) = gemv.project(self.q_norm(compressed), self.q_up[...])
        own = self.sizes.qk_nope_head_dim
        return jnp.concatenate([query[..., :own], rotate(query[..., own:], position, self.rope)], axis=-1)

    def attend(
        self, x: Float[Array, "B Q D"], position: Int32[Array, "B Q"], pool: Pool, block: Rows, *, causal: bool
    ) -> tuple[Float[Array, "B Q D"], Pool]:
        """Attention over `block.length` cached rows and the block, and the pool with the block's rows behind them.

        Nobody sees those rows once the step is over: what is committed overwrites them. Donates the pool.
        """
        compressed, projected = gemv.project(x, self.q_down[...], *self.row_matrices())
        rows = self.cached(position, projected)
        pool = mla.write_pages(pool, rows, block.page_table, block.length, block.valid(x.shape[1]))
        start, length = first_and_length(block, pool, causal=causal)
        up = self.key_up, self.value_up[...]
        values = mla.decode(
            self.query(compressed, position), pool, block.page_table, *up, start, length, scale=self.scale
        )
        (output,) = gemv.project(values, self.out[...], contract=2)
        return output, pool


DraftAttention = GqaDraftAttention | MlaDraftAttention


def draft_attention(config: DSparkConfig, parameters: Tree) -> DraftAttention:
    """The kind of attention that the draft has."""
    kind = GqaDraftAttention if isinstance(config.attention, DraftGqa) else MlaDraftAttention
    return kind(config, parameters)
