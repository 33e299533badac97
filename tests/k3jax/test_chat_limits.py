"""Values at the limits of JSON, and options and requests that are wrong: one clear error or the caller's own bytes."""

import json
from pathlib import Path

import pytest

from k3jax import chat
from k3jax.chat.__main__ import main
from k3jax.chat.request import render_arguments
from k3jax.tokenizer import Tokenizer
from tests.k3jax.test_chat_arguments import RAW, element
from tests.k3jax.test_chat_vectors import assistant, call, text, user

DEEP = "[" * 100_000 + "]" * 100_000
LONG = "9" * 5_000
ARGUMENTS = r"messages\[0\].tool_calls\[0\].function.arguments"


def deep_list() -> list[object]:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize("revision", ["R1", "R2"])
def test_a_deep_arguments_string_is_a_raw_block(revision: str) -> None:
    given = f'{{"a": {DEEP}}}'
    assert RAW.format(given) in text([assistant("", call("f", given))], revision=revision)


@pytest.mark.parametrize(
    ("messages", "options", "place"),
    [
        ([assistant("", call("f", {"a": deep_list()}))], {}, ARGUMENTS + ".a cannot be written as JSON"),
        ([assistant("", call("f", deep_list()))], {}, ARGUMENTS + " is a list"),
        ([user("x")], {"tools": [{"a": deep_list()}]}, "tools cannot be written as JSON"),
        ([{"role": "system", "tools": [{"a": deep_list()}]}], {}, r"messages\[0\].tools cannot be written as JSON"),
        (
            [user("x")],
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": deep_list()}}}},
            "response_format.json_schema cannot be written as JSON",
        ),
    ],
)
def test_a_deep_value_is_named(messages: list[dict[str, object]], options: dict[str, object], place: str) -> None:
    with pytest.raises(ValueError, match=place):
        chat.render_segments(messages, **options)


def test_a_deep_request_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "request.json"
    path.write_text(DEEP)
    assert main(["render", str(path)]) == 1
    assert capsys.readouterr().err == f"error: {path} is nested too deeply to be read\n"
    shallower = DEEP[80_000:120_000]  # each character of an output is read by itself, so this one takes a second
    path.write_text(shallower)
    assert main(["parse", str(path)]) == 0  # an output is text when it is no list of ids
    assert json.loads(capsys.readouterr().out)["reasoning"] == shallower


def test_long_integers() -> None:
    given = f'{{"a": {LONG}, "b": [{LONG}]}}'
    rendered = text([assistant("", call("f", given))], revision="R2")
    assert element("a", "number", LONG) + element("b", "array", f"[{LONG}]") in rendered
    with pytest.raises(ValueError, match=ARGUMENTS + " cannot be read under revision R1"):
        text([assistant("", call("f", given))], revision="R1")
    with pytest.raises(ValueError, match=ARGUMENTS + ".a cannot be written as JSON"):
        text([assistant("", call("f", {"a": 10**5_000}))])


def test_unknown_options_are_named(small: Tokenizer) -> None:
    with pytest.raises(TypeError, match=r"unknown option continue_finall, rev; .* expected response_schema, images"):
        chat.render_segments([user("x")], rev="R1", continue_finall=True)
    with pytest.raises(TypeError, match="unknown option revison"):
        chat.render(small, [user("x")], revison="R1")


def test_null_fields_of_a_request_are_absent() -> None:
    fields = ("tools", "tool_choice", "response_format", "response_schema", "revision", "add_generation_prompt")
    more = ("continue_final", "continue_final_message", "enable_thinking", "thinking", "chat_template_kwargs")
    body = {"messages": [user("x")], **dict.fromkeys((*fields, *more))}
    assert render_arguments(body) == {"messages": [user("x")]}
    body = {"messages": [user("x")], "revision": "R1", "chat_template_kwargs": {"revision": None}}
    assert render_arguments(body) == {"messages": [user("x")], "revision": "R1"}
    for effort in (None, "none"):
        arguments = render_arguments({"messages": [user("x")], "thinking_effort": effort})
        assert arguments == {"messages": [user("x")], "thinking_effort": None}


@pytest.mark.parametrize(
    "key", ["continue_final", "continue_final_message", "add_generation_prompt", "enable_thinking", "thinking"]
)
def test_a_boolean_is_a_boolean(key: str) -> None:
    for value in ("false", 0, 1):
        with pytest.raises(ValueError, match=f"^{key} is {value!r}; expected true"):
            render_arguments({"messages": [user("x")], key: value})


def test_template_arguments_do_not_replace_the_messages() -> None:
    with pytest.raises(ValueError, match="chat_template_kwargs holds 'messages'"):
        render_arguments({"messages": [user("x")], "chat_template_kwargs": {"messages": [user("y")]}})


@pytest.mark.parametrize(("revision", "kept"), [("R1", ""), ("R2", " \n")])
def test_blank_reasoning_is_continued_as_it_was_rendered(revision: str, kept: str) -> None:
    opened = '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    options = {"continue_final": True, "revision": revision}
    assert text([assistant("", reasoning=" \n")], **options) == opened + kept
    answered = opened + kept + "<|close|>think<|sep|><|open|>response<|sep|>a"
    assert text([assistant("a", reasoning=" \n")], **options) == answered


@pytest.mark.parametrize("extra", [{}, {"tools": [{"name": "f"}]}])
def test_a_completion_is_the_assistants(small: Tokenizer, extra: dict[str, object]) -> None:
    for role in ("developer", "user", None):
        with pytest.raises(ValueError, match=rf"messages\[0\].role is {role!r}; a completion is the assistant's"):
            chat.render_completion(small, {"role": role, "content": "x", **extra})
