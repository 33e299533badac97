"""Whatever a model would like to say: what comes out is what was asked for."""

import json
import re

import jsonschema
import pytest

from k3jax import parse

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["x", "yé", '"']}, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/more"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"more": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}},
}
FLAT = {"type": "object", "additionalProperties": False}


def is_person(text):
    jsonschema.validate(json.loads(text), PERSON)
    return True


def is_list(text):
    return isinstance(json.loads(text), list)


CASES = {
    "schema": ("json_schema", json.dumps(PERSON), is_person),
    "schema object": (
        "json_schema",
        {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 9}, "maxItems": 4},
        is_list,
    ),
    "regex": ("regex", r"[a-c]{2,5}/(é|\d)", re.compile(r"[a-c]{2,5}/(é|\d)").fullmatch),
    "regex of quotes": ("regex", r'"[^"\\]{3}"', re.compile(r'"[^"\\]{3}"').fullmatch),
    "regex with anchors": ("regex", "^x[0-9]$", re.compile("x[0-9]").fullmatch),
    "lark": ("grammar", 'start: "a" b\nb: /x{1,3}/', re.compile("ax{1,3}").fullmatch),
    "gbnf": ("grammar", 'root ::= "yes" | word\nword ::= [a-z] [a-z]', re.compile("yes|[a-z]{2}").fullmatch),
    "choice": ("choice", ("one", "two three", '"', "é\n"), {"one", "two three", '"', "é\n"}.__contains__),
}


def compiled(tokenizer, kind, value, **options):
    from serving import constraints

    return constraints.compile(kind, value, tokenizer, **options)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_after_a_raw_prompt(tokenizer, speak, name, seed):
    kind, value, is_right = CASES[name]
    said = speak(compiled(tokenizer, kind, value), seed)
    assert is_right(tokenizer.decode(said, skip_special=True))
    assert not [token for token in said[:-1] if tokenizer.is_control(token)]


@pytest.mark.parametrize("channel", ["think", "response", "message"])
@pytest.mark.parametrize("name", CASES)
def test_in_the_response_channel(tokenizer, speak, name, channel):
    kind, value, is_right = CASES[name]
    for seed in range(3):
        said = speak(compiled(tokenizer, kind, value, channel=channel), seed)
        message = parse.parse(tokenizer, said, prefilled=channel)
        assert is_right(message.content)
        assert message.finish_reason == "stop"
        assert said[-1] in tokenizer.eos_ids
        assert (message.reasoning is not None) == (channel == "think")


def test_any_object(tokenizer):
    constraint = compiled(tokenizer, "json_object", True)
    constraint.advance(tokenizer.encode('{"a": [1, {"b": null}], "c": "}"}'))
    assert constraint.complete
    assert constraint.ended
    with pytest.raises(ValueError, match="json_object: token"):
        compiled(tokenizer, "json_object", True).advance(tokenizer.encode("[1]"))


def test_reasoning_is_free_of_grammar_and_of_ends(tokenizer):
    constraint = compiled(tokenizer, "regex", "a+", channel="think")
    thoughts = [*tokenizer.encode('I think {"of" b'), 3]
    constraint.advance(thoughts)
    assert constraint.thinking
    mask = constraint.mask()
    allowed = [token for token in tokenizer.control if mask[token // 32] >> (token % 32) & 1]
    assert allowed == [tokenizer.control_id("<|close|>")]
    constraint.advance(tokenizer.encode("<|close|>", allow_special=True))
    assert not constraint.thinking
    constraint.advance(tokenizer.encode("think<|sep|><|open|>response<|sep|>aa", allow_special=True))
    with pytest.raises(ValueError, match="regex: token"):
        constraint.advance(tokenizer.encode("b"))


def test_an_answer_may_be_tool_calls_instead(tokenizer, speak):
    tools = [{"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}}]
    kinds = set()
    for seed in range(12):
        said = speak(compiled(tokenizer, "choice", ["yes"], channel="message", tools=tools), seed)
        message = parse.parse(tokenizer, said, prefilled="message")
        kinds.add(message.finish_reason)
        assert (message.content == "yes") != bool(message.tool_calls)
    assert kinds == {"stop", "tool_calls"}


def test_the_channel_is_read_off_the_prompt(tokenizer):
    from k3jax import chat
    from serving.constraints import channel_of

    messages = [{"role": "user", "content": "<|open|>think"}]
    assert channel_of(tokenizer, chat.render(tokenizer, messages)) == "think"
    assert channel_of(tokenizer, chat.render(tokenizer, messages, thinking=False)) == "response"
    assert channel_of(tokenizer, tokenizer.encode("def main(")) is None
    started = [*messages, {"role": "assistant", "reasoning_content": "hm", "content": "so"}]
    assert channel_of(tokenizer, chat.render(tokenizer, started, continue_final=True)) == "response"


BAD = [
    ("json_schema", '{"type":', "json_schema: the schema is not JSON"),
    ("json_schema", "[1]", "json_schema: the schema is a list; expected an object"),
    ("json_schema", {"type": "objct"}, "json_schema: Invalid type: objct"),
    ("json_schema", {"type": "array", "uniqueItems": True}, 'json_schema: Unimplemented keys: ."uniqueItems".'),
    ("json_schema", {"type": "string", "pattern": "(?=a)b"}, "json_schema: regex parse error"),
    ("json_schema", {"$ref": "http://localhost/x"}, "json_schema: Resource 'http://localhost/x'"),
    ("json_schema", "false", "json_schema: Unsatisfiable schema"),
    ("json_object", False, "json_object: the value is False; expected true"),
    ("regex", "a(b", "regex: .*unclosed group"),
    ("regex", "", "regex: the text is empty"),
    ("regex", r"\bword\b", "regex: .*lookarounds not supported"),
    ("grammar", "start: missing", "grammar: .*missing"),
    ("grammar", "root := 1", "grammar: "),
    ("choice", (), "choice: the value is"),
    ("choice", "abc", "choice: the value is 'abc'"),
    ("choice", (1,), "choice: the value is 1; expected text"),
    ("colour", "red", "colour: this is no kind of constraint; expected json_schema"),
    ("structural_tag", "{", "structural_tag: the tag is not JSON"),
    ("structural_tag", {"format": {"type": "haiku"}}, "structural_tag: the format type 'haiku' is not known"),
    ("structural_tag", {"structures": []}, "structural_tag: 'structures' of the tag is"),
]


@pytest.mark.parametrize(("kind", "value", "text"), BAD)
def test_what_is_wrong_is_named_in_one_line(tokenizer, kind, value, text):
    from serving.constraints import ConstraintError

    for channel in (None, "think"):
        with pytest.raises(ConstraintError) as caught:
            compiled(tokenizer, kind, value, channel=channel)
        assert re.match(text, str(caught.value))
        assert "\n" not in str(caught.value)


def test_a_grammar_that_takes_too_long_is_refused(tokenizer, monkeypatch):
    from serving.constraints import ConstraintError, vocabulary

    monkeypatch.setattr(vocabulary, "MASK_SECONDS", 1e-4)
    with pytest.raises(ConstraintError, match=r"regex: the first token takes [0-9.]+ s to decide, expected at most"):
        compiled(tokenizer, "regex", "a{9999}{9}")


def test_a_grammar_that_becomes_too_complex_ends_with_an_error(tokenizer, monkeypatch):
    import llguidance

    from serving.constraints import ConstraintError, vocabulary

    monkeypatch.setattr(vocabulary, "LIMITS", llguidance.LLParserLimits(step_lexer_fuel=3000))
    constraint = compiled(tokenizer, "regex", "(?s:.*)a(?s:.{300})b")
    said = []

    def go_on():
        while len(said) < 400:
            constraint.mask()
            said.append(constraint.advance(tokenizer.encode("a" if len(said) % 3 else "b")))

    with pytest.raises(ConstraintError, match="regex: "):
        go_on()
    assert said
