"""The tokenizer as one `tokenizer.json`, for programs that read only `tokenizers` files.

The file makes the reference's cuts itself, so its ids are exact for text of
any length. To keep control tokens out of ordinary text its reader has to set
`encode_special_tokens` (`split_special_tokens` in transformers). One case
differs from the reference: a control token that straddles a cut is found.
"""

from pathlib import Path

from tokenizers import AddedToken, Regex, pre_tokenizers
from tokenizers import Tokenizer as BytePairTokenizer

from k3jax import tokenizer
from k3jax.tokenizer import convert as tokenizer_convert

# `str.isspace` also takes U+001C to U+001F; the look-ahead leaves a run of exactly the limit whole.
_SPACE, _OTHER = r"[\s\x1c-\x1f]", r"[^\s\x1c-\x1f]"
_LONG_RUN = "|".join(f"{kind}{{{tokenizer.MAX_RUN}}}(?={kind})" for kind in (_SPACE, _OTHER))


def convert(path: str | Path) -> BytePairTokenizer:
    """The tokenizer at `path` (as for `tokenizer.load`) as a complete `tokenizers` object."""
    loaded = tokenizer.load(path)
    converted = tokenizer_convert.build(loaded.base_tokens)
    converted.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.FixedLength(tokenizer.MAX_SLICE),
            pre_tokenizers.Split(Regex(_LONG_RUN), "merged_with_previous"),
            tokenizer_convert.pre_tokenizer(),
        ]
    )
    names = [name for _, name in sorted(loaded.control.items())]
    converted.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return converted


def write_tokenizer_json(path: str | Path, out_file: str | Path) -> None:
    """Writes the `tokenizer.json` of the tokenizer at `path`."""
    Path(out_file).write_text(convert(path).to_str(), encoding="utf-8")
