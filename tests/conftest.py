"""Strict settings for every test: they must be in place before JAX starts a backend."""

# ruff: noqa: E402 - what is set before an import must be
import importlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# beartype looks at one item of a list, drawn by the global generator in whatever thread calls: Hypothesis, which
# watches that generator, would see threads of a running service. Its own generator is bound as it is imported.
_global_bits, random.getrandbits = random.getrandbits, random.Random(0).getrandbits
importlib.import_module("beartype")
random.getrandbits = _global_bits

import hypothesis
import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")
_hook = jaxtyping.install_import_hook(["k3jax", "pallas", "checkpoints", "serving"], "beartype.beartype")


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """For programs that run for milliseconds: optimising them takes a quarter of the time that compiling takes.

    Not for those that run often, as those of the engine do.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The developers' folder beside the repository: reference outputs and the real vocabulary."""
    path = Path(__file__).resolve().parents[2] / "shared"
    if not path.is_dir():
        pytest.skip(f"reference data is not at {path.name}/ beside the repository")
    return path


@pytest.fixture(scope="session")
def tiny_config():
    """Every feature of K3 with widths that all differ, so that a mixed-up axis cannot go unseen."""
    from k3jax.config import K3Config, KdaConfig, MlaConfig, MoeConfig

    return K3Config(
        vocab_size=257,
        hidden_size=128,
        num_layers=9,
        intermediate_size=160,
        mla_layers=(3, 7, 8),
        attn_res_block_size=4,
        kda=KdaConfig(num_heads=3, head_dim=32),
        mla=MlaConfig(
            num_heads=3, q_lora_rank=48, kv_lora_rank=40, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24
        ),
        moe=MoeConfig(
            num_experts=10,
            num_experts_per_token=3,
            num_shared_experts=2,
            intermediate_size=96,
            latent_size=64,
            routed_scaling_factor=1.7,
        ),
        max_position_embeddings=4096,
        bos_token_id=250,
        eos_token_id=251,
        pad_token_id=256,
    )


@pytest.fixture(scope="session")
def random_tree():
    """A function (config, seed) -> float32 parameters large enough that caps, gates and depth attention matter."""
    import numpy as np

    from k3jax import params

    def draw(spec: params.ParamSpec, path: tuple[str, ...], rng: np.random.Generator) -> np.ndarray:
        dtype = np.dtype(spec.array_dtype(np.float32))
        if spec.init == "packed":
            return rng.integers(0, 256, spec.shape).astype(dtype)
        if spec.init == "scale":
            return rng.integers(121, 125, spec.shape).astype(dtype)
        values = rng.standard_normal(spec.shape)
        if spec.init == "ones":
            return (1 + 0.2 * values).astype(dtype)
        if spec.init == "normal" and path[-1] not in ("conv", "embedding"):
            values *= 1.5 / np.sqrt(np.prod(spec.shape[1:]) if path[-1] == "out" else spec.shape[-1])
        return (0.3 * values if path[-1] == "correction_bias" else values).astype(dtype)

    def make(config, seed: int = 0) -> params.Tree:
        tree = params.model_specs(config)
        rng = np.random.default_rng(seed)
        arrays = {path: jax.numpy.asarray(draw(spec, path, rng)) for path, spec in params.flatten(tree)}

        def fill(subtree, prefix):
            return {
                key: fill(value, (*prefix, key)) if isinstance(value, dict) else arrays[*prefix, key]
                for key, value in subtree.items()
            }

        return fill(tree, ())

    return make
