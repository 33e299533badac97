"""Configurations of DSpark draft models, read from every public layout (spec of each: its `config.json`)."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from k3jax.config import ConfigError, K3Config, read_json
from k3jax.config_hf import INERT

MarkovKind = Literal["vanilla", "gated", "rnn"]
TapStream = Literal["prefix", "attn_res"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN scaling of rotary frequencies (arXiv 2309.00071), as DeepSeek and Hugging Face compute it."""

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def attention_factor(self) -> float:
        """Multiplies cosines and sines."""
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def softmax_factor(self) -> float:
        """Multiplies the softmax scale of MLA: mscale squared."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding; `interleaved` rotates adjacent pairs, otherwise the two halves."""

    theta: float
    interleaved: bool
    yarn: Yarn | None = None

    @property
    def attention_factor(self) -> float:
        """Multiplies cosines and sines."""
        return 1.0 if self.yarn is None else self.yarn.attention_factor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftGqa:
    """Grouped-query attention with per-head RMS norms on queries and keys (Qwen3)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def row_width(self) -> int:
        """Values cached per token: keys and values of all KV heads."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftMla:
    """DeepSeek latent attention with rotary positions; unlike K3's it has no output gate."""

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def row_width(self) -> int:
        """Values cached per token: latent and rotated shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig:
    """A draft model: taps of the target feed every layer's keys and values, one block is drafted in parallel."""

    vocab_size: int
    draft_vocab_size: int
    """Tokens that the draft can propose; fewer than `vocab_size` need a table of the target's ids (`d2t`)."""
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    attention: DraftGqa | DraftMla
    rope: Rope
    norm_eps: float
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    """Drafted tokens per step (gamma); verification is one wider."""
    markov_rank: int
    markov_kind: MarkovKind
    confidence: bool
    confidence_with_markov: bool
    causal: bool = False
    fc_norm: bool = False
    tap_stream: TapStream = "prefix"

    @property
    def features(self) -> int:
        """Width of the concatenated taps."""
        return len(self.target_layer_ids) * self.target_hidden_size

    def misfits(self, target: K3Config) -> Iterator[str]:
        """Why this is not a draft of `target`, one sentence each."""
        if self.vocab_size != target.vocab_size:
            yield f"vocab_size is {self.vocab_size}, the target's is {target.vocab_size}"
        if self.target_hidden_size != target.hidden_size:
            yield f"target_hidden_size is {self.target_hidden_size}, the target's hidden_size is {target.hidden_size}"
        if self.target_layer_ids[-1] >= target.num_layers:
            yield f"target_layer_ids is {list(self.target_layer_ids)}, the target has {target.num_layers} layers"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], block_size: int | None = None) -> "DSparkConfig":
        """Reads a draft's `config.json`; `block_size` overrides or supplies the drafted tokens per step.

        Every key is consumed or refused. Raises `ConfigError` with everything that is wrong.
        """
        reader = _Reader(config)
        values = reader.read(block_size)
        if reader.problems:
            raise ConfigError("the draft's config.json cannot be used", reader.problems)
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path, block_size: int | None = None) -> "DSparkConfig":
        """Reads `config.json` at `path` (a file or a directory)."""
        return cls.from_hf(read_json(path, "config.json"), block_size)


_NESTED = ("dflash_config", "dspark_config")
_DEFAULT_BLOCK = 7
"""K3's public drafts leave the block size to the serving flag; vLLM's recipe uses 7."""

# Keys that describe training or repeat what the target says.
_INERT_DRAFT = frozenset(
    {
        "num_anchors",
        "num_target_layers",
        "target_num_hidden_layers",
        "confidence_head_alpha",
        "max_position_embeddings",
        "initializer_range",
        "model_type",
        "architectures",
        "dtype",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "tie_word_embeddings",
        "max_window_layers",
        "quantization_config",
    }
)
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mla_use_nope": (False,),
    "mla_use_output_gate": (False,),
    "attention_mode": ("gqa", "mla"),
    "projector_type": ("dspark",),
    "sample_from_anchor": (True,),
    "use_sliding_window": (False,),
    "sliding_window": (None,),
    "rope_interleave": (True, False),
}


class _Reader:
    """Takes keys out of a configuration, remembering what was read and what was wrong."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config: dict[str, Any] = {}
        self.problems: list[str] = []
        nested = [config[name] for name in _NESTED if isinstance(config.get(name), Mapping)]
        for part in (*nested, {key: value for key, value in config.items() if key not in _NESTED}):
            for key, value in part.items():
                name = key.removeprefix("dspark_")
                if self.config.get(name, value) != value:
                    self.problems.append(f"{key} is {value!r} and {self.config[name]!r}, expected one value")
                self.config[name] = value
        self.seen: set[str] = set()

    def get(self, *names: str, default: Any = None) -> Any:
        self.seen |= set(names)
        return next((self.config[name] for name in names if self.config.get(name) is not None), default)

    def need(self, kind: type, *names: str, default: Any = None) -> Any:
        value = self.get(*names, default=default)
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            self.problems.append(f"{names[0]} is {value!r}, expected {kind.__name__}")
        return value

    def read(self, block_size: int | None) -> dict[str, Any]:
        mla = self.get("kv_lora_rank") is not None
        layers, hidden = self.need(int, "num_hidden_layers"), self.need(int, "hidden_size")
        vocab = self.need(int, "vocab_size")
        rank = self.get("markov_rank", default=0)
        values = {
            "vocab_size": vocab,
            "draft_vocab_size": self.need(int, "draft_vocab_size", default=vocab),
            "hidden_size": hidden,
            "target_hidden_size": self.need(int, "target_hidden_size", default=hidden),
            "intermediate_size": self.need(int, "intermediate_size"),
            "num_layers": layers,
            "attention": self._mla() if mla else self._gqa(),
            "rope": self._rope(interleaved=mla),
            "norm_eps": float(self.need(float, "rms_norm_eps") or 0),
            "target_layer_ids": tuple(self.need(list, "target_layer_ids", "aux_hidden_state_layer_ids", default=[])),
            "mask_token_id": self.need(int, "mask_token_id", "noise_token_id"),
            "block_size": block_size or self.get("block_size", default=_DEFAULT_BLOCK),
            "markov_rank": rank,
            "markov_kind": self.get("markov_head_type", default="vanilla"),
            "confidence": self.get("enable_confidence_head", default=False),
            "confidence_with_markov": self.get("confidence_head_with_markov", default=False),
            "causal": self._causal(),
            "fc_norm": self.get("fc_norm", default=False),
            "tap_stream": self.get("aux_hidden_stream", default="prefix"),
        }
        self.get("block_size")
        self._check(values)
        return values

    def _mla(self) -> DraftMla:
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        heads = self.need(int, "num_attention_heads")
        self.get("num_key_value_heads", "head_dim")
        return DraftMla(num_heads=heads, **{name: self.need(int, name) for name in names})

    def _gqa(self) -> DraftGqa:
        heads = self.need(int, "num_attention_heads")
        kv_heads = self.need(int, "num_key_value_heads", default=heads)
        return DraftGqa(num_heads=heads, num_kv_heads=kv_heads, head_dim=self.need(int, "head_dim"))

    def _rope(self, *, interleaved: bool) -> Rope:
        scaling = self.get("rope_parameters", "rope_scaling", default={})
        theta = self.get("rope_theta", default=scaling.get("rope_theta"))
        if not isinstance(theta, int | float):
            self.problems.append(f"rope_theta is {theta!r}, expected a number")
            theta = 10000.0
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        known = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"}
        known |= {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
        self.problems += [f"rope_parameters.{key}: unknown key" for key in scaling if key not in known]
        if kind == "default":
            return Rope(theta=float(theta), interleaved=interleaved)
        if kind != "yarn":
            self.problems.append(f"rope_parameters.rope_type is {kind!r}, expected 'default' or 'yarn'")
            return Rope(theta=float(theta), interleaved=interleaved)
        options = {
            key: float(scaling[key]) for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim") if key in scaling
        }
        positions = scaling.get("original_max_position_embeddings")
        return Rope(
            theta=float(theta),
            interleaved=interleaved,
            yarn=Yarn(factor=float(scaling.get("factor", 1.0)), original_positions=positions, **options),
        )

    def _causal(self) -> bool:
        """Top-level flag, then the nested one, then the layer types: sliding layers are causal."""
        kinds = set(self.get("layer_types", default=[]))
        if len(kinds) > 1:
            self.problems.append(f"layer_types mixes {sorted(kinds)}, expected one kind")
        if "sliding_attention" in kinds:
            self.problems.append("layer_types has sliding_attention, only full_attention is implemented")
        return bool(self.get("is_causal", "causal", default=False))

    def _check(self, values: dict[str, Any]) -> None:
        inert = INERT | _INERT_DRAFT
        self.problems += [
            f"{key}: unknown key with value {self.config[key]!r}"
            for key in self.config
            if not (key in self.seen or key in inert or key in _FIXED)
        ]
        self.problems += [
            f"{key} is {self.config[key]!r}, only {' or '.join(map(repr, allowed))} is implemented"
            for key, allowed in _FIXED.items()
            if key in self.config and self.config[key] not in allowed
        ]
        taps = values["target_layer_ids"]
        if not taps or list(taps) != sorted(set(taps)) or min(taps) < 0:
            self.problems.append(f"target_layer_ids is {list(taps)}, expected distinct ascending layers from 0")
        if values["markov_kind"] not in ("vanilla", "gated", "rnn"):
            self.problems.append(f"markov_head_type is {values['markov_kind']!r}, expected vanilla, gated or rnn")
        if values["tap_stream"] not in ("prefix", "attn_res"):
            self.problems.append(f"aux_hidden_stream is {values['tap_stream']!r}, expected prefix or attn_res")
        for name in ("vocab_size", "block_size", "markov_rank"):
            if not isinstance(values[name], int) or values[name] < 1:
                self.problems.append(f"{name} is {values[name]!r}, expected at least 1")
        mask, vocab, own = (values[name] for name in ("mask_token_id", "vocab_size", "draft_vocab_size"))
        if isinstance(own, int) and isinstance(vocab, int) and not 0 < own <= vocab:
            self.problems.append(f"draft_vocab_size is {own}, expected 1 to vocab_size {vocab}")
        if isinstance(mask, int) and isinstance(vocab, int) and not 0 <= mask < vocab:
            self.problems.append(f"mask_token_id is {mask}, expected an id below vocab_size {vocab}")
