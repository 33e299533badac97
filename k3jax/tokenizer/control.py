"""The 256 control tokens that follow the byte-pair vocabulary.

Sixteen are named; the rest are fillers whose name carries their absolute id.
The named ones sit at fixed offsets from the size of the byte-pair vocabulary,
so that a small vocabulary has the same control tokens as the released one.
"""

from collections.abc import Mapping

CONTROL_SLOTS = 256

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MESSAGE = "<|end_of_msg|>"
END_OF_SEQUENCE = "[EOS]"
MEDIA_BEGIN = "<|media_begin|>"
MEDIA_CONTENT = "<|media_content|>"
MEDIA_END = "<|media_end|>"
MEDIA_PAD = "<|media_pad|>"

NAMED_OFFSETS: Mapping[int, str] = {
    0: "[BOS]",
    1: END_OF_SEQUENCE,
    2: END_OF_MESSAGE,
    3: OPEN,
    4: CLOSE,
    5: SEP,
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: MEDIA_BEGIN,
    19: MEDIA_CONTENT,
    20: MEDIA_END,
    21: MEDIA_PAD,
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}


def default_names(base: int) -> dict[int, str]:
    """Id -> name of the control tokens after `base` byte-pair tokens."""
    return {
        base + offset: NAMED_OFFSETS.get(offset, f"<|reserved_token_{base + offset}|>")
        for offset in range(CONTROL_SLOTS)
    }


def names_from_config(config: Mapping[str, object], base: int) -> dict[int, str]:
    """Control names from a `tokenizer_config.json`, defaults where it has no `added_tokens_decoder`.

    Slots that the file leaves out are fillers. Raises ValueError for an entry
    that is malformed, lies inside the byte-pair vocabulary or repeats a name.
    """
    decoder = config.get("added_tokens_decoder")
    if decoder is None:
        return default_names(base)
    if not isinstance(decoder, Mapping):
        raise ValueError(f"added_tokens_decoder is a {type(decoder).__name__}; expected an object of id -> token")
    declared = dict(_entry(key, value, base) for key, value in decoder.items())
    last = max([base + CONTROL_SLOTS - 1, *declared])
    names = {id_: declared.get(id_, f"<|reserved_token_{id_}|>") for id_ in range(base, last + 1)}
    _require_unique(names)
    return names


def _entry(key: object, value: object, base: int) -> tuple[int, str]:
    content = value.get("content") if isinstance(value, Mapping) else value
    if not (isinstance(key, int) or (isinstance(key, str) and key.isdigit())):
        raise ValueError(f"added_tokens_decoder has the key {key!r}; expected a token id")
    if not isinstance(content, str) or not content:
        raise ValueError(f"added_tokens_decoder[{key}] has content {content!r}; expected a non-empty string")
    if int(key) < base:
        raise ValueError(
            f"added_tokens_decoder[{key}] = {content!r} lies inside the byte-pair vocabulary of {base} tokens; "
            f"control ids start at {base}: is this the tokenizer_config.json of another model?"
        )
    return int(key), content


def _require_unique(names: Mapping[int, str]) -> None:
    seen: dict[str, int] = {}
    for id_, name in names.items():
        if name in seen:
            raise ValueError(f"control tokens {seen[name]} and {id_} share the name {name!r}; names must differ")
        seen[name] = id_
