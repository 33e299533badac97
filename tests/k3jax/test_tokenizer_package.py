"""The package that gateways load."""

import io
import json
import zipfile
from pathlib import Path

import pytest

from k3jax import tokenizer
from k3jax.tokenizer import Tokenizer
from k3jax.tokenizer import package as tokenizer_package

TEXT = "def f(x):\n    return '漢字' <|open|>"


def test_the_archive_holds_the_three_files(small: Tokenizer, small_directory: Path, tmp_path: Path) -> None:
    data = tokenizer_package.package(small_directory)
    assert data == tokenizer_package.package(small_directory)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert sorted(archive.namelist()) == ["config.json", "tiktoken.model", "tokenizer_config.json"]
        archive.extractall(tmp_path)
    loaded = tokenizer.load(tmp_path)
    assert loaded.encode(TEXT, allow_special=True) == small.encode(TEXT, allow_special=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["KimiK3ForConditionalGeneration"]
    assert (config["model_type"], config["vocab_size"]) == ("kimi_k3", 700)
    assert config["eos_token_id"] == small.control_id("<|end_of_msg|>")
    declared = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert {int(id_): token["content"] for id_, token in declared["added_tokens_decoder"].items()} == small.control


def test_the_released_vocabulary_is_packed_as_it_is(released: Tokenizer, shared: Path) -> None:
    files = tokenizer_package.package_files(shared / "tokenizer")
    assert files["tiktoken.model"] == (shared / "tokenizer" / "tiktoken.model").read_bytes()
    declared = json.loads(files["tokenizer_config.json"])["added_tokens_decoder"]
    assert declared["163586"]["content"] == "<|end_of_msg|>"
    assert len(declared) == 256


def test_the_config_beside_the_tokenizer_is_kept(small_directory: Path, tmp_path: Path) -> None:
    tokenizer_package.write_package(small_directory, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"extra": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert json.loads(tokenizer_package.package_files(tmp_path)["config.json"]) == config
    assert json.loads(tokenizer_package.package_files(tmp_path, {**config, "extra": 2})["config.json"])["extra"] == 2


def test_the_config_of_another_model_is_refused(small_directory: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json has model_type 'kimi_k25' and architectures None"):
        tokenizer_package.package(small_directory, {"model_type": "kimi_k25"})
