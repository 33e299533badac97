"""Outputs and uses at the limits: control tokens out of place, deep and long values, a parser that is finished."""

import time

import numpy as np
import pytest

from k3jax import parse
from k3jax.parse import Delta, Message, StreamParser, ToolCall
from k3jax.tokenizer import Tokenizer
from tests.k3jax.test_parse_vectors import END, argument, assert_stream, call, spelled, tools


def test_ids_of_any_integer_type(small: Tokenizer) -> None:
    ids = np.array(small.encode(spelled("a{C}think{S}{O}response{S}b{C}response{S}" + END), allow_special=True))
    for pieces in ([ids], list(ids), [np.int32(id_) for id_ in ids]):
        assert_stream(pieces, True, Message("a", "b", (), "stop"), small)


def test_an_output_is_finished_once() -> None:
    parser = StreamParser(None, thinking=False)
    parser.push("a<|clo")
    assert parser.finish("abort") == [Delta("content", "<|clo")]
    assert parser.finish("stop") == []
    assert parser.message == Message(None, "a<|clo", (), "abort")
    with pytest.raises(ValueError, match="pushed after finish"):
        parser.push("b")


CONTROL_TOKENS = ["<|media_pad|>", "[start_header_id]", "[PAD]", "[BOS]", "<|sep|>", "<|open|>", "<|close|>"]


@pytest.mark.parametrize("name", CONTROL_TOKENS)
def test_loose_control_tokens_show_in_arguments_alone(small: Tokenizer, name: str) -> None:
    loose = [small.control_id(name)]

    def ids(text: str) -> list[int]:
        return small.encode(spelled(text), allow_special=True)

    head = ids("w") + loose + ids("hy{C}think{S}{O}response{S}b") + loose + ids("!{C}response{S}")
    value = ids('{O}tools{S}{O}call tool="f"{S}{O}argument key="a" type="string"{S}x') + loose
    output = head + value + ids("!{C}argument{S}{C}call{S}{C}tools{S}" + END)
    message = Message("why", "b!", (ToolCall("f", f'{{"a":"x{name}!"}}'),), "tool_calls")
    assert_stream([output], True, message, small)
    assert_stream(output, True, message, small)


def test_a_control_token_ends_a_tag_and_no_attribute_holds_one(small: Tokenizer) -> None:
    pad = "<|media_pad|>"
    text = f'a{{C}}think{pad}{{O}}tools{pad}{{O}}call tool="f{pad}"{{S}}{{C}}call{pad}' + END
    ids = small.encode(spelled(text), allow_special=True)
    assert_stream(ids, True, Message("a", None, (ToolCall("f", "{}"),), "tool_calls"), small)


@pytest.mark.parametrize("depth", [5_000, 50_000])
def test_deep_json_stays_a_string(small: Tokenizer, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    output = spelled("{C}think{S}" + tools(call("f", argument("a", "array", deep), argument("b", "number", "1"))) + END)
    message = Message("", None, (ToolCall("f", f'{{"a":"{deep}","b":1}}'),), "tool_calls")
    for tokenizer, pieces in ((None, [output]), (small, [small.encode(output, allow_special=True)])):
        assert_stream(pieces, True, message, tokenizer)


def test_a_long_integer_keeps_its_digits() -> None:
    digits = "9" * 5_000
    output = spelled("{C}think{S}" + tools(call("f", argument("a", "number", digits))) + END)
    assert parse.parse(None, output).tool_calls == (ToolCall("f", f'{{"a":{digits}}}'),)


def test_a_long_call_header_is_linear() -> None:
    seconds = []
    for length in (20_000, 200_000):
        output = spelled('{C}think{S}{O}tools{S}{O}call tool="f" ' + "a" * length + "{S}{C}call{S}" + END)
        start = time.process_time()
        assert parse.parse(None, output).tool_calls == (ToolCall("f", "{}"),)
        seconds.append(time.process_time() - start)
    assert seconds[1] < 1.0, f"{seconds} s; ten times the length may cost about ten times the time"
