"""Vocabularies that several test modules use."""

from pathlib import Path

import pytest

from k3jax import tokenizer
from k3jax.tokenizer import Tokenizer
from k3jax.tokenizer import train as tokenizer_train


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_compilation: None) -> None:
    """For all tests of this folder."""


@pytest.fixture(scope="session")
def released(shared: Path) -> Tokenizer:
    """The released vocabulary of 163,840 ids."""
    if not (shared / "tokenizer" / "tiktoken.model").is_file():
        pytest.skip("the released vocabulary is not at shared/tokenizer beside the repository")
    return tokenizer.load(shared / "tokenizer")


@pytest.fixture(scope="session")
def small_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of 700 ids, trained on this folder's sources."""
    directory = tmp_path_factory.mktemp("vocabulary")
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("test_[cpt]*.py"))]
    tokenizer_train.train(texts, 700, directory)
    return directory


@pytest.fixture(scope="session")
def small(small_directory: Path) -> Tokenizer:
    """The small vocabulary, loaded."""
    return tokenizer.load(small_directory)


@pytest.fixture(scope="session")
def door_config():
    """Two layers (KDA with a dense MLP, MLA with MoE) over 256 bytes and 256 control tokens: quick to compile."""
    from k3jax.config import K3Config, KdaConfig, MlaConfig, MoeConfig

    return K3Config(
        vocab_size=512,
        hidden_size=48,
        num_layers=2,
        intermediate_size=64,
        mla_layers=(1,),
        attn_res_block_size=1,
        kda=KdaConfig(num_heads=2, head_dim=16),
        mla=MlaConfig(
            num_heads=2, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
        ),
        moe=MoeConfig(
            num_experts=6, num_experts_per_token=2, num_shared_experts=1, intermediate_size=32, latent_size=32
        ),
        max_position_embeddings=600,
        bos_token_id=256,
        eos_token_id=258,
        pad_token_id=511,
    )


@pytest.fixture(scope="session")
def byte_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary whose only byte-pair tokens are the 256 bytes."""
    directory = tmp_path_factory.mktemp("bytes")
    tokenizer_train.train(["nothing to learn"], 512, directory)
    return directory


@pytest.fixture(scope="session")
def door(door_config, random_tree, byte_directory):
    """A loaded float32 model with a tokenizer, shared by all tests so that every shape compiles once."""
    from k3jax.runtime import Model

    return Model.of(door_config, random_tree(door_config), tokenizer=tokenizer.load(byte_directory))
