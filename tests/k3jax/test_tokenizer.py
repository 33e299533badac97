"""The tokenizer against the published vectors, and what every vocabulary must hold."""

import hashlib
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax import tokenizer
from k3jax.tokenizer import Tokenizer
from k3jax.tokenizer.detokenizer import Detokenizer

VECTORS = {
    "T-1": (
        "HelloWorld 漢字テスト 12345 it's",
        [19180, 14350, 220, 1435, 95, 1855, 25875, 33360, 220, 6694, 2899, 4643],
    ),
    "T-2": ("  leading and trailing  ", [220, 8134, 316, 42711, 256]),
    "T-3": ("line one\nline two\r\nline three", [1611, 1101, 198, 1611, 2069, 462, 1611, 3499]),
    "T-4": (
        "snake_case CamelCase SCREAMING_CASE 007 3.14",
        [15394, 898, 39188, 93762, 8081, 368, 8034, 154066, 45020, 220, 16403, 220, 18, 13, 1626],
    ),
    "T-5": ("中文汉字とかな mixed with English", [16717, 38325, 9219, 15593, 11839, 15682, 472, 9159]),
    "T-6": (
        '<|open|>message role="user"<|sep|>',
        [27, 91, 4454, 91, 29, 2778, 6244, 878, 2482, 57838, 91, 40433, 91, 29],
    ),
    "T-7": ("a" + " " * 40 + "b", [64, 11618, 291]),
    "T-8": ("你好，世界！我是 Kimi K3。", [33845, 378, 2243, 856, 7808, 24980, 72, 1040, 18, 292]),
    "T-9": ("a  b\t\tc\n\n\nd \n  e   ", [64, 220, 291, 197, 2529, 3898, 67, 1420, 220, 350, 274]),
    "T-10": (
        "literal <|open|> and <|end_of_msg|> and [BOS] here",
        [82319, 22652, 4454, 91, 29, 316, 22652, 517, 5118, 14222, 91, 29, 316, 793, 33, 4110, 60, 2397],
    ),
    "T-11": ("a\x00b\x01c\x7fd", [64, 188, 65, 189, 66, 221, 67]),
    "T-12": (
        "The quick brown fox jumps over the lazy dog.",
        [1008, 5072, 16331, 69275, 60062, 1312, 276, 29292, 7751, 13],
    ),
    "T-13": ("ab" * 64, [83663] * 32),
    "T-18": (
        "0 7 42 1234 999999 3.14159 1e-9",
        [15, 220, 22, 220, 5512, 220, 6694, 19, 220, 11275, 11275, 220, 18, 13, 18702, 6276, 220, 16, 68, 12, 24],
    ),
    "placeholder": ("<|kimi_image_placeholder|>", [27, 91, 74, 30223, 11947, 114136, 91, 29]),
    "empty": ("", []),
}
LONG_VECTORS = {
    "T-14": ("QUJDRA" * 5000, 19_999, "590296059dadcd08a8442944adffd3e8a5aa448688ac0f38444788a4764a057a"),
    "T-15": (" " * 30_000 + "end", 121, "6942c3766e1f1bac840aaebd46eb16d287f8e64a0e2282f5086daa783aa06871"),
    "T-16": ("word " * 6000, 6001, "2a6b07ff028278210e75adcf74e64cb75c796bba675da8c23a53c9a350f6ce43"),
    "T-17": ("word " * 100_000, 100_002, "8b3dc4f12d993f44310494e34ea8b88c29b0d1d50c9008d60815a67023ad5703"),
}
NAMED = {
    163584: "[BOS]",
    163585: "[EOS]",
    163586: "<|end_of_msg|>",
    163587: "<|open|>",
    163588: "<|close|>",
    163589: "<|sep|>",
    163590: "[start_header_id]",
    163591: "[end_header_id]",
    163593: "[EOT]",
    163602: "<|media_begin|>",
    163603: "<|media_content|>",
    163604: "<|media_end|>",
    163605: "<|media_pad|>",
    163649: "<osagent_mode>",
    163838: "[UNK]",
    163839: "[PAD]",
}
ONE_TOKEN = {"think": 39964, "response": 12092, "message": 2778, "tools": 25385, "call": 10257, "argument": 47185}


@pytest.mark.parametrize("name", VECTORS)
def test_ordinary_text_has_the_published_ids(released: Tokenizer, name: str) -> None:
    text, ids = VECTORS[name]
    assert released.encode(text) == ids
    assert released.decode(ids) == text


@pytest.mark.parametrize("name", LONG_VECTORS)
def test_long_runs_are_cut_like_the_reference(released: Tokenizer, name: str) -> None:
    text, count, digest = LONG_VECTORS[name]
    ids = released.encode(text)
    assert len(ids) == count
    assert hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest() == digest


def test_special_spellings_become_ids_only_when_allowed(released: Tokenizer) -> None:
    text = VECTORS["T-10"][0]
    assert released.encode(text, allow_special=True) == [82319, 220, 163587, 316, 220, 163586, 316, 220, 163584, 2397]
    for name in released.control.values():
        assert released.encode(name, allow_special=True) == [released.control_ids[name]]
        assert max(released.encode(f"x{name}y")) < released.base_size


def test_sizes_and_control_names_of_the_released_vocabulary(released: Tokenizer) -> None:
    assert (released.base_size, released.vocab_size, len(released.control)) == (163_584, 163_840, 256)
    assert released.eos_ids == (163_586, 163_585)
    for id_ in range(163_584, 163_840):
        name = NAMED.get(id_, f"<|reserved_token_{id_}|>")
        assert released.decode([id_]) == name
        assert released.decode([id_], skip_special=True) == ""
    for text, id_ in ONE_TOKEN.items():
        assert released.encode(text) == [id_]


def test_single_bytes_come_first_in_the_alphabet_order(released: Tokenizer, small: Tokenizer) -> None:
    for vocabulary in (released, small):
        assert vocabulary.token_bytes(0) == b"!"
        assert vocabulary.token_bytes(220) == b" "
        assert vocabulary.token_bytes(188) == b"\x00"
        assert {vocabulary.token_bytes(id_) for id_ in range(256)} == {bytes([byte]) for byte in range(256)}


def test_control_tokens_follow_a_small_vocabulary(small: Tokenizer) -> None:
    base = small.base_size
    assert (small.vocab_size, base) == (700, 444)
    assert small.control == {
        base + id_ - 163_584: name.replace(str(id_), str(base + id_ - 163_584))
        for id_, name in ((id_, NAMED.get(id_, f"<|reserved_token_{id_}|>")) for id_ in range(163_584, 163_840))
    }
    assert small.eos_ids == (base + 2, base + 1)


@pytest.mark.parametrize("bad", [-1, 700, 10**9])
def test_an_id_out_of_range_is_named(small: Tokenizer, bad: int) -> None:
    for call in (small.decode, small.decode_bytes, Detokenizer(small).push):
        with pytest.raises(ValueError, match=rf"token id {bad} is out of range.*0 to 699"):
            call([1, bad])
    with pytest.raises(ValueError, match=rf"token id {bad}"):
        small.token_bytes(bad)


def test_lone_surrogates_become_replacement_characters(small: Tokenizer) -> None:
    assert small.decode(small.encode("a\ud83db")) == "a\ufffdb"
    assert small.encode("\ud83d\ude00") == small.encode("😀")


def naive_cuts(text: str) -> list[str]:
    """The cutting rule, a character at a time."""
    pieces = []
    for start in range(0, len(text), 400_000):
        piece, run, space = "", 0, None
        for char in text[start : start + 400_000]:
            run = run + 1 if char.isspace() == space else 1
            space = char.isspace()
            if run > 25_000:
                pieces.append(piece)
                piece, run = "", 1
            piece += char
        pieces.append(piece)
    return pieces


@pytest.mark.parametrize(
    "runs",
    [
        [("a", 24_999), (" ", 25_000), ("b", 25_001)],
        [("\x1c", 25_000), ("\x85", 1), ("\u3000", 25_000)],
        [("漢", 50_001)],
        [("\u200b", 25_000), ("\x00", 2), (" ", 1)],
        [("a", 390_000), (" ", 30_000)],
        [("a ", 200_001)],
        [],
    ],
)
def test_cuts_follow_the_rule(runs: list[tuple[str, int]]) -> None:
    text = "".join(char * count for char, count in runs)
    assert list(tokenizer.cut(text)) == (naive_cuts(text) if text else [])


def test_a_special_spelling_across_a_cut_is_text(released: Tokenizer) -> None:
    text = "a" * (400_000 - 4) + "<|open|>"
    assert 163_587 not in released.encode(text, allow_special=True)
    assert released.encode("a" * 10 + "<|open|>", allow_special=True)[-1] == 163_587


@given(st.text() | st.text(st.sampled_from("<|open|>[BOS] \n\té漢😀\ud800")))
def test_no_text_yields_a_control_id_and_all_text_returns(small: Tokenizer, text: str) -> None:
    ids = small.encode(text)
    assert all(id_ < small.base_size for id_ in ids)
    assert small.decode(ids) == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@given(st.lists(st.integers(0, 699)), st.lists(st.integers(0, 50)), st.booleans())
def test_detokenizer_pieces_join_to_the_whole(small: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(small, skip_special=skip)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pieces = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    assert "".join(pieces) + detokenizer.finish() == small.decode(ids, skip_special=skip)


def test_detokenizer_holds_back_incomplete_characters(small: Tokenizer) -> None:
    ids = [next(id_ for id_ in range(256) if small.token_bytes(id_) == bytes([byte])) for byte in "é€😀".encode()]
    detokenizer = Detokenizer(small)
    assert [detokenizer.push(id_) for id_ in ids] == ["", "é", "", "", "€", "", "", "", "😀"]
    assert detokenizer.push(ids[:1]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.push(small.encode("x")) == "x"


def test_detokenizer_skips_or_shows_control_tokens(small: Tokenizer) -> None:
    ids = small.encode("a<|open|>b", allow_special=True)
    assert Detokenizer(small).push(ids) == "ab"
    assert Detokenizer(small, skip_special=False).push(ids) == "a<|open|>b"


def test_tokenizer_json_gives_the_same_ids(small: Tokenizer, small_directory: Path, tmp_path: Path) -> None:
    document = json.loads(small._model.to_str())
    document["added_tokens"] = [
        {"id": id_, "content": name, "special": i % 2 == 0, "normalized": False, "single_word": False}
        | {"lstrip": False, "rstrip": False}
        for i, (id_, name) in enumerate(small.control.items())
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    loaded = tokenizer.load(tmp_path)
    assert loaded.control == small.control
    assert loaded.vocab_size == small.vocab_size
    text = "def f(x):\n    return '漢字 <|open|>' + [BOS] <|close|> 😀"
    for special in (False, True):
        assert loaded.encode(text, special) == small.encode(text, special)
    assert loaded.decode(range(700)) == small.decode(range(700))
    assert tokenizer.load(small_directory / "tiktoken.model").encode(text) == small.encode(text)


def test_control_names_come_from_the_config(small_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes((small_directory / "tiktoken.model").read_bytes())
    config = {"added_tokens_decoder": {"444": {"content": "<start>"}, "446": {"content": "<|end_of_msg|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = tokenizer.load(tmp_path)
    assert loaded.control[444] == "<start>"
    assert loaded.control[445] == "<|reserved_token_445|>"
    assert loaded.eos_ids == (446,)
    with pytest.raises(ValueError, match=r"no control token '<\|open\|>'"):
        loaded.control_id("<|open|>")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"443": {"content": "<x>"}}, r"added_tokens_decoder\[443\] = '<x>' lies inside .* 444 tokens"),
        ({"444": {"content": ""}}, r"added_tokens_decoder\[444\] has content ''"),
        ({"x": {"content": "y"}}, "key 'x'"),
        ({"444": {"content": "<x>"}, "445": {"content": "<x>"}}, "444 and 445 share the name '<x>'"),
        ([], "is a list"),
    ],
)
def test_a_wrong_config_is_named(small_directory: Path, tmp_path: Path, entry: object, message: str) -> None:
    (tmp_path / "tiktoken.model").write_bytes((small_directory / "tiktoken.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entry}))
    with pytest.raises(ValueError, match=message):
        tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: [], "holds no tokens"),
        (lambda lines: [*lines[:5], b"!!! 5", *lines[6:]], "line 6 is"),
        (lambda lines: [*lines[:5], b"QQ==", *lines[6:]], "line 6 is"),
        (lambda lines: lines[:5] + lines[6:], "rank 5 is missing"),
        (lambda lines: [*lines[:5], b"QUJDREVG 5", *lines[6:]], "single bytes are needed|no token of its own"),
        (lambda lines: [*lines, b"IQ== %d" % len(lines)], "repeated"),
        (lambda lines: [*lines, b"AQIDBAUG %d" % len(lines)], "not the merge of two"),
    ],
)
def test_a_damaged_rank_file_is_named(small_directory: Path, tmp_path: Path, edit: object, message: str) -> None:
    lines = (small_directory / "tiktoken.model").read_bytes().splitlines()
    path = tmp_path / "tiktoken.model"
    path.write_bytes(b"".join(line + b"\n" for line in edit(lines)))
    with pytest.raises(ValueError, match=message) as raised:
        tokenizer.load(tmp_path)
    assert str(path) in str(raised.value)


def test_ranks_may_come_in_any_order(small: Tokenizer, small_directory: Path, tmp_path: Path) -> None:
    lines = (small_directory / "tiktoken.model").read_bytes().splitlines(keepends=True)
    (tmp_path / "tiktoken.model").write_bytes(b"".join(reversed(lines)))
    assert tokenizer.load(tmp_path).encode("return None") == small.encode("return None")


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(FileNotFoundError, match=r"no tokenizer at .*expected a directory with tiktoken.model"):
            tokenizer.load(path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ValueError, match="no tokenizers file"):
        tokenizer.load(tmp_path)
