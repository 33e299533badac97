"""From `tiktoken.model` ranks to a `tokenizers` byte-pair model, in memory.

`tiktoken.model` has one line `base64(bytes) SPACE rank` per token. The merge
list that `tokenizers` needs is implied: re-running rank-ordered byte-pair
merging on a token's bytes with the lower ranks alone ends in exactly two
parts, which are its merge.
"""

import binascii
from collections.abc import Mapping, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

# K3's pre-tokenisation: a functional fact of the format (alternatives in order: Han runs, two
# kinds of word with an optional contraction, up to three digits, symbols, line ends, spaces).
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def byte_alphabet() -> dict[int, str]:
    """Byte -> printable character (GPT-2's `bytes_to_unicode`), in rank order.

    Printable Latin-1 bytes stand for themselves; the others, in byte order,
    take the code points from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def parse_ranks(data: bytes) -> list[bytes]:
    """Token bytes by rank. Raises ValueError naming the first bad line."""
    fields = data.split()
    try:
        tokens = [binascii.a2b_base64(text, strict_mode=True) for text in fields[0::2]]
        ranks = [int(text) for text in fields[1::2]]
    except ValueError as error:
        raise ValueError(_first_bad_line(data)) from error
    if not tokens or len(tokens) != len(ranks) or len(ranks) != data.count(b"\n") + (not data.endswith(b"\n")):
        raise ValueError(_first_bad_line(data))
    if ranks == list(range(len(ranks))):
        return tokens
    return _by_rank(tokens, ranks)


def format_ranks(tokens: Sequence[bytes]) -> bytes:
    """The bytes of a `tiktoken.model` that holds `tokens` in rank order."""
    return b"".join(binascii.b2a_base64(token, newline=False) + b" %d\n" % rank for rank, token in enumerate(tokens))


def _first_bad_line(data: bytes) -> str:
    for number, line in enumerate(data.splitlines(), 1):
        fields = line.split()
        try:
            binascii.a2b_base64(fields[0], strict_mode=True)
            int(fields[1])
            good = len(fields) == 2
        except (ValueError, IndexError):
            good = False
        if not good:
            return f"line {number} is {line[:60]!r}; expected 'base64 rank'"
    return "the file holds no tokens; expected one 'base64 rank' a line"


def _by_rank(tokens: Sequence[bytes], ranks: Sequence[int]) -> list[bytes]:
    ordered = dict(zip(ranks, tokens, strict=True))
    missing = next((rank for rank in range(len(ranks)) if rank not in ordered), None)
    if missing is not None:
        raise ValueError(f"rank {missing} is missing; ranks must be dense from 0 to {len(ranks) - 1}")
    return [ordered[rank] for rank in range(len(ranks))]


def printable_tokens(tokens: Sequence[bytes]) -> list[str]:
    """Each token in the byte alphabet, one character a byte."""
    table = str.maketrans({chr(byte): char for byte, char in byte_alphabet().items()})
    # One translate over the joined text is several times faster than one per token; the
    # separator lies outside Latin-1, so no token can hold it.
    separator = chr(0x1000)
    return separator.join(token.decode("latin-1") for token in tokens).translate(table).split(separator)


def merges(ranks: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merge of every multi-byte token, in rank order; `ranks` is in rank order too.

    Raises ValueError when a token is not the merge of two tokens of lower rank.
    """
    parts: dict[str, tuple[str, str]] = {}
    seen: set[str] = set()
    for token, rank in ranks.items():
        if len(token) > 1:
            cuts = [at for at in range(1, len(token)) if token[:at] in seen and token[at:] in seen]
            if len(cuts) > 1:
                cuts = [at for at in cuts if _merges_last(token[:at], token[at:], ranks, parts)]
            if not cuts:
                raise ValueError(
                    f"token {rank} is not the merge of two tokens of lower rank; these are no byte-pair ranks"
                )
            parts[token] = (token[: cuts[0]], token[cuts[0] :])
        seen.add(token)
    return list(parts.values())


def _merges_last(left: str, right: str, ranks: Mapping[str, int], parts: Mapping[str, tuple[str, str]]) -> bool:
    """Whether byte-pair merging of `left + right` leaves these two until the end.

    Undoes the merges next to the boundary, latest first. At each step the two
    neighbours must not have merged across the boundary before the merge that
    is undone; of equal ranks the leftmost merges first.
    """
    never = len(ranks)
    while len(left) > 1 or len(right) > 1:
        if len(right) == 1 or (len(left) > 1 and ranks[left] > ranks[right]):
            formed, left = ranks[left], parts[left][1]
            crossed = ranks.get(left + right, never) < formed
        else:
            formed, right = ranks[right], parts[right][0]
            crossed = ranks.get(left + right, never) <= formed
        if crossed:
            return False
    return True


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """K3's pattern, then the byte alphabet."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def build(tokens: Sequence[bytes]) -> Tokenizer:
    """A `tokenizers` model of the byte-pair tokens alone, without control tokens."""
    vocabulary = {token: rank for rank, token in enumerate(printable_tokens(tokens))}
    if len(vocabulary) != len(tokens):
        raise ValueError(f"{len(tokens) - len(vocabulary)} tokens are repeated; every token must be unique")
    missing = [byte for byte, char in byte_alphabet().items() if char not in vocabulary]
    if missing:
        raise ValueError(f"byte {missing[0]} has no token of its own; all 256 single bytes are needed")
    # A whole word that is a token is taken as it is: the same ids as merging, in less time.
    model = models.BPE(vocabulary, merges(vocabulary), ignore_merges=True, fuse_unk=False, byte_fallback=False)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
