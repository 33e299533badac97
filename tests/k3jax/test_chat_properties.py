"""What every prompt must hold, on random conversations."""

import json

import pytest

from k3jax import chat, parse
from k3jax.parse import Message, StreamParser
from k3jax.tokenizer import Tokenizer
from tests.k3jax import plain_renderer
from tests.k3jax.plain_renderer import Conversations


@pytest.mark.parametrize(("seed", "count"), [(0, 1500), pytest.param(1, 10_000, marks=pytest.mark.slow)])
def test_random_conversations_equal_the_plain_renderer(seed: int, count: int) -> None:
    conversations = Conversations(seed)
    for _ in range(count):
        messages, options = conversations.messages(), conversations.options()
        assert [tuple(segment) for segment in chat.render_segments(messages, **options)] == plain_renderer.render(
            messages, **options
        )


def test_ids_are_those_of_the_segments_one_by_one(small: Tokenizer) -> None:
    conversations = Conversations(7)
    for _ in range(80):
        messages, options = conversations.messages(), conversations.options()
        expected: list[int] = []
        for text, special in plain_renderer.render(messages, **options):
            expected += small.encode(text, allow_special=special)
        assert chat.render(small, messages, **options) == expected


def test_control_ids_come_from_the_renderer_alone(small: Tokenizer) -> None:
    """The same conversation with harmless texts has the same control ids in the same order."""
    conversations = Conversations(11)
    for _ in range(80):
        messages, options = conversations.messages(), conversations.options()
        controls = [id_ for id_ in chat.render(small, messages, **options) if small.is_control(id_)]
        harmless = json.loads(
            json.dumps([messages, options]).replace("<|", "{").replace("|>", "}").replace("[EOS]", "EOS")
        )
        markers = [id_ for id_ in chat.render(small, harmless[0], **harmless[1]) if small.is_control(id_)]
        assert set(controls) <= {small.control_id(f"<|{name}|>") for name in ("open", "close", "sep", "end_of_msg")}
        if len(controls) != len(markers):  # a key or a name that was nothing but a marker is now empty or a duplicate
            continue
        assert controls == markers


def assistant(conversations: Conversations) -> tuple[dict[str, object], Message]:
    """A message to render, and what its completion must parse to."""
    calls, parsed = [], []
    for _ in range(conversations.rng.randint(0, 3)):
        given = {conversations.text(2): conversations.value() for _ in range(conversations.rng.randint(0, 3))}
        name = conversations.word()
        calls.append({"function": {"name": name, "arguments": given}})
        items = [
            json.dumps(key, ensure_ascii=False) + ":" + json.dumps(value, ensure_ascii=False)
            for key, value in given.items()
        ]
        parsed.append(parse.ToolCall(name, "{" + ",".join(items) + "}"))
    reasoning, content = conversations.text(), conversations.text()
    reason = "tool_calls" if calls else "stop"
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}
    return message, Message(reasoning, content or None, tuple(parsed), reason)


def test_a_rendered_completion_parses_to_its_message(small: Tokenizer) -> None:
    conversations = Conversations(13)
    for _ in range(120):
        message, expected = assistant(conversations)
        for thinking in (True, False):
            ids = chat.render_completion(small, message, thinking=thinking)
            wanted = (
                expected if thinking else Message(None, expected.content, expected.tool_calls, expected.finish_reason)
            )
            assert parse.parse(small, ids, thinking=thinking) == wanted


def test_a_parsed_message_renders_to_the_same_ids(small: Tokenizer) -> None:
    conversations = Conversations(17)
    for _ in range(80):
        message, _ = assistant(conversations)
        ids = chat.render_completion(small, message)
        parsed = parse.parse(small, ids)
        calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in parsed.tool_calls]
        again = {"role": "assistant", "content": parsed.content, "reasoning": parsed.reasoning, "tool_calls": calls}
        assert chat.render_completion(small, again) == ids


def test_every_truncation_is_classified_the_same_in_a_stream(small: Tokenizer) -> None:
    conversations = Conversations(19)
    for _ in range(4):
        message, expected = assistant(conversations)
        ids = chat.render_completion(small, message)
        parser = StreamParser(small)
        deltas = []
        for length, id_ in enumerate(ids):
            cut = parse.parse(small, ids[:length])
            assert cut.finish_reason == ("length" if length < len(ids) - 1 else expected.finish_reason)
            assert (expected.reasoning or "").startswith((cut.reasoning or "").rstrip("\ufffd"))
            assert (expected.content or "").startswith((cut.content or "").rstrip("\ufffd"))
            for call in cut.tool_calls:
                json.loads(call.arguments)
            deltas += parser.push(id_)
        parser.finish()
        assert parser.message == expected
        calls = [(call.name, call.arguments) for call in expected.tool_calls]
        assert parse.fold(deltas) == (expected.reasoning, expected.content or "", calls)
