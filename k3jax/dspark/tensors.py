"""The tensors of DSpark drafts, under the names of every public layout."""

from collections.abc import Collection

from k3jax.dspark.config import DraftGqa, DraftMla, DSparkConfig
from k3jax.params import ParamSpec, Tree, piece, plain

ALIASES = {"context_proj": "fc", "context_norm": "hidden_norm", "final_norm": "norm"}
"""vLLM's name of a tensor -> DeepSpec's."""

IGNORED = frozenset({"embed_tokens.weight", "t2d"})
"""Copies of the target's embedding and the training-only vocabulary mask, where a file has them."""

TARGET_OFFSETS = "d2t"
"""Integers [draft vocabulary] of a reduced vocabulary: the target's id minus the draft's. See `files.target_ids`."""


class Names:
    """Resolves aliases and an optional `model.` prefix against the tensors that a file has."""

    def __init__(self, config: DSparkConfig, present: Collection[str] | None) -> None:
        self.present = present
        self.gqa = isinstance(config.attention, DraftGqa)
        self.prefix = "model." if present and any(name.startswith("model.layers.") for name in present) else ""

    def __call__(self, name: str) -> str:
        """The stored name of tensor `name` (vLLM's spelling, without prefix)."""
        head, _, rest = name.partition(".")
        alias = f"{ALIASES[head]}.{rest}" if head in ALIASES else name
        if self.present is None:
            return alias if self.gqa else name
        return next(
            (self.prefix + item for item in (name, alias) if self.prefix + item in self.present), self.prefix + name
        )

    def has(self, name: str) -> bool:
        """Whether the file has an optional tensor; False without a file."""
        return self.present is not None and self(name) in self.present


def _linear(name: str, rows: int, columns: int) -> ParamSpec:
    return plain(name, (rows, columns), (None, None), prefix="")


def _norm(name: str, width: int) -> ParamSpec:
    return plain(name, (width,), (None,), init="ones", prefix="")


def _gqa(config: DSparkConfig, attention: DraftGqa, name: str) -> Tree:
    width, dim = config.hidden_size, attention.head_dim

    def heads(part: str, count: int) -> ParamSpec:
        shape = (count, dim, width)
        return plain(
            f"{name}.{part}_proj.weight", shape, ("heads", None, None), hf_shape=(count * dim, width), prefix=""
        )

    out_shape = (width, attention.num_heads, dim)
    return {
        "q": heads("q", attention.num_heads),
        "k": heads("k", attention.num_kv_heads),
        "v": heads("v", attention.num_kv_heads),
        "q_norm": _norm(f"{name}.q_norm.weight", dim),
        "k_norm": _norm(f"{name}.k_norm.weight", dim),
        "out": plain(
            f"{name}.o_proj.weight",
            out_shape,
            (None, "heads", None),
            hf_shape=(width, attention.num_heads * dim),
            prefix="",
        ),
    }


def _mla(config: DSparkConfig, mla: DraftMla, name: str) -> Tree:
    width, heads, query = config.hidden_size, mla.num_heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim
    keys, values = mla.qk_nope_head_dim, mla.v_head_dim
    kv_shape, view = (heads * (keys + values), mla.kv_lora_rank), (heads, keys + values, mla.kv_lora_rank)
    axes = ("heads", None, None)

    def half(take: slice) -> tuple[ParamSpec, ...]:
        rows = keys if take.start is None else values
        part = piece(f"{name}.kv_b_proj.weight", kv_shape, view=view, take=(slice(None), take), prefix="")
        return (ParamSpec((heads, rows, mla.kv_lora_rank), "model", axes, "normal", (part,)),)

    return {
        "q_down": _linear(f"{name}.q_a_proj.weight", mla.q_lora_rank, width),
        "q_norm": _norm(f"{name}.q_a_layernorm.weight", mla.q_lora_rank),
        "q_up": plain(
            f"{name}.q_b_proj.weight",
            (heads, query, mla.q_lora_rank),
            axes,
            hf_shape=(heads * query, mla.q_lora_rank),
            prefix="",
        ),
        "kv_down": _linear(f"{name}.kv_a_proj_with_mqa.weight", mla.row_width, width),
        "kv_norm": _norm(f"{name}.kv_a_layernorm.weight", mla.kv_lora_rank),
        "key_up": half(slice(None, keys))[0],
        "value_up": half(slice(keys, None))[0],
        "out": plain(
            f"{name}.o_proj.weight",
            (width, heads, values),
            (None, "heads", None),
            hf_shape=(width, heads * values),
            prefix="",
        ),
    }


def _layer(config: DSparkConfig, name: str) -> Tree:
    width, inner, attention = config.hidden_size, config.intermediate_size, config.attention
    own = f"{name}.self_attn"
    pair = tuple(
        piece(f"{name}.mlp.{half}_proj.weight", (inner, width), index=(i,), prefix="")
        for i, half in enumerate(("gate", "up"))
    )
    return {
        "attention_norm": _norm(f"{name}.input_layernorm.weight", width),
        "attention": _gqa(config, attention, own) if isinstance(attention, DraftGqa) else _mla(config, attention, own),
        "mlp_norm": _norm(f"{name}.post_attention_layernorm.weight", width),
        "gate_up": ParamSpec((2, inner, width), "model", (None, "ffn", None), "normal", pair),
        "down": _linear(f"{name}.mlp.down_proj.weight", width, inner),
    }


def _markov(config: DSparkConfig, names: Names) -> Tree:
    rank, width = config.markov_rank, config.hidden_size

    def bias(name: str, size: int) -> ParamSpec:
        return plain(names(name), (size,), (None,), init="zeros", prefix="")

    tree: Tree = {
        "embedding": _linear(names("markov_head.markov_w1.weight"), config.vocab_size, rank),
        "head": _linear(names("markov_head.markov_w2.weight"), config.draft_vocab_size, rank),
    }
    if config.markov_kind == "gated":
        tree["gate"] = _linear(names("markov_head.gate_proj.weight"), rank, width + rank)
        tree["gate_bias"] = bias("markov_head.gate_proj.bias", rank)
    if config.markov_kind == "rnn":
        tree["joint"] = _linear(names("markov_head.joint_proj.weight"), 3 * rank, 2 * rank + width)
        tree["joint_bias"] = bias("markov_head.joint_proj.bias", 3 * rank)
    return tree


def draft_specs(config: DSparkConfig, present: Collection[str] | None = None) -> Tree:
    """Specs of a draft; `present` names the tensors of its file, which decides aliases and optional parts.

    A draft with an `lm_head` of its own uses it, and its embedding if it has one; otherwise they are the target's.
    """
    names = Names(config, present)
    width, taps = config.hidden_size, len(config.target_layer_ids)
    tree: Tree = {
        "context_proj": _linear(names("context_proj.weight"), width, config.features),
        "context_norm": _norm(names("context_norm.weight"), width),
        "layers": {str(i): _layer(config, f"{names.prefix}layers.{i}") for i in range(config.num_layers)},
        "norm": _norm(names("final_norm.weight"), width),
        "markov": _markov(config, names),
    }
    if config.fc_norm:
        tree["tap_norms"] = {
            str(i): _norm(names(f"fc_norm.{i}.weight"), config.target_hidden_size) for i in range(taps)
        }
    if config.confidence:
        inputs = width + (config.markov_rank if config.confidence_with_markov else 0)
        tree["confidence"] = _linear(names("confidence_head.proj.weight"), 1, inputs)
        if present is None or names.has("confidence_head.proj.bias"):
            tree["confidence_bias"] = plain(names("confidence_head.proj.bias"), (1,), (None,), init="zeros", prefix="")
    if names.has("lm_head.weight") and names.has("embed_tokens.weight"):
        tree["embedding"] = _linear(names("embed_tokens.weight"), config.vocab_size, width)
    if names.has("lm_head.weight"):
        tree["head"] = _linear(names("lm_head.weight"), config.draft_vocab_size, width)
    return tree
