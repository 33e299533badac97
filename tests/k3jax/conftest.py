"""Vocabularies that several test modules use."""

from pathlib import Path

import pytest

from k3jax import tokenizer, tokenizer_train
from k3jax.tokenizer import Tokenizer


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
