"""Train a small byte-level vocabulary in K3's format.

The result is a directory with `tiktoken.model` and `tokenizer_config.json`:
K3's pre-tokenisation, single bytes at ranks 0 to 255, and the 256 control
names after the byte-pair tokens.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer as BytePairTokenizer
from tokenizers import models, trainers

from k3jax.tokenizer import Tokenizer, cut, load
from k3jax.tokenizer import control as control_tokens
from k3jax.tokenizer import convert as tokenizer_convert

MIN_VOCAB_SIZE = 256 + control_tokens.CONTROL_SLOTS
_LONGEST_TOKEN = 256  # as in the released vocabulary
_NO_LIMIT = int(1e30)  # the value transformers takes for "no maximum length"


def train(texts: Iterable[str], vocab_size: int, out_dir: str | Path) -> Tokenizer:
    """Learn `vocab_size` tokens (256 control tokens included) and write them to `out_dir`.

    Raises ValueError when `vocab_size` is below 512 or the texts are too few for it.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size is {vocab_size}; expected at least {MIN_VOCAB_SIZE} (256 bytes, 256 control tokens)"
        )
    tokens = _learn(texts, vocab_size - control_tokens.CONTROL_SLOTS)
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "tiktoken.model").write_bytes(tokenizer_convert.format_ranks(tokens))
    (out_dir / "tokenizer_config.json").write_text(
        json.dumps(config_for(control_tokens.default_names(len(tokens))), indent=1) + "\n", encoding="utf-8"
    )
    return load(out_dir)


def _learn(texts: Iterable[str], size: int) -> list[bytes]:
    alphabet = tokenizer_convert.byte_alphabet()
    tokenizer = BytePairTokenizer(models.BPE())
    tokenizer.pre_tokenizer = tokenizer_convert.pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=list(alphabet.values()),
        special_tokens=[],
        max_token_length=_LONGEST_TOKEN,
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in cut(text)), trainer)
    vocabulary = tokenizer.get_vocab()
    if len(vocabulary) != size:
        raise ValueError(
            f"the texts yield {len(vocabulary)} byte-pair tokens, {size} were asked for; "
            "give more text or lower vocab_size"
        )
    to_byte = {char: byte for byte, char in alphabet.items()}
    return [bytes(to_byte[char] for char in token) for token in sorted(vocabulary, key=vocabulary.__getitem__)]


def config_for(control: dict[int, str]) -> dict[str, object]:
    """The `tokenizer_config.json` that declares the control tokens `control` (id -> name)."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    names = set(control.values())
    roles = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    return {
        "added_tokens_decoder": {str(id_): {"content": name, **flags} for id_, name in sorted(control.items())},
        **{role: name for role, name in roles.items() if name in names},
        "clean_up_tokenization_spaces": False,
        "model_max_length": _NO_LIMIT,
        "tokenizer_class": "TikTokenTokenizer",
    }
