"""Arguments of past calls under both revisions, and the errors of bad messages."""

import pytest

from k3jax import chat
from tests.k3jax.test_chat_vectors import GET_WEATHER, arguments, assistant, call, text, turn, user

RAW = '<|open|>json type="object"<|sep|>{}<|close|>json<|sep|>'


def element(key: str, kind: str, value: str) -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


# arguments: what R1 writes, what R2 writes
TABLE = {
    '{"a": 1e2, "b": [1,2]}': (
        element("a", "number", "100.0") + element("b", "array", "[1, 2]"),
        element("a", "number", "1e2") + element("b", "array", "[1,2]"),
    ),
    ' {"a" : true } ': (element("a", "boolean", "true"),) * 2,
    '{"a": "\\u6f22\\n"}': (element("a", "string", "漢\n"),) * 2,
    '{"a": ["\\u6f22"]}': (element("a", "array", '["漢"]'), element("a", "array", '["\\u6f22"]')),
    '{"a": 1, "a": 2}': (element("a", "number", "2"),) * 2,
    '{"a": 1} trailing': (RAW.format('{"a": 1} trailing'), element("a", "number", "1")),
    " \n": ("", RAW.format(" \n")),
    '{"a": 1': (RAW.format('{"a": 1'),) * 2,
    '{"a": 1,}': (RAW.format('{"a": 1,}'),) * 2,
    '{"a" 1}': (RAW.format('{"a" 1}'),) * 2,
    "{a: 1}": (RAW.format("{a: 1}"),) * 2,
    '{"a": "x\ny"}': (RAW.format('{"a": "x\ny"}'),) * 2,
    "[1]": (None, RAW.format("[1]")),
    '"text"': (None, RAW.format('"text"')),
    "null": (None, RAW.format("null")),
}


@pytest.mark.parametrize("given", TABLE)
@pytest.mark.parametrize("revision", ["R1", "R2"])
def test_strings_under_both_revisions(given: str, revision: str) -> None:
    messages = [assistant("", call("f", given))]
    wanted = TABLE[given][revision == "R2"]
    if wanted is None:
        with pytest.raises(ValueError, match=r"messages\[0\].tool_calls\[0\].function.arguments is the JSON of a "):
            text(messages, revision=revision)
        return
    assert f'<|open|>call tool="f" index="1"<|sep|>{wanted}<|close|>call<|sep|>' in text(messages, revision=revision)


def test_objects_keep_their_order_and_python_spacing() -> None:
    given = {"z": 1, "a": 1.5, "t": (1, 2), "o": {"y": None, "x": "é"}, "b": False, "s": '"raw"'}
    assert arguments(text([assistant("", call("f", given))])) == [
        ("z", "number", "1"),
        ("a", "number", "1.5"),
        ("t", "array", "[1, 2]"),
        ("o", "object", '{"y": null, "x": "é"}'),
        ("b", "boolean", "false"),
        ("s", "string", '"raw"'),
    ]


@pytest.mark.parametrize(("revision", "kept"), [("R1", ""), ("R2", " \n ")])
def test_blank_reasoning(revision: str, kept: str) -> None:
    rendered = text([assistant("x", reasoning=" \n ")], revision=revision)
    assert f"<|open|>think<|sep|>{kept}<|close|>think<|sep|>" in rendered


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"content": "x"}], r"messages\[0\].role is None; expected one of system, developer, user"),
        ([user("x"), {"role": "function", "content": "x"}], r"messages\[1\].role is 'function'"),
        ([user(5)], r"messages\[0\].content is a int; expected a string or a list"),
        ([user([{"type": "audio"}])], r"messages\[0\].content\[0\] has type 'audio' and no text"),
        ([user(["x"])], r"messages\[0\].content\[0\] is a str"),
        ([user("x", name=3)], r"messages\[0\].name is a int; expected a string"),
        ([assistant("", {"function": {"arguments": "{}"}})], r"messages\[0\].tool_calls\[0\].function.name is missing"),
        ([assistant("", {"function": "f"})], r"messages\[0\].tool_calls\[0\].function is a str"),
        ([assistant("", call("f", [1]))], r"messages\[0\].tool_calls\[0\].function.arguments is a list"),
        ([assistant("", call("f", {"a": {1}}))], r"function.arguments.a is a set \('\{1\}'\); expected a JSON value"),
        ([assistant("", call("f", {"a": [{1}]}))], r"function.arguments.a cannot be written as JSON"),
        ([assistant("", call("f", {1: 2}))], r"function.arguments has the key 1"),
        ([user("x"), {"role": "tool", "content": "x"}], r"messages\[1\] is tool result 1 of 0 calls and names no tool"),
        ([user([{"type": "image_url"}])], "0 image prompts were given for 1 image parts"),
        ([{"role": "system", "content": "", "tools": ["x"]}], r"messages\[0\].tools\[0\] is a str; expected an object"),
    ],
)
def test_a_bad_message_is_named(messages: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chat.render_segments(messages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"thinking_effort": "medium"}, "thinking_effort is 'medium'; expected one of low, high, max, or None"),
        ({"tool_choice": "always"}, "tool_choice is 'always'; expected auto, required, none"),
        ({"response_format": {"type": "xml"}}, "response_format.type is 'xml'"),
        ({"tools": [{"x": float("nan")}]}, "tools cannot be written as JSON"),
        ({"revision": "R3"}, "revision is 'R3'; expected one of R1, R2"),
        ({"images": [chat.image_prompt(1, 1)]}, "1 image prompts were given for 0 image parts and 0 literal"),
        ({"continue_final": True}, r"messages\[0\]: continue_final needs an assistant message"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chat.render_segments([user("x")], **options)


def test_images_and_literal_placeholders() -> None:
    prompts = [chat.image_prompt(1, 1), chat.image_prompt(2, 2)]
    literal = "see <|kimi_image_placeholder|>!"
    parts = [{"type": "text", "text": literal}, {"type": "image_url", "image_url": {"url": "x"}}]
    # One prompt for the one image part: the literal is the user's text.
    assert text([user(parts)], images=prompts[:1]).startswith(turn("user", literal + prompts[0]))
    # A prompt for each: the literal is a slot, as in the reference.
    assert text([user(parts)], images=prompts).startswith(turn("user", f"see {prompts[0]}!{prompts[1]}"))
    with pytest.raises(ValueError, match="3 image prompts were given for 1 image parts and 1 literal"):
        text([user(parts)], images=[*prompts, prompts[0]])


def test_images_keep_to_their_message_when_results_are_reordered() -> None:
    messages = [
        assistant("", call("f", None, "a"), call("g", None, "b")),
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "image"}]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "image"}]},
    ]
    rendered = text(messages, images=[chat.image_prompt(1, 1), chat.image_prompt(2, 2)])
    assert rendered.index('tool="f"', rendered.index('role="tool"')) < rendered.index("image 2x2")
    assert rendered.index("image 2x2") < rendered.index("image 1x1")


def test_a_partial_answer_is_continued() -> None:
    head = turn("user", "x") + '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    messages = [user("x"), assistant("par", reasoning="why")]
    expected = head + "why<|close|>think<|sep|><|open|>response<|sep|>par"
    assert text(messages, continue_final=True) == expected
    assert text([user("x"), assistant("", reasoning="wh")], continue_final=True) == head + "wh"
    without = turn("user", "x") + '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>par'
    assert text(messages, continue_final=True, thinking=False) == without
    choice = text(messages, continue_final=True, tool_choice="none")
    assert choice.index("tool_choice=none") < choice.index("par")
    with pytest.raises(ValueError, match=r"messages\[1\].tool_calls: a message with tool calls is finished"):
        text([user("x"), assistant("", call("f", None))], continue_final=True)


def test_messages_are_not_changed() -> None:
    messages = [user("x"), assistant("", call("f", "{}", "a"), call("g", "{}", "b"))]
    messages += [{"role": "tool", "tool_call_id": id_, "content": id_} for id_ in "ba"]
    before = repr(messages)
    text(messages, tools=[GET_WEATHER])
    assert repr(messages) == before
