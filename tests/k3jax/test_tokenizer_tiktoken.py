"""20,000 lines of many scripts against `tiktoken`, which reads the same rank file."""

import base64
import random
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiktoken

from k3jax.tokenizer import Tokenizer
from k3jax.tokenizer import train as tokenizer_train

UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Typed from the published description, not taken from the code under test.
PATTERN = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SCRIPTS = {
    "latin": (0x41, 0x24F),
    "ipa": (0x250, 0x2FF),
    "combining": (0x300, 0x36F),
    "greek": (0x370, 0x3FF),
    "cyrillic": (0x400, 0x52F),
    "armenian": (0x531, 0x58F),
    "hebrew": (0x590, 0x5FF),
    "arabic": (0x600, 0x6FF),
    "devanagari": (0x900, 0x97F),
    "bengali": (0x980, 0x9FF),
    "tamil": (0xB80, 0xBFF),
    "thai": (0xE00, 0xE7F),
    "tibetan": (0xF00, 0xFFF),
    "georgian": (0x10A0, 0x10FF),
    "ethiopic": (0x1200, 0x137F),
    "cherokee": (0x13A0, 0x13FF),
    "khmer": (0x1780, 0x17FF),
    "mongolian": (0x1800, 0x18AF),
    "punctuation": (0x2000, 0x206F),
    "letterlike": (0x2100, 0x218F),
    "arrows and mathematics": (0x2190, 0x22FF),
    "boxes": (0x2500, 0x25FF),
    "kana": (0x3000, 0x30FF),
    "han": (0x4E00, 0x9FFF),
    "yi": (0xA000, 0xA4CF),
    "hangul": (0xAC00, 0xD7A3),
    "private": (0xE000, 0xE0FF),
    "compatibility": (0xF900, 0xFAFF),
    "presentation": (0xFE00, 0xFFEF),
    "gothic": (0x10330, 0x1034F),
    "mathematical letters": (0x1D400, 0x1D7FF),
    "emoji": (0x1F300, 0x1FAFF),
    "han extension": (0x20000, 0x2A6DF),
}
JOINED = [
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "🇰🇷🇨🇳",
    "👍🏽",
    "é",
    "ǅ",
    "ﬁ",
    "ß",
    "İ",
    "ſ",
    "it's",
    "WE'LL",
    "I'Ve",
    "x²",
    "½",
    "Ⅷ",
    "々",
    "〇",
]
CONTROLS = [
    "\x00",
    "\x07",
    "\x1b",
    "\x1c",
    "\x1f",
    "\x7f",
    "\x85",
    "\xa0",
    "\u200b",
    "\u2028",
    "\ufeff",
    "\ufffd",
    "\r",
    "\t",
]
CODE = [
    "def f(x):",
    "  return x",
    "{'a': [1, 2]}",
    "</div>",
    "#include <stdio.h>",
    "\r\n\r\n",
    "a_b-c",
    "0x1F",
    "://",
    "<|open|>",
]
SPACES = [" ", "  ", "\n", " \n ", "\t\t", "\u3000", "\r\n", ""]


def lines(count: int) -> Iterator[str]:
    """Lines that mix two or three scripts with blanks, digits, code and control characters."""
    rng = random.Random(20_000)
    ranges = list(SCRIPTS.values())
    for _ in range(count):
        parts = []
        for first, last in rng.sample(ranges, rng.randint(1, 3)):
            parts += ["".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 12))), rng.choice(SPACES)]
        for choices in (JOINED, CONTROLS, CODE, [str(rng.randrange(10**9))]):
            if rng.random() < 0.4:
                parts += [rng.choice(choices), rng.choice(SPACES)]
        rng.shuffle(parts)
        line = "".join(parts)
        yield unicodedata.normalize("NFD", line) if rng.random() < 0.1 else line


def oracle(path: Path) -> tiktoken.Encoding:
    """`tiktoken` over a rank file, without control tokens."""
    fields = [line.split() for line in path.read_bytes().splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in fields}
    return tiktoken.Encoding("k3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


def mismatches(tokenizer: Tokenizer, reference: tiktoken.Encoding, texts: list[str]) -> list[str]:
    expected = reference.encode_ordinary_batch(texts, num_threads=1)
    return [text for text, ids in zip(texts, expected, strict=True) if tokenizer.encode(text) != ids]


def test_twenty_thousand_lines_agree(released: Tokenizer, shared: Path) -> None:
    texts = list(lines(20_000))
    assert len({char for text in texts for char in text}) > 15_000
    assert mismatches(released, oracle(shared / "tokenizer" / "tiktoken.model"), texts) == []


def test_every_character_agrees_between_letters(released: Tokenizer, shared: Path) -> None:
    texts = [f"a{chr(code)}b {chr(code)} 1{chr(code)}" for code in range(0x3100) if not 0xD800 <= code < 0xE000]
    assert mismatches(released, oracle(shared / "tokenizer" / "tiktoken.model"), texts) == []


def test_a_trained_vocabulary_agrees(small: Tokenizer, small_directory: Path) -> None:
    texts = [*lines(1000), *Path(__file__).read_text(encoding="utf-8").splitlines(keepends=True)]
    assert mismatches(small, oracle(small_directory / "tiktoken.model"), texts) == []


def test_training_is_repeatable_and_exact_in_size(tmp_path: Path) -> None:
    texts = ["def function(argument):\n    return argument\n" * 3, "한국어 漢字 émoji 😀 " * 3]
    written = []
    for directory in (tmp_path / "a", tmp_path / "b"):
        trained = tokenizer_train.train(iter(texts), 530, directory)
        assert (trained.vocab_size, trained.base_size) == (530, 274)
        written.append([path.read_bytes() for path in sorted(directory.iterdir())])
    assert written[0] == written[1]
    assert trained.decode(trained.encode(texts[1])) == texts[1]


@pytest.mark.parametrize(("size", "message"), [(511, "at least 512"), (5000, "yield .* byte-pair tokens, 4744 were")])
def test_an_impossible_size_is_named(tmp_path: Path, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer_train.train(["short text"], size, tmp_path)


def test_encoding_speed(released: Tokenizer) -> None:
    text = "".join(lines(3000))
    start = time.process_time()
    released.encode(text)
    per_megabyte = (time.process_time() - start) * 1e6 / len(text.encode())
    assert per_megabyte < 5, f"{per_megabyte:.2f} s for a megabyte"
