"""The tokenizer as a package for gateways: `tiktoken.model`, `tokenizer_config.json`, `config.json`.

External gateways recognise K3 by these three files, so a small vocabulary
declares itself with the released class and model names.
"""

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

from k3jax import tokenizer
from k3jax.tokenizer import Tokenizer
from k3jax.tokenizer import convert as tokenizer_convert
from k3jax.tokenizer.train import config_for

ARCHITECTURE = "KimiK3ForConditionalGeneration"
MODEL_TYPE = "kimi_k3"
# A fixed date keeps the archive, and so its hash, the same for the same files.
_DATE = (2026, 1, 1, 0, 0, 0)


def package_files(path: str | Path, config: Mapping[str, object] | None = None) -> dict[str, bytes]:
    """Name -> content of the three files for the tokenizer at `path`.

    `config` is the model's `config.json`; by default the one beside the
    tokenizer, and without it the few keys that gateways read. Raises what
    `tokenizer.load` raises, and ValueError for a config of another model.
    """
    loaded = tokenizer.load(path)
    directory = tokenizer.find(path).parent
    declared = tokenizer.read_config(directory) or config_for(loaded.control)
    if config is None:
        config = _config_beside(directory) or _minimal_config(loaded)
    _require_k3(config)
    return {
        "tiktoken.model": tokenizer_convert.format_ranks(loaded.base_tokens),
        "tokenizer_config.json": _json(declared),
        "config.json": _json(config),
    }


def package(path: str | Path, config: Mapping[str, object] | None = None) -> bytes:
    """A zip archive of `package_files`, the same bytes for the same files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in package_files(path, config).items():
            archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def write_package(path: str | Path, out_dir: str | Path, config: Mapping[str, object] | None = None) -> None:
    """Writes `package_files` to the directory `out_dir`."""
    files = package_files(path, config)
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (out_dir / name).write_bytes(content)


def _config_beside(directory: Path) -> dict[str, object] | None:
    path = directory / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _minimal_config(loaded: Tokenizer) -> dict[str, object]:
    ids = loaded.control_ids
    stops = {"bos_token_id": ids.get("[BOS]"), "pad_token_id": ids.get("[PAD]")}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        **{key: id_ for key, id_ in stops.items() if id_ is not None},
        **({"eos_token_id": loaded.eos_ids[0]} if loaded.eos_ids else {}),
        "text_config": {"model_type": "kimi_linear", "vocab_size": loaded.vocab_size},
        "vocab_size": loaded.vocab_size,
    }


def _require_k3(config: Mapping[str, object]) -> None:
    if config.get("model_type") != MODEL_TYPE or config.get("architectures") != [ARCHITECTURE]:
        found = f"model_type {config.get('model_type')!r} and architectures {config.get('architectures')!r}"
        raise ValueError(f"config.json has {found}; gateways know K3 by {MODEL_TYPE!r} and [{ARCHITECTURE!r}]")


def _json(value: object) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()
