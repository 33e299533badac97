"""What the service tells about its model, and how it reads and writes its text."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from k3jax.runtime import Model
from k3jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model from outside: names, sizes, special ids."""

    name: str
    path: str
    vocab_size: int
    max_length: int
    stop_ids: tuple[int, ...]
    bos_id: int
    pad_id: int
    dtype: str
    kv_cache_dtype: str
    tokenizer: Tokenizer | None = None
    """None: only token ids are served."""
    has_draft: bool = False
    default_sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the checkpoint recommends; applied where a request leaves a setting open."""

    @classmethod
    def of(cls, model: Model, name: str | None = None, max_length: int | None = None) -> "ModelCard":
        """The card of a loaded model; `max_length` caps the model's own limit."""
        config = model.config
        return cls(
            name=name or (model.path.name if model.path else "k3"),
            path="" if model.path is None else str(model.path.resolve()),
            vocab_size=config.vocab_size,
            max_length=min(max_length or model.max_length, model.max_length),
            stop_ids=model.stop_ids,
            bos_id=config.bos_token_id,
            pad_id=config.pad_token_id,
            dtype=jnp.dtype(model.dtype).name,
            kv_cache_dtype=jnp.dtype(model.latent_dtype).name,
            tokenizer=model.tokenizer,
            has_draft=model.draft is not None,
            default_sampling=default_sampling(model.path),
        )


_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def default_sampling(path: Path | None) -> dict[str, Any]:
    """The sampling settings in `generation_config.json`; none without such a file."""
    file = path / "generation_config.json" if path is not None else None
    if file is None or not file.is_file():
        return {}
    config = json.loads(file.read_text(encoding="utf-8"))
    return {name: config[name] for name in _SETTINGS if config.get(name) is not None}
