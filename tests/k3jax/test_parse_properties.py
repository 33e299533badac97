"""Any sequence of markers and names parses the same whole, in pieces, from text and from ids."""

import random
import re
from dataclasses import replace

import pytest

from k3jax import parse
from k3jax.parse import Message, StreamParser
from k3jax.tokenizer import Tokenizer

MARKERS = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"]
LOOSE = re.compile("|".join(map(re.escape, MARKERS)))
NAMES = ["think", "response", "tools", "message", "call", "argument", "json"]
HEADERS = ['call tool="f"', 'argument key="a"', 'argument key="b" type="number"', 'json type="object"', ' index="2"']
TEXTS = [" ", "\n", "x", "1", "é漢", '"', "<|op", "{}"]
TAGS = [f"<|{side}|>{name}<|sep|>" for side in ("open", "close") for name in NAMES[:4]] + [
    *('<|open|>call tool="f"<|sep|>', "<|close|>call<|sep|>"),
    *('<|open|>argument key="a" type="number"<|sep|>', "<|close|>argument<|sep|>"),
]


def outputs(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    choices = MARKERS * 3 + NAMES + HEADERS + TEXTS + TAGS * 2
    return ["".join(rng.choice(choices) for _ in range(rng.randint(1, 18))) for _ in range(count)]


def stream(tokenizer: Tokenizer | None, pieces: list, **options: object) -> tuple[Message, tuple]:
    parser = StreamParser(tokenizer, **options)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    return parser.message, parse.fold(deltas)


@pytest.mark.parametrize("prefilled", ["think", "response", "message", None])
@pytest.mark.parametrize(("seed", "count"), [(0, 100), pytest.param(1, 1500, marks=pytest.mark.slow)])
def test_pieces_do_not_matter(small: Tokenizer, prefilled: str | None, seed: int, count: int) -> None:
    rng = random.Random(seed)
    for output in outputs(seed, count):
        message, folded = stream(None, [output], prefilled=prefilled)
        calls = [(call.name, call.arguments) for call in message.tool_calls]
        assert folded == (message.reasoning or "", message.content or "", calls)
        cuts = sorted(rng.randint(0, len(output)) for _ in range(3))
        pieces = [output[a:b] for a, b in zip([0, *cuts], [*cuts, len(output)], strict=True)]
        ids = small.encode(output, allow_special=True)
        for split in (pieces, list(output)):
            assert stream(None, split, prefilled=prefilled) == (message, folded), output
        from_ids = stream(small, [ids], prefilled=prefilled)
        assert without_markers(from_ids[0]) == without_markers(message), output
        assert stream(small, ids, prefilled=prefilled) == from_ids, output


def without_markers(message: Message) -> Message:
    """What ids show: a marker that makes no tag is a control token there, which is nothing to read.

    Without the blanks at the ends: whether they count may depend on a marker beside them.
    """
    reasoning = message.reasoning and LOOSE.sub("", message.reasoning).strip()
    content = message.content and LOOSE.sub("", message.content).strip()
    return replace(message, reasoning=reasoning, content=content or None)


def test_no_output_breaks_the_parser(small: Tokenizer) -> None:
    rng = random.Random(3)
    structure = [small.control_id(name) for name in MARKERS[:3]] + [small.encode(name)[0] for name in NAMES]
    for _ in range(200):
        ids = rng.choices([*structure, *range(small.vocab_size)], k=rng.randint(0, 60))
        message = parse.parse(small, ids, thinking=rng.random() < 0.5)
        assert message.finish_reason in ("stop", "length", "tool_calls")
