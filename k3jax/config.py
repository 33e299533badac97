"""Configurations of Kimi K3, read from and written to the released `config.json`."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from k3jax import config_hf


class ConfigError(ValueError):
    """Every inconsistent or unknown entry of a configuration, in one message."""

    def __init__(self, title: str, problems: Sequence[str] = ()) -> None:
        super().__init__(config_hf.listing(title, problems) if problems else title)
        self.problems = list(problems)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KdaConfig:
    """Kimi Delta Attention: `num_heads` heads whose keys and values are `head_dim` wide."""

    num_heads: int
    head_dim: int
    conv_kernel_size: int = 4
    gate_lower_bound: float = -5.0

    @property
    def width(self) -> int:
        """Channels of each of the q, k, v and gate projections."""
        return self.num_heads * self.head_dim


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Gated multi-head latent attention without positional encoding."""

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6

    @property
    def query_width(self) -> int:
        """Channels of one query head: the latent part and the shared part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Values cached per token: the compressed latent and the shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """Softmax scale; it counts the 'rope' channels although nothing is rotated."""
        return self.query_width**-0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Stable LatentMoE: routed experts work in a `latent_size`-wide space."""

    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    intermediate_size: int
    latent_size: int
    routed_scaling_factor: float = 1.0

    @property
    def shared_size(self) -> int:
        """Hidden width of the shared experts, which are one fused MLP."""
        return self.num_shared_experts * self.intermediate_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class K3Config:
    """The text model. Layer indices are 0-based here and 1-based in `config.json`."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    mla_layers: tuple[int, ...]
    attn_res_block_size: int
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig
    first_moe_layer: int = 1
    moe_layer_freq: int = 1
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    norm_eps: float = 1e-5
    max_position_embeddings: int = 1048576
    initializer_range: float = 0.02
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int

    def __post_init__(self) -> None:
        problems = list(config_hf.inconsistencies(self))
        if problems:
            raise ConfigError("inconsistent K3 configuration", problems)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based layers with Kimi Delta Attention."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.mla_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """0-based layers with a LatentMoE."""
        return tuple(layer for layer in range(self.num_layers) if self.is_moe(layer))

    def is_mla(self, layer: int) -> bool:
        """Whether `layer` has MLA attention (otherwise KDA)."""
        return layer in self.mla_layers

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` has a LatentMoE (otherwise a dense MLP)."""
        return layer >= self.first_moe_layer and layer % self.moe_layer_freq == 0

    def starts_block(self, layer: int) -> bool:
        """Whether an AttnRes block starts at `layer`, freezing the running prefix."""
        return layer % self.attn_res_block_size == 0

    @property
    def num_attn_res_blocks(self) -> int:
        """Snapshots frozen over the depth of the model."""
        return -(-self.num_layers // self.attn_res_block_size)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "K3Config":
        """Reads the released `config.json` (wrapper with `text_config`, or the inner part alone).

        Raises `ConfigError` with every unknown, missing, unsupported and inconsistent key.
        """
        values, problems = config_hf.read_text(config)
        try:
            parts = {
                "kda": KdaConfig(**values.pop("kda")),
                "mla": MlaConfig(**values.pop("mla")),
                "moe": MoeConfig(**values.pop("moe")),
            }
            result = cls(**parts, **values)
        except TypeError:  # a required field is missing, which is among the problems
            raise ConfigError("config.json cannot be used", problems) from None
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError("config.json cannot be used", problems)
        return result

    @classmethod
    def from_file(cls, path: str | Path) -> "K3Config":
        """Reads `config.json` at `path` (a file or a checkpoint directory)."""
        return cls.from_hf(read_json(path, "config.json"))

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of this model in the released layout."""
        return config_hf.write(self)


def read_json(path: str | Path, name: str) -> dict[str, Any]:
    """The JSON object in `path`, or in `path / name` when `path` is a directory."""
    file = Path(path)
    if file.is_dir():
        file = file / name
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); expected the {name} of a checkpoint") from error
    except ValueError as error:
        raise ConfigError(f"{file}: is not valid JSON ({error}); expected the {name} of a checkpoint") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: holds a JSON {type(value).__name__}, expected an object")
    return value


def _every_fourth(num_layers: int) -> tuple[int, ...]:
    """K3's MLA layers: every fourth one, and the last."""
    return tuple(sorted({*range(3, num_layers, 4), num_layers - 1}))


def k3() -> K3Config:
    """The released model: 2.78 T parameters, 104 B active per token."""
    return K3Config(
        vocab_size=163840,
        hidden_size=7168,
        num_layers=93,
        intermediate_size=33792,
        mla_layers=_every_fourth(93),
        attn_res_block_size=12,
        kda=KdaConfig(num_heads=96, head_dim=128),
        mla=MlaConfig(
            num_heads=96,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        moe=MoeConfig(
            num_experts=896,
            num_experts_per_token=16,
            num_shared_experts=2,
            intermediate_size=3072,
            latent_size=3584,
        ),
        bos_token_id=163584,
        eos_token_id=163586,
        pad_token_id=163839,
    )


def nano() -> K3Config:
    """The small model shipped in `checkpoints/nano`: every feature of K3, a few million parameters."""
    return K3Config(
        vocab_size=4096,
        hidden_size=288,
        num_layers=13,
        intermediate_size=704,
        mla_layers=_every_fourth(13),
        attn_res_block_size=4,
        kda=KdaConfig(num_heads=4, head_dim=64),
        mla=MlaConfig(
            num_heads=5,
            q_lora_rank=96,
            kv_lora_rank=64,
            qk_nope_head_dim=48,
            qk_rope_head_dim=16,
            v_head_dim=64,
        ),
        moe=MoeConfig(
            num_experts=32,
            num_experts_per_token=4,
            num_shared_experts=2,
            intermediate_size=128,
            latent_size=192,
        ),
        max_position_embeddings=32768,
        bos_token_id=3840,
        eos_token_id=3842,
        pad_token_id=4095,
    )


def rank_slice(tp: int = 8, num_experts: int | None = None) -> K3Config:
    """One device's share of K3 under `tp`-way tensor parallelism, as a model of its own.

    Heads, dense and expert widths are divided by `tp`; `num_experts` may be cut to fit in memory.
    """
    full = k3()
    if tp < 1 or full.kda.num_heads % tp:
        raise ConfigError(f"tp is {tp}, expected a divisor of {full.kda.num_heads} heads")
    return dataclasses.replace(
        full,
        intermediate_size=full.intermediate_size // tp,
        kda=dataclasses.replace(full.kda, num_heads=full.kda.num_heads // tp),
        mla=dataclasses.replace(full.mla, num_heads=full.mla.num_heads // tp),
        moe=dataclasses.replace(
            full.moe,
            num_experts=num_experts or full.moe.num_experts,
            intermediate_size=full.moe.intermediate_size // tp,
        ),
    )
