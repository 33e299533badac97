"""The place in a grammar: forwards, backwards and along drafts."""

import numpy as np
import pytest

from k3jax import parse

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yy"]}}}


@pytest.fixture
def constraint(tokenizer):
    from serving import constraints

    return constraints.compile("json_schema", SCHEMA | {"required": ["a", "b"]}, tokenizer, channel="think")


@pytest.fixture(scope="module")
def answer(tokenizer):
    text = 'a thought<|close|>think<|sep|><|open|>response<|sep|>{"a":12,"b": "yy"}<|close|>response<|sep|>'
    return tokenizer.encode(text + "<|close|>message<|sep|><|end_of_msg|>", allow_special=True)


def walk(constraint, tokens):
    masks = [constraint.mask().copy()]
    for token in tokens:
        constraint.advance([token])
        masks.append(constraint.mask().copy())
    return np.stack(masks)


def test_rollback_goes_to_any_earlier_place(constraint, answer):
    masks = walk(constraint, answer)
    assert constraint.ended
    for back in (1, 2, 5, len(answer) // 2, len(answer) - 3, len(answer)):
        constraint.rollback(back)
        np.testing.assert_array_equal(constraint.mask(), masks[len(answer) - back])
        assert not constraint.ended
        assert constraint.advance(answer[len(answer) - back :]) == back
        assert constraint.ended
    with pytest.raises(ValueError, match=f"expected 0 to {len(answer)}"):
        constraint.rollback(len(answer) + 1)


def test_masks_along_a_draft_are_those_of_saying_it(tokenizer, constraint, answer):
    masks = walk(constraint, answer)
    constraint.rollback(len(answer))
    at = len(answer) - 9
    for start, length in ((0, 4), (6, 12), (at, 9)):
        constraint.advance(answer[:start])
        np.testing.assert_array_equal(
            constraint.draft_masks(answer[start : start + length]), masks[start:][: length + 1]
        )
        constraint.rollback(start)
    # A draft that leaves the grammar: what follows the wrong token does not matter.
    constraint.advance(answer[:-12])
    wrong = [answer[-12], tokenizer.control_id("[BOS]"), answer[-11]]
    drafted = constraint.draft_masks(wrong)
    np.testing.assert_array_equal(drafted[:2], masks[len(answer) - 12 :][:2])
    assert not drafted[2:].any()


def test_a_refused_token_leaves_the_place_unchanged(tokenizer, constraint, answer):
    constraint.advance(answer[:-14])
    before = constraint.mask().copy()
    with pytest.raises(ValueError, match=r"json_schema: token \d+ at position 0 does not fit"):
        constraint.advance([tokenizer.control_id("<|media_pad|>")])
    np.testing.assert_array_equal(constraint.mask(), before)
    assert constraint.advance(answer[-14:]) == 14


def test_every_allowed_token_can_be_said_and_no_other(tokenizer, constraint, answer):
    for place in range(0, len(answer), 3):
        constraint.advance(answer[:place])
        bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
        for token in range(0, tokenizer.vocab_size, 7):
            drafted = constraint.draft_masks([token])
            # Text that the grammar forces has one spelling in the mask; others fit it too.
            assert drafted[1].any() or not bits[token]
        constraint.rollback(place)


def test_two_sequences_of_one_grammar_are_apart(tokenizer, answer):
    from serving import constraints

    first, second = (constraints.compile("choice", ["ab", "cd"], tokenizer) for _ in range(2))
    first.advance(tokenizer.encode("a"))
    second.advance(tokenizer.encode("cd"))
    assert second.ended
    assert not first.ended
    first.advance(tokenizer.encode("b"))
    assert first.complete


def test_a_mask_is_allowed_text_in_any_spelling(tokenizer):
    """Brute force over the vocabulary: nothing is allowed that no choice begins with."""
    from serving import constraints

    choices = [b"three", b"that", b"in a", b'{"think']
    constraint = constraints.compile("choice", [choice.decode() for choice in choices], tokenizer)
    bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
    begins = {t for t in range(tokenizer.base_size) if any(c.startswith(tokenizer.token_bytes(t)) for c in choices)}
    assert set(np.flatnonzero(bits)) == begins


def test_the_engine_takes_it(constraint):
    from serving.request import Constraint

    assert isinstance(constraint, Constraint)


def test_the_parser_agrees(tokenizer, constraint, answer):
    constraint.advance(answer)
    assert parse.parse(tokenizer, answer).content == '{"a":12,"b": "yy"}'


@pytest.mark.slow
def test_the_released_vocabulary(shared):
    import time

    from k3jax import tokenizer as tokenizers
    from serving import constraints

    released = tokenizers.load(shared / "tokenizer")
    constraint = constraints.compile("json_schema", SCHEMA, released, channel="response")
    seconds = []
    for token in released.encode('{"a":12,"b": "yy"}'):
        start = time.perf_counter()
        mask = constraint.mask()
        seconds.append(time.perf_counter() - start)
        assert mask.shape == (5120,)
        constraint.advance([token])
    # A tenth of a step of the smallest model; 20 to 120 microseconds were seen.
    assert sorted(seconds)[len(seconds) // 2] < 2e-3
