"""The published outputs: what each parses to, from text and from ids, whole and a token at a time."""

import json
import re

import pytest

from k3jax import chat, parse
from k3jax.parse import Delta, Message, StreamParser, ToolCall
from k3jax.tokenizer import Tokenizer


def spelled(pattern: str) -> str:
    """An output with {O}, {C}, {S} for the markers and {E} for the end."""
    for letter, marker in {"O": "<|open|>", "C": "<|close|>", "S": "<|sep|>", "E": "<|end_of_msg|>"}.items():
        pattern = pattern.replace("{" + letter + "}", marker)
    return pattern


def argument(key: str, kind: str | None, value: str) -> str:
    return f'{{O}}argument key="{key}"' + (f' type="{kind}"' if kind else "") + "{S}" + value + "{C}argument{S}"


def call(name: str, *arguments: str, index: str = ' index="1"') -> str:
    return f'{{O}}call tool="{name}"{index}{{S}}' + "".join(arguments) + "{C}call{S}"


def tools(*calls: str) -> str:
    return "{O}tools{S}" + "".join(calls) + "{C}tools{S}"


ONE_CALL = tools(call("calc", argument("x", "number", "1")))
CALC = (ToolCall("calc", '{"x":1}'),)
END = "{C}message{S}{E}"

# name: (output, thinking, reasoning, content, tool calls, finish reason)
OUTPUTS: dict[str, tuple[str, bool, str | None, str | None, tuple[ToolCall, ...], str]] = {
    "P-1": ("step{C}think{S}{O}response{S}answer", True, "step", "answer", (), "length"),
    "P-2": ("unfinished reasoning", True, "unfinished reasoning", None, (), "length"),
    "P-3": ("answer{C}response{S}", False, None, "answer", (), "length"),
    "P-4": ("let me check" + ONE_CALL + END, True, "let me check", None, CALC, "tool_calls"),
    "P-5": ("The answer is 42.{C}response{S}{C}message{S}", True, "", "The answer is 42.", (), "stop"),
    "P-5 opened": ("{O}think{S}The answer is 42.{C}response{S}" + END, True, "The answer is 42.", None, (), "stop"),
    "P-6": (
        "answer{C}response{S}"
        + tools(
            call(
                "calc",
                argument("x", "number", "1"),
                argument("flag", "boolean", "true"),
                argument("text", "string", "raw"),
            )
        )
        + END,
        False,
        None,
        "answer",
        (ToolCall("calc", '{"x":1,"flag":true,"text":"raw"}'),),
        "tool_calls",
    ),
    "P-7": (
        "{C}think{S}" + tools(call("a&amp;b&quot;c", argument("k&amp;q", "string", "v"))) + END,
        True,
        "",
        None,
        (ToolCall('a&b"c', '{"k&q":"v"}'),),
        "tool_calls",
    ),
    "P-8": (
        "{C}think{S}" + tools(call("calc<beta", argument("foo<bar", "string", "v"))) + END,
        True,
        "",
        None,
        (ToolCall("calc<beta", '{"foo<bar":"v"}'),),
        "tool_calls",
    ),
    "P-9": (
        "{C}think{S}" + tools(call("calc", argument("x", "number", "not-json"))) + END,
        True,
        "",
        None,
        (ToolCall("calc", '{"x":"not-json"}'),),
        "tool_calls",
    ),
    "P-10": (
        "{C}think{S}" + tools(call("a", index=""), call("b", index=' index="7"'), call("c", index=' index="3"')) + END,
        True,
        "",
        None,
        (ToolCall("a", "{}"), ToolCall("b", "{}"), ToolCall("c", "{}")),
        "tool_calls",
    ),
    "P-11": (
        "{C}think{S}" + tools('{O}call index="1"{S}' + argument("x", None, "1") + "{C}call{S}", call("kept")) + END,
        True,
        "",
        None,
        (ToolCall("kept", "{}"),),
        "tool_calls",
    ),
    "P-12": (
        "{C}think{S}"
        + tools(
            call(
                "f",
                argument("y", "number", "1.0"),
                argument("x", "number", "2"),
                argument("items", "array", '["left","right"]'),
            )
        )
        + END,
        True,
        "",
        None,
        (ToolCall("f", '{"y":1.0,"x":2,"items":["left","right"]}'),),
        "tool_calls",
    ),
    "P-13": (
        "{C}think{S}" + tools(call("f", '{O}json type="object"{S}{"b": 1,  "a": [2 , 3]}{C}json{S}')) + END,
        True,
        "",
        None,
        (ToolCall("f", '{"b": 1,  "a": [2 , 3]}'),),
        "tool_calls",
    ),
    "P-16": ('{C}response{S}{O}tools{S}{O}call tool="calc" index="1"', False, None, None, (), "length"),
    "P-17 string": (
        '{C}response{S}{O}tools{S}{O}call tool="calc" index="1"{S}{O}argument key="content" type="string"{S}Hello wor',
        False,
        None,
        None,
        (ToolCall("calc", '{"content":"Hello wor"}', complete=False),),
        "length",
    ),
    "P-17 scalar": (
        '{C}response{S}{O}tools{S}{O}call tool="calc" index="1"{S}'
        + argument("a", "number", "1")
        + '{O}argument key="b" type="number"{S}2',
        False,
        None,
        None,
        (ToolCall("calc", '{"a":1}', complete=False),),
        "length",
    ),
    "P-18": ("{C} think {S}{O} response {S}answer{C}\nresponse{S}", True, "", "answer", (), "length"),
    # Rules of the output parser that have no number of their own.
    "close without separator": (
        "step{C}think{O}response{S}answer{C}response{C}message{E}",
        True,
        "step",
        "answer",
        (),
        "stop",
    ),
    "close before text": ("step{C}thinkAnswer", True, "step", "Answer", (), "length"),
    "unnamed close": ("step{C}{S}{O}response{S}answer{C}{S}" + END, True, "step", "answer", (), "stop"),
    "think opened again": ("\n{O}think{S}step{C}think{S}{O}response{S}x" + END, True, "step", "x", (), "stop"),
    "response in think": ("step{O}response{S}answer{C}response{S}" + END, True, "step", "answer", (), "stop"),
    "think without thinking": (
        "{O}think{S}step{C}think{S}{O}response{S}answer{C}response{S}" + END,
        False,
        "step",
        "answer",
        (),
        "stop",
    ),
    "markerless": ("plain", False, None, "plain", (), "length"),
    "text before the response": (
        "a{C}think{S}\n\n{O}response{S}b{C}response{S}stray" + END,
        True,
        "a",
        "b",
        (),
        "stop",
    ),
    "no response opened": ("a{C}think{S}the answer" + END, True, "a", "the answer", (), "stop"),
    "after the end": ("a{C}think{S}{O}response{S}b" + END + "more{O}response{S}", True, "a", "b", (), "stop"),
    "message close in response": ("b{C}message{S}c", False, None, "b", (), "stop"),
    "end in reasoning": ("a{E}", True, "a", None, (), "stop"),
    "unknown tag": ("see {O}table{S} here", False, None, "see {O}table{S} here", (), "length"),
    "many blanks": (
        " " * 70 + "{O}" + " " * 70 + "think{S}x{C}think" + " " * 70 + "{O}response{S}y",
        True,
        " " * 70 + "{O}" + " " * 70 + "think{S}x",
        "y",
        (),
        "length",
    ),
    "separator in text": ("a {S} b", False, None, "a {S} b", (), "length"),
    "message ends in a number": (
        '{C}think{S}{O}tools{S}{O}call tool="f"{S}{O}argument key="a" type="number"{S}1{E}',
        True,
        "",
        None,
        (ToolCall("f", '{"a":1}', complete=False),),
        "stop",
    ),
    "message close in a number": (
        '{C}think{S}{O}tools{S}{O}call tool="f"{S}{O}argument key="a" type="number"{S}1{C}message{S}{E}',
        True,
        "",
        None,
        (ToolCall("f", '{"a":1}', complete=False),),
        "stop",
    ),
    "message ends in a call": (
        '{C}think{S}{O}tools{S}{O}call tool="calc"{S}' + argument("x", "number", "1") + "{E}",
        True,
        "",
        None,
        CALC,
        "tool_calls",
    ),
    "message close in a call": (
        '{C}think{S}{O}tools{S}{O}call tool="calc"{S}' + argument("x", "number", "1") + END,
        True,
        "",
        None,
        CALC,
        "tool_calls",
    ),
    "cut off in a call": (
        '{C}think{S}{O}tools{S}{O}call tool="calc"{S}' + argument("x", "number", "1"),
        True,
        "",
        None,
        (ToolCall("calc", '{"x":1}', complete=False),),
        "length",
    ),
    "tools tag missing after reasoning": (
        "why{C}think{S}" + call("calc", argument("x", "number", "1")) + END,
        True,
        "why",
        None,
        CALC,
        "tool_calls",
    ),
    "tools tag missing after the answer": (
        "b{C}response{S}" + call("calc", argument("x", "number", "1")) + call("g") + "{C}tools{S}" + END,
        False,
        None,
        "b",
        (*CALC, ToolCall("g", "{}")),
        "tool_calls",
    ),
    "tools tag missing in reasoning": (
        "why" + call("calc", argument("x", "number", "1")) + END,
        True,
        "why",
        None,
        CALC,
        "tool_calls",
    ),
    "call without a name outside tools": (
        'a{O}call index="1"{S}b',
        False,
        None,
        'a{O}call index="1"{S}b',
        (),
        "length",
    ),
    # Inputs and results that smg publishes for its own parser.
    "smg: message tags around the answer": (
        "r{C}think{S}{O}message{S}answer{C}message{S}",
        True,
        "r",
        "answer",
        (),
        "stop",
    ),
    "smg: forced call without a think close": (
        tools(call("get_weather")) + "{C}message{S}",
        True,
        "",
        None,
        (ToolCall("get_weather", "{}"),),
        "tool_calls",
    ),
    "smg: forced call after a think close": (
        "{C}think{S}" + tools(call("get_weather", argument("city", "string", "SF"))),
        True,
        "",
        None,
        (ToolCall("get_weather", '{"city":"SF"}'),),
        "length",
    ),
    "smg: call without thinking": (
        "{C}response{S}" + tools(call("get_weather")),
        False,
        None,
        None,
        (ToolCall("get_weather", "{}"),),
        "length",
    ),
    "smg: indices repeat": (
        tools(
            call("first", argument("a", "number", "1"), index=' index="7"'),
            call("second", argument("b", "number", "2"), index=' index="7"'),
            call("third", argument("c", "number", "3"), index=' index="3"'),
        ),
        True,
        "",
        None,
        (ToolCall("first", '{"a":1}'), ToolCall("second", '{"b":2}'), ToolCall("third", '{"c":3}')),
        "length",
    ),
    "type missing": (
        "{C}think{S}" + tools(call("f", argument("x", None, "1"))) + END,
        True,
        "",
        None,
        (ToolCall("f", '{"x":"1"}'),),
        "tool_calls",
    ),
    "no NaN": (
        "{C}think{S}" + tools(call("f", argument("x", "number", "NaN"))) + END,
        True,
        "",
        None,
        (ToolCall("f", '{"x":"NaN"}'),),
        "tool_calls",
    ),
    "closes missing": (
        '{C}think{S}{O}tools{S}{O}call tool="f"{S}{O}argument key="a"{S}1{O}argument key="b"{S}2'
        '{O}call tool="g"{S}{C}tools{S}' + END,
        True,
        "",
        None,
        (ToolCall("f", '{"a":"1","b":"2"}'), ToolCall("g", "{}")),
        "tool_calls",
    ),
    "tools close missing": (
        "{C}think{S}{O}tools{S}" + call("f") + "{O}response{S}done{C}response{S}" + END,
        True,
        "",
        "done",
        (ToolCall("f", "{}"),),
        "tool_calls",
    ),
    "message ends in an argument": (
        '{C}think{S}{O}tools{S}{O}call tool="f"{S}{O}argument key="a"{S}1' + END,
        True,
        "",
        None,
        (ToolCall("f", '{"a":"1"}', complete=False),),
        "stop",
    ),
    "markers in an argument": (
        "{C}think{S}" + tools(call("f", argument("a", "string", "x{O}think{S}y{C}response{S}z{S}"))) + END,
        True,
        "",
        None,
        (ToolCall("f", '{"a":"x{O}think{S}y{C}response{S}z{S}"}'),),
        "tool_calls",
    ),
}


def expected(name: str, ids: bool = False) -> Message:
    _, _, reasoning, content, calls, finish_reason = OUTPUTS[name]
    if ids:  # a marker that is a control token and makes no tag is nothing to read
        reasoning, content = (part and re.sub(r"\{[OCSE]\}", "", part) for part in (reasoning, content))
    calls = tuple(ToolCall(call.name, spelled(call.arguments), call.complete) for call in calls)
    reasoning, content = (part and spelled(part) for part in (reasoning, content))
    return Message(reasoning, content, calls, finish_reason)


@pytest.mark.parametrize("name", OUTPUTS)
def test_from_text(name: str) -> None:
    output, thinking = OUTPUTS[name][:2]
    assert parse.parse(None, spelled(output), thinking=thinking) == expected(name)


@pytest.mark.parametrize("name", OUTPUTS)
def test_from_ids(small: Tokenizer, name: str) -> None:
    output, thinking = OUTPUTS[name][:2]
    ids = small.encode(spelled(output), allow_special=True)
    assert parse.parse(small, ids, thinking=thinking) == expected(name, ids=True)


@pytest.mark.parametrize("name", OUTPUTS)
def test_every_split_of_the_text(name: str) -> None:
    output, thinking = OUTPUTS[name][:2]
    text = spelled(output)
    message = expected(name)
    for first in range(0, len(text) + 1, 1 + len(text) // 150):
        assert_stream([text[:first], text[first:]], thinking, message)
    for size in (1, 2, 3, 5, 7, 11):
        assert_stream([text[at : at + size] for at in range(0, len(text), size)], thinking, message)


@pytest.mark.parametrize("name", OUTPUTS)
def test_every_split_of_the_ids(small: Tokenizer, name: str) -> None:
    output, thinking = OUTPUTS[name][:2]
    ids = small.encode(spelled(output), allow_special=True)
    message = expected(name, ids=True)
    for first in range(0, len(ids) + 1, 3):
        assert_stream([ids[:first], ids[first:]], thinking, message, small)
    assert_stream(ids, thinking, message, small)


def assert_stream(pieces: list, thinking: bool, message: Message, tokenizer: Tokenizer | None = None) -> None:
    parser = StreamParser(tokenizer, thinking=thinking)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    assert parser.message == message
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    assert parse.fold(deltas) == (message.reasoning or "", message.content or "", calls)


def test_p14_a_stream_without_response_close() -> None:
    pieces = [
        "{O}",
        "response",
        "{S}Hi",
        "{O}",
        "tools",
        "{S}",
        '{O}call tool="f" index="1"{S}',
        argument("a", "string", "1"),
        "{C}call",
        "{S}",
    ]
    parser = StreamParser(None)
    deltas = [delta for piece in pieces for delta in parser.push(spelled(piece))]
    assert parse.fold(deltas) == ("", "Hi", [("f", '{"a":"1"}')])


def test_p15_letters_do_not_leak_markers() -> None:
    parser = StreamParser(None, thinking=False)
    deltas = [delta for piece in ["O", "K", "{C}", "response{S}"] for delta in parser.push(spelled(piece))]
    assert deltas == [Delta("content", "O"), Delta("content", "K")]
    assert parser.finish() == []


def test_p15_in_the_think_channel_is_reclassified() -> None:
    parser = StreamParser(None)
    deltas = [delta for piece in ["O", "K", "{C}", "response{S}"] for delta in parser.push(spelled(piece))]
    assert deltas[-1] == Delta("content", "OK", reclassified=True)
    assert parse.fold(deltas) == ("", "OK", [])


def test_p19_incremental_arguments() -> None:
    pieces = [
        '{C}think{S}{O}tools{S}{O}call tool="get_weather" index="1"{S}',
        '{O}argument key="city" type="string"{S}',
        "Hangzhou",
        "{C}argument{S}",
        argument("days", "number", "1.5"),
        "{C}call{S}",
    ]
    parser = StreamParser(None)
    deltas = [parser.push(spelled(piece)) for piece in pieces]
    texts = ['{"city":"', "Hangzhou", '"', ',"days":1.5', "}"]
    assert deltas[0] == [Delta("tool_call", index=0, name="get_weather")]
    assert deltas[1:] == [[Delta("tool_call", text, index=0)] for text in texts]


def test_p20_reasoning_has_ended_when_the_close_is_newer(released: Tokenizer) -> None:
    opened, closed = [163587, 39964, 163589], [163588, 39964, 163589]
    assert not parse.reasoning_ended(released, [1, 2, 3])
    assert not parse.reasoning_ended(released, [*opened, 5, *closed, 163586, *opened, 7])
    assert parse.reasoning_ended(released, [*opened, 5, *closed, 163586, *opened, 7, *closed])
    assert parse.reasoning_ended(released, [*closed, 163587, 12092, 163589])


def test_reasoning_has_ended_at_an_answer_or_call_without_a_think_close(small: Tokenizer) -> None:
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    prompt = chat.render(small, messages)
    assert not parse.reasoning_ended(small, prompt)
    for name in ("response", "tools"):
        assert parse.reasoning_ended(small, [*prompt, *small.encode(f"why<|open|>{name}<|sep|>", allow_special=True)])
        assert not parse.reasoning_ended(small, [*prompt, *small.encode(f"why<|open|>{name}<|sep|>")])
    assert parse.reasoning_ended(small, chat.render(small, messages, thinking=False))


@pytest.mark.parametrize(
    ("marker", "kept"), [("<|clo", "<|clo"), ("<|close|>", ""), ("<|close|>respo", ""), ("<|", "<|"), ("<", "<")]
)
def test_a_partial_marker_is_text_only_when_spelled(marker: str, kept: str) -> None:
    assert parse.parse(None, "a" + marker, thinking=False).content == "a" + kept


def test_ordinary_spellings_are_text_in_ids(small: Tokenizer) -> None:
    text = spelled("x{C}response{S}{C}message{S}{E}[EOS]")
    assert parse.parse(small, small.encode(text), thinking=False) == Message(None, text, (), "length")
    assert parse.parse(small, [*small.encode("x"), small.control_id("[EOS]")], thinking=False).finish_reason == "stop"


@pytest.mark.parametrize("head", ["", " \n"])
def test_a_think_tag_repeated_in_ordinary_tokens_is_dropped(small: Tokenizer, head: str) -> None:
    spelling = spelled("{O}think{S}")
    ids = small.encode(head + spelling + "why") + small.encode(spelled("{C}response{S}"), allow_special=True)
    assert_stream(ids, True, Message("why", None, (), "length"), small)
    assert_stream([ids], True, Message("why", None, (), "length"), small)
    again = small.encode("x" + spelling)
    assert_stream(again, True, Message("x" + spelling, None, (), "length"), small)
    for cut in range(1, len(spelling)):
        part = small.encode(head + spelling[:cut])
        assert_stream(part, True, Message(head + spelling[:cut], None, (), "length"), small)


def test_arguments_are_escaped_json(small: Tokenizer) -> None:
    value = 'quote " backslash \\ newline \n tab \t漢字😀'
    output = spelled("{C}think{S}" + tools(call("f", argument("a", "string", value))) + END)
    for tokenizer, piece in ((None, output), (small, small.encode(output, allow_special=True))):
        [parsed] = parse.parse(tokenizer, piece).tool_calls
        assert json.loads(parsed.arguments) == {"a": value}


def test_a_json_block_and_arguments_do_not_mix() -> None:
    block = '{O}json type="object"{S}{"b":1}{C}json{S}'
    both = spelled(
        "{C}think{S}"
        + tools(call("f", argument("a", None, "1"), block), call("g", block, argument("a", None, "1")))
        + END
    )
    assert [call.arguments for call in parse.parse(None, both).tool_calls] == ['{"a":"1"}', '{"b":1}']


def test_the_engine_may_say_why_it_stopped() -> None:
    done = spelled("a{C}think{S}{O}response{S}b")
    called = spelled("{C}think{S}" + ONE_CALL)
    assert parse.parse(None, done, finish_reason="stop").finish_reason == "stop"
    assert parse.parse(None, called, finish_reason="stop").finish_reason == "tool_calls"
    assert parse.parse(None, called, finish_reason="length").finish_reason == "length"
    assert parse.parse(None, done, finish_reason="abort").finish_reason == "abort"


def test_the_open_channel_is_read_from_the_prompt(small: Tokenizer) -> None:
    messages = [{"role": "user", "content": "<|open|>think<|sep|>"}]
    for thinking, channel in ((True, "think"), (False, "response")):
        assert parse.open_channel(small, chat.render(small, messages, thinking=thinking)) == channel
    assert parse.open_channel(small, chat.render(small, messages, add_generation_prompt=False)) is None
    message = small.encode('<|open|>message role="assistant"<|sep|>', allow_special=True)
    assert parse.open_channel(small, message) == "message"
    partial = [*messages, {"role": "assistant", "reasoning_content": "r", "content": "c"}]
    assert parse.open_channel(small, chat.render(small, partial, continue_final=True)) == "response"


def test_reasoning_is_tracked_for_grammars(small: Tokenizer) -> None:
    parser = StreamParser(small)
    seen = []
    for id_ in small.encode(spelled("a{C}think{S}{O}response{S}b"), allow_special=True):
        parser.push(id_)
        seen.append(parser.in_reasoning)
    assert seen == sorted(seen, reverse=True)
    assert seen[0]
    assert not seen[-1]


def test_wrong_use_is_named(small: Tokenizer) -> None:
    with pytest.raises(ValueError, match="prefilled is 'thought'; expected think, response, message or None"):
        StreamParser(small, prefilled="thought")
    with pytest.raises(ValueError, match="without a tokenizer"):
        StreamParser(None).push([1])
    parser = StreamParser(small)
    parser.push([1])
    with pytest.raises(ValueError, match="text was pushed after token ids"):
        parser.push("x")
    with pytest.raises(ValueError, match="out of range"):
        parser.push([700])
    for piece in (iter([1.5]), iter(["a"]), iter([None])):  # iterators: the tests' type checks look into lists
        with pytest.raises(TypeError, match="expected text, an integer token id or several"):
            parser.push(piece)
