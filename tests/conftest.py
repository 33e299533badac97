"""Strict settings for every test: they must be in place before JAX starts a backend."""

import os
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")
_hook = jaxtyping.install_import_hook(["k3jax", "pallas", "checkpoints", "serving"], "beartype.beartype")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The developers' folder beside the repository: reference outputs and the real vocabulary."""
    path = Path(__file__).resolve().parents[2] / "shared"
    if not path.is_dir():
        pytest.skip(f"reference data is not at {path.name}/ beside the repository")
    return path
