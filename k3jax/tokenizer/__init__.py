"""The tokenizer: `tiktoken.model` or `tokenizer.json` to ids and back, without any weights.

Ordinary text can never become a control token: `encode(text)` spells
`<|open|>` as byte-pair tokens, and only `encode(text, allow_special=True)`,
which the chat renderer uses for its own markup, turns it into the control id.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as BytePairTokenizer

from k3jax.tokenizer import control as control_tokens
from k3jax.tokenizer import convert as tokenizer_convert

# The reference cuts its input before it looks for words, and the cuts change the ids.
MAX_SLICE = 400_000
MAX_RUN = 25_000
# Python's `\s` on text is `str.isspace`, which is what the reference counts by.
_LONG_RUN = re.compile(rf"\s{{{MAX_RUN}}}(?=\s)|\S{{{MAX_RUN}}}(?=\S)")


class Tokenizer:
    """Byte-pair tokens and, after them, the control tokens.

    Attributes:
      base_size: number of byte-pair tokens; ids below it are ordinary text.
      control: control id -> name.
      control_ids: control name -> id.
    """

    def __init__(self, model: BytePairTokenizer, tokens: list[bytes], control: Mapping[int, str]) -> None:
        self._model = model
        self.base_size = len(tokens)
        self.control = dict(control)
        self.control_ids = {name: id_ for id_, name in self.control.items()}
        size = max([len(tokens) - 1, *self.control]) + 1
        self._pieces = tokens + [b""] * (size - len(tokens))
        for id_, name in self.control.items():
            self._pieces[id_] = name.encode()

    @property
    def vocab_size(self) -> int:
        """Number of ids, control tokens included; the rows of the embedding."""
        return len(self._pieces)

    @property
    def base_tokens(self) -> list[bytes]:
        """The bytes of the byte-pair tokens, by id."""
        return self._pieces[: self.base_size]

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: `<|end_of_msg|>`, and `[EOS]` defensively."""
        stops = (control_tokens.END_OF_MESSAGE, control_tokens.END_OF_SEQUENCE)
        return tuple(self.control_ids[name] for name in stops if name in self.control_ids)

    def control_id(self, name: str) -> int:
        """Id of a control token. Raises ValueError when the vocabulary has no such name."""
        if name not in self.control_ids:
            known = ", ".join(list(self.control_ids)[:6])
            raise ValueError(
                f"this vocabulary has no control token {name!r} (it has {known}, ...); is it K3's tokenizer?"
            )
        return self.control_ids[name]

    def is_control(self, id_: int) -> bool:
        """Whether `id_` is a control token."""
        return id_ in self.control

    def token_bytes(self, id_: int) -> bytes:
        """The bytes of one token; a control token's are its name. Raises ValueError out of range."""
        if not 0 <= id_ < len(self._pieces):
            raise ValueError(self._out_of_range(id_))
        return self._pieces[id_]

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of `text`; nothing is prepended or appended.

        With `allow_special` every spelling of a control token becomes its id;
        without, no control id can appear. Lone surrogates become U+FFFD.
        """
        ids: list[int] = []
        for piece in cut(_without_surrogates(text)):
            if allow_special:
                self._extend_special(ids, piece)
            else:
                ids += self._encode_piece(piece)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. Raises ValueError for an id out of range."""
        ids = list(ids)
        if skip_special:
            ids = [id_ for id_ in ids if id_ not in self.control]
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`, joined. Raises ValueError for an id out of range."""
        ids = list(ids)
        if ids and not 0 <= min(ids) <= max(ids) < len(self._pieces):
            raise ValueError(self._out_of_range(min(ids) if min(ids) < 0 else max(ids)))
        return b"".join(map(self._pieces.__getitem__, ids))

    def _out_of_range(self, id_: int) -> str:
        return f"token id {id_} is out of range; the vocabulary has ids 0 to {self.vocab_size - 1}"

    def _encode_piece(self, piece: str) -> list[int]:
        # The batch call skips the offsets, which halves the time of a long text.
        return self._model.encode_batch_fast([piece], add_special_tokens=False)[0].ids if piece else []

    def _extend_special(self, ids: list[int], piece: str) -> None:
        for part in self._control_pattern.split(piece):
            id_ = self.control_ids.get(part)
            ids += self._encode_piece(part) if id_ is None else [id_]

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.control_ids, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else re.compile("(?!)")


def cut(text: str) -> Iterator[str]:
    """Slices of 400,000 characters, none with more than 25,000 spaces or non-spaces in a row."""
    for start in range(0, len(text), MAX_SLICE):
        piece = text[start : start + MAX_SLICE]
        begin = 0
        if len(piece) > MAX_RUN:
            for run in _LONG_RUN.finditer(piece):
                yield piece[begin : run.end()]
                begin = run.end()
        yield piece[begin:]


def load(path: str | Path) -> Tokenizer:
    """The tokenizer of a directory or file.

    A directory holds `tiktoken.model` (preferred) or `tokenizer.json`; a
    `tokenizer_config.json` beside it names the control tokens. Raises
    FileNotFoundError when there is neither and ValueError for a malformed file.
    """
    path = find(path)
    try:
        if path.suffix == ".json":
            return _from_tokenizer_json(path)
        tokens = tokenizer_convert.parse_ranks(path.read_bytes())
        control = control_tokens.names_from_config(read_config(path.parent), len(tokens))
        return Tokenizer(tokenizer_convert.build(tokens), tokens, control)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def find(path: str | Path) -> Path:
    """The tokenizer file of a directory, or the file itself. Raises FileNotFoundError."""
    path = Path(path)
    candidates = [path / "tiktoken.model", path / "tokenizer.json"] if path.is_dir() else [path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    wanted = "a directory with tiktoken.model or tokenizer.json, or one of these files"
    raise FileNotFoundError(f"no tokenizer at {path}; expected {wanted}")


def read_config(directory: Path) -> dict[str, object]:
    """`tokenizer_config.json` of a directory, or an empty dict. Raises ValueError when it is no JSON object."""
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path.name} holds a {type(config).__name__}; expected an object")
    return config


def _from_tokenizer_json(path: Path) -> Tokenizer:
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise ValueError("this is no tokenizers file; expected an object with a 'model'")
    added = document.pop("added_tokens", None) or []
    control = {entry["id"]: entry["content"] for entry in added}
    vocabulary = document["model"]["vocab"]
    # Control tokens are handled here, so the model must not know them: not even one that the
    # file fails to mark as special may then come out of ordinary text.
    document["post_processor"] = None
    model = BytePairTokenizer.from_str(json.dumps(document))
    return Tokenizer(model, _token_bytes(vocabulary, control), control)


def _token_bytes(vocabulary: Mapping[str, int], control: Mapping[int, str]) -> list[bytes]:
    to_byte = {char: byte for byte, char in tokenizer_convert.byte_alphabet().items()}
    ordinary = {id_: token for token, id_ in vocabulary.items() if id_ not in control}
    size = max(ordinary, default=-1) + 1
    if size != len(ordinary) or (control and min(control) < size):
        raise ValueError(f"{len(ordinary)} byte-pair tokens do not have the ids 0 to {len(ordinary) - 1}")
    try:
        return [bytes(to_byte[char] for char in ordinary[id_]) for id_ in range(size)]
    except KeyError as error:
        raise ValueError(f"a token holds {error.args[0]!r}, which is outside the byte-level alphabet") from error


def _without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
