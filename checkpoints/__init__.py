"""Weights in and out: Hugging Face safetensors, orbax, and the checks that come before a byte is read.

    config, parameters = checkpoints.load("path/to/checkpoint")
    checkpoints.save("path/to/orbax", config, parameters)
    config, parameters = checkpoints.restore("path/to/orbax", shardings)
    checkpoints.export("path/to/released-format", config, parameters)

Names are imported on first use, so that `import checkpoints` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints.checking import check
    from checkpoints.errors import CheckpointError
    from checkpoints.exporting import export
    from checkpoints.native import restore, save
    from checkpoints.reading import load
    from checkpoints.synthetic import write_random

_MODULES = {
    "CheckpointError": "errors",
    "check": "checking",
    "export": "exporting",
    "load": "reading",
    "restore": "native",
    "save": "native",
    "write_random": "synthetic",
}

__all__ = ["CheckpointError", "check", "export", "load", "restore", "save", "write_random"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'checkpoints' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"checkpoints.{_MODULES[name]}"), name)
