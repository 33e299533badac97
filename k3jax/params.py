"""Every parameter of the text model, declared once.

Initialisation, sharding, the Hugging Face name map, checkpoint checks and the module tree all derive
from `model_specs`. Weights keep the released `[out, in]` orientation; tensors that are always read
together are stored as one array (`qkvz`, `in_proj`, `gate_up`, stacked experts).
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config

PREFIX = "language_model."
SCALE_GROUP = 32
"""Inputs that share one E8M0 scale in MXFP4."""

ParamDtype = Literal["model", "float32", "uint8"]
Init = Literal["normal", "zeros", "ones", "dt_bias", "packed", "scale"]
Tree = dict[str, Any]

_HF_DTYPE: dict[ParamDtype, str] = {"model": "BF16", "float32": "F32", "uint8": "U8"}


@dataclasses.dataclass(frozen=True, slots=True)
class HfPiece:
    """How one released tensor fills a part of a parameter.

    `hf.reshape(view)[take].transpose(permutation)` equals `parameter[index]`. What no piece takes of a
    released tensor is zero (the padding of `A_log`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    view: tuple[int, ...]
    take: tuple[slice, ...]
    permutation: tuple[int, ...]
    index: tuple[int | slice, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter: `shape`, `dtype` ('model' follows the activations), one logical axis name per dimension."""

    shape: tuple[int, ...]
    dtype: ParamDtype
    axes: tuple[str | None, ...]
    init: Init
    source: tuple[HfPiece, ...] | Callable[[], tuple[HfPiece, ...]]
    """The pieces, or a function that makes them: K3's experts have half a million."""

    @property
    def pieces(self) -> tuple[HfPiece, ...]:
        """The released tensors that fill this parameter."""
        return self.source() if callable(self.source) else self.source

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"parameter of shape {self.shape} has axes {self.axes}, expected one name per dimension")

    def array_dtype(self, model_dtype: Any) -> jnp.dtype:
        """The dtype of the array when activations have `model_dtype`."""
        return jnp.dtype(model_dtype if self.dtype == "model" else self.dtype)


def piece(
    name: str,
    shape: tuple[int, ...],
    dtype: ParamDtype = "model",
    *,
    view: tuple[int, ...] | None = None,
    take: tuple[slice, ...] = (),
    permutation: tuple[int, ...] | None = None,
    index: tuple[int | slice, ...] = (),
    prefix: str = PREFIX,
) -> HfPiece:
    """A piece with the identity for everything left out."""
    view = view or shape
    order = permutation or tuple(range(len(view)))
    return HfPiece(prefix + name, shape, _HF_DTYPE[dtype], view, take, order, index)


def plain(
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    dtype: ParamDtype = "model",
    init: Init = "normal",
    hf_shape: tuple[int, ...] | None = None,
    prefix: str = PREFIX,
) -> ParamSpec:
    """A parameter that is one released tensor, up to a reshape."""
    return ParamSpec(shape, dtype, axes, init, (piece(name, hf_shape or shape, dtype, view=shape, prefix=prefix),))


def _norm(name: str, width: int, axis: str | None = None, dtype: ParamDtype = "model") -> ParamSpec:
    return plain(name, (width,), (axis,), dtype, "ones")


def _attn_res(config: K3Config, name: str) -> Tree:
    """Norm weight and pseudo-query of one AttnRes site (report section 2.2)."""
    width = config.hidden_size
    query = plain(f"{name}_proj.weight", (width,), ("embed",), init="zeros", hf_shape=(1, width))
    return {"norm": _norm(f"{name}_norm.weight", width, "embed"), "query": query}


def _kda(config: K3Config, name: str) -> Tree:
    kda, width = config.kda, config.hidden_size
    heads, dim = kda.num_heads, kda.head_dim
    streams = [
        piece(f"{name}.{stream}_proj.weight", (kda.width, width), view=(heads, dim, width), index=(slice(None), i))
        for i, stream in enumerate("qkvg")
    ]
    convs = [
        piece(
            f"{name}.{stream}_conv1d.weight",
            (kda.width, 1, kda.conv_kernel_size),
            "float32",
            view=(heads, dim, kda.conv_kernel_size),
            permutation=(2, 0, 1),
            index=(slice(None), slice(None), i),
        )
        for i, stream in enumerate("qkv")
    ]
    padded = -(-heads // 128) * 128
    a_log = piece(f"{name}.A_log", (padded,), "float32", take=(slice(heads),))
    out_piece = piece(f"{name}.o_proj.weight", (width, kda.width), view=(width, heads, dim))
    head_axes = ("kda_heads", None)
    return {
        "qkvz": ParamSpec(
            (heads, 4, dim, width), "model", ("kda_heads", None, None, "embed"), "normal", tuple(streams)
        ),
        "f_a": plain(f"{name}.f_a_proj.weight", (dim, width), (None, "embed")),
        "f_b": plain(f"{name}.f_b_proj.weight", (heads, dim, dim), (*head_axes, None), hf_shape=(kda.width, dim)),
        # Whole on every device: a device's rows of it are fewer than a product with few tokens can be cut into.
        "beta": plain(f"{name}.b_proj.weight", (heads, width), (None, "embed")),
        "conv": ParamSpec(
            (kda.conv_kernel_size, heads, 3, dim), "float32", (None, "kda_heads", None, None), "normal", tuple(convs)
        ),
        "a_log": ParamSpec((heads,), "float32", ("kda_heads",), "zeros", (a_log,)),
        "dt_bias": plain(f"{name}.dt_bias", (heads, dim), head_axes, "float32", "dt_bias", (kda.width,)),
        "norm": _norm(f"{name}.o_norm.weight", dim, dtype="float32"),
        "out": ParamSpec((width, heads, dim), "model", ("embed", "kda_heads", None), "normal", (out_piece,)),
    }


def _mla(config: K3Config, name: str) -> Tree:
    mla, width = config.mla, config.hidden_size
    heads, rows = mla.num_heads, mla.q_lora_rank + mla.latent_width
    in_proj = (
        piece(f"{name}.q_a_proj.weight", (mla.q_lora_rank, width), index=(slice(mla.q_lora_rank),)),
        piece(f"{name}.kv_a_proj_with_mqa.weight", (mla.latent_width, width), index=(slice(mla.q_lora_rank, rows),)),
    )
    keys, values = mla.qk_nope_head_dim, mla.v_head_dim
    kv_shape, kv_view = (heads * (keys + values), mla.kv_lora_rank), (heads, keys + values, mla.kv_lora_rank)
    key_up = piece(f"{name}.kv_b_proj.weight", kv_shape, view=kv_view, take=(slice(None), slice(keys)))
    value_up = piece(f"{name}.kv_b_proj.weight", kv_shape, view=kv_view, take=(slice(None), slice(keys, None)))
    head_axes = ("heads", None, None)
    return {
        "in_proj": ParamSpec((rows, width), "model", (None, "embed"), "normal", in_proj),
        "q_norm": _norm(f"{name}.q_a_layernorm.weight", mla.q_lora_rank),
        "kv_norm": _norm(f"{name}.kv_a_layernorm.weight", mla.kv_lora_rank),
        "q_up": plain(
            f"{name}.q_b_proj.weight",
            (heads, mla.query_width, mla.q_lora_rank),
            head_axes,
            hf_shape=(heads * mla.query_width, mla.q_lora_rank),
        ),
        "key_up": ParamSpec((heads, keys, mla.kv_lora_rank), "model", head_axes, "normal", (key_up,)),
        "value_up": ParamSpec((heads, values, mla.kv_lora_rank), "model", head_axes, "normal", (value_up,)),
        "gate": plain(
            f"{name}.g_proj.weight", (heads, values, width), ("heads", None, "embed"), hf_shape=(heads * values, width)
        ),
        "out": plain(
            f"{name}.o_proj.weight", (width, heads, values), ("embed", "heads", None), hf_shape=(width, heads * values)
        ),
    }


def _mlp(config: K3Config, name: str, size: int) -> Tree:
    width = config.hidden_size
    pair = tuple(
        piece(f"{name}.{half}_proj.weight", (size, width), index=(i,)) for i, half in enumerate(("gate", "up"))
    )
    return {
        "gate_up": ParamSpec((2, size, width), "model", (None, "ffn", "embed"), "normal", pair),
        "down": plain(f"{name}.down_proj.weight", (width, size), ("embed", "ffn")),
    }


def _experts(config: K3Config, name: str) -> Tree:
    """Routed experts as packed MXFP4: two E2M1 codes per byte, one E8M0 scale per 32 inputs."""
    moe = config.moe
    count, inner, latent = moe.num_experts, moe.intermediate_size, moe.latent_size

    def stack(parts: tuple[str, ...], rows: int, cols: int, kind: str, init: Init) -> ParamSpec:
        columns = cols // (2 if kind == "packed" else SCALE_GROUP)

        def pieces() -> tuple[HfPiece, ...]:
            return tuple(
                piece(
                    f"{name}.{expert}.{part}.weight_{kind}",
                    (rows, columns),
                    "uint8",
                    index=(expert, i) if len(parts) > 1 else (expert,),
                )
                for expert in range(count)
                for i, part in enumerate(parts)
            )

        if len(parts) > 1:
            axes: tuple[str | None, ...] = ("experts", None, "expert_ffn", "latent")
            return ParamSpec((count, len(parts), rows, columns), "uint8", axes, init, pieces)
        return ParamSpec((count, rows, columns), "uint8", ("experts", "latent", "expert_ffn"), init, pieces)

    return {
        "gate_up_packed": stack(("w1", "w3"), inner, latent, "packed", "packed"),
        "gate_up_scale": stack(("w1", "w3"), inner, latent, "scale", "scale"),
        "down_packed": stack(("w2",), latent, inner, "packed", "packed"),
        "down_scale": stack(("w2",), latent, inner, "scale", "scale"),
    }


def _moe(config: K3Config, name: str) -> Tree:
    moe, width = config.moe, config.hidden_size
    count, latent = moe.num_experts, moe.latent_size
    return {
        "router": plain(f"{name}.gate.weight", (count, width), (None, "embed")),
        "correction_bias": plain(f"{name}.gate.e_score_correction_bias", (count,), (None,), "float32", "zeros"),
        "latent_down": plain(f"{name}.routed_expert_down_proj.weight", (latent, width), ("latent", "embed")),
        "latent_norm": _norm(f"{name}.routed_expert_norm.weight", latent),
        "latent_up": plain(f"{name}.routed_expert_up_proj.weight", (width, latent), ("embed_out", None)),
        "shared": _mlp(config, f"{name}.shared_experts", moe.shared_size),
        "experts": _experts(config, f"{name}.experts"),
    }


def layer_specs(config: K3Config, layer: int) -> Tree:
    """Specs of one decoder layer (0-based)."""
    name = f"model.layers.{layer}"
    width = config.hidden_size
    attention = _mla if config.is_mla(layer) else _kda
    ffn = (
        _moe(config, f"{name}.block_sparse_moe")
        if config.is_moe(layer)
        else _mlp(config, f"{name}.mlp", config.intermediate_size)
    )
    return {
        "attention_res": _attn_res(config, f"{name}.self_attention_res"),
        "attention_norm": _norm(f"{name}.input_layernorm.weight", width, "embed"),
        "attention": attention(config, f"{name}.self_attn"),
        "ffn_res": _attn_res(config, f"{name}.mlp_res"),
        "ffn_norm": _norm(f"{name}.post_attention_layernorm.weight", width, "embed"),
        "ffn": ffn,
    }


def model_specs(config: K3Config) -> Tree:
    """Specs of the whole text model as a nested dict."""
    width = config.hidden_size
    return {
        "embedding": plain("model.embed_tokens.weight", (config.vocab_size, width), ("vocab", "embed")),
        "layers": {str(layer): layer_specs(config, layer) for layer in range(config.num_layers)},
        "output_res": _attn_res(config, "model.output_attn_res"),
        "norm": _norm("model.norm.weight", width, "embed"),
        "head": plain("lm_head.weight", (config.vocab_size, width), ("vocab", "embed")),
    }


def flatten(tree: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Leaves of a nested dict with their paths, in declaration order."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def map_tree(function: Callable[[ParamSpec], Any], tree: Mapping[str, Any]) -> Tree:
    """A nested dict of the same structure with `function` applied to every leaf."""
    return {
        key: map_tree(function, value) if isinstance(value, Mapping) else function(value) for key, value in tree.items()
    }


def hf_tensors(tree: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Released tensors that the specs in `tree` read: name -> (shape, safetensors dtype)."""
    return {part.name: (part.shape, part.dtype) for _, spec in flatten(tree) for part in spec.pieces}


def abstract(config: K3Config, dtype: Any = jnp.bfloat16) -> Tree:
    """The parameters as `jax.ShapeDtypeStruct`s; no memory is touched."""
    return map_tree(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.array_dtype(dtype)), model_specs(config))


def initialize(config: K3Config, key: jax.Array, dtype: Any = jnp.bfloat16) -> Tree:
    """Random parameters for training or tests; packed experts get random codes."""
    specs = model_specs(config)
    count = sum(1 for _ in flatten(specs))
    keys = iter(jax.random.split(key, count))
    return map_tree(lambda spec: _draw(spec, next(keys), spec.array_dtype(dtype), config.initializer_range), specs)


def _draw(spec: ParamSpec, key: jax.Array, dtype: jnp.dtype, std: float) -> jax.Array:
    match spec.init:
        case "zeros":
            return jnp.zeros(spec.shape, dtype)
        case "ones":
            return jnp.ones(spec.shape, dtype)
        case "packed":
            return jax.random.bits(key, spec.shape, jnp.uint8)
        case "scale":  # a code is about 2.6 rms, so this is the power of two nearest to a weight rms of `std`
            return jnp.full(spec.shape, 127 + round(math.log2(std / 2.6)), jnp.uint8)
        case "dt_bias":  # softplus^-1 of LogUniform[1e-3, 1e-1], as flash-linear-attention draws it
            low, high = np.log(np.float32(1e-3)), np.log(np.float32(1e-1))
            step = jnp.exp(jax.random.uniform(key, spec.shape, jnp.float32, low, high))
            return step + jnp.log(-jnp.expm1(-step))
        case "normal":
            return (jax.random.normal(key, spec.shape, jnp.float32) * std).astype(dtype)
