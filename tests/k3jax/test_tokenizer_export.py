"""The exported `tokenizer.json` gives the same ids in other programs and in this one."""

from pathlib import Path

import pytest
import tokenizers

from k3jax import tokenizer
from k3jax.tokenizer import Tokenizer
from k3jax.tokenizer import export as tokenizer_export

TEXT = "def f(x):\n    return '漢字 <|open|> [EOS] 😀'"
LONG = ["QUJDRA" * 5000, " " * 30_000 + "end", "word " * 100_000, " " * 25_000, "\x1c" * 25_001]


@pytest.fixture(scope="module")
def exported(small_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "tokenizer.json"
    tokenizer_export.write_tokenizer_json(small_directory, path)
    return path


def test_the_file_encodes_like_the_reference(small: Tokenizer, exported: Path) -> None:
    other = tokenizers.Tokenizer.from_file(str(exported))
    assert other.get_vocab_size() == small.vocab_size
    assert other.encode(TEXT).ids == small.encode(TEXT, allow_special=True)
    other.encode_special_tokens = True
    assert other.encode(TEXT).ids == small.encode(TEXT)
    assert other.decode(small.encode(TEXT)) == TEXT


@pytest.mark.parametrize("index", range(len(LONG)))
def test_the_file_cuts_long_text(small: Tokenizer, exported: Path, index: int) -> None:
    other = tokenizers.Tokenizer.from_file(str(exported))
    assert other.encode(LONG[index]).ids == small.encode(LONG[index])


def test_the_file_loads_back(small: Tokenizer, exported: Path) -> None:
    loaded = tokenizer.load(exported)
    assert (loaded.control, loaded.base_tokens) == (small.control, small.base_tokens)
    for special in (False, True):
        assert loaded.encode(TEXT, special) == small.encode(TEXT, special)
    assert loaded.encode(LONG[1]) == small.encode(LONG[1])
