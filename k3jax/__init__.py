"""Kimi K3 in JAX: the model, its decoding and its Python door."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3jax.api import Model, generate, load
    from k3jax.config import K3Config

__all__ = ["K3Config", "Model", "generate", "load"]

_HOMES = {"K3Config": "k3jax.config", "Model": "k3jax.api", "generate": "k3jax.api", "load": "k3jax.api"}


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that `import k3jax` starts nothing."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'k3jax' has no attribute {name!r}")
