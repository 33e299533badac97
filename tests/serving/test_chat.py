"""The terminal chat, before a service whose answers are known."""

import io
import json
import types

import pytest

from serving import chat
from serving.client import Delta, Result, ServiceError, ToolCall


def result(text="", reasoning="", calls=(), reason="stop"):
    usage = {"prompt_tokens": 9, "cached_tokens": 4, "completion_tokens": 5, "preemptions": 0}
    times = {"drafted_tokens": 0, "accepted_tokens": 0, "first_token_seconds": 0.5, "total_seconds": 2.5}
    return Result(
        text=text, reasoning=reasoning, tool_calls=tuple(calls), token_ids=(), logprobs=(), finish_reason=reason,
        matched=None, usage=usage, statistics=times,
    )  # fmt: skip


class Stream:
    def __init__(self, deltas, result):
        self.deltas, self.result, self.cancelled = deltas, result, False

    def __iter__(self):
        for delta in self.deltas:
            if isinstance(delta, BaseException):
                raise delta
            yield delta

    def cancel(self):
        self.cancelled = True


class FakeClient:
    def __init__(self, *streams, tokenizer=True):
        self.streams, self.asked, self.tokenizer = list(streams), [], tokenizer

    def chat(self, messages, **options):
        self.asked.append((list(messages), options))
        return self.streams[len(self.asked) - 1]

    def model(self):
        return types.SimpleNamespace(name="nano", max_length=1024, has_tokenizer=self.tokenizer)

    def stats(self):
        return {"running": 0, "waiting": 2, "hit_rate": 0.51234}


THOUGHT = Stream(
    [Delta(kind="reasoning", text="hm"), Delta(kind="reasoning", text=", so"), Delta(kind="content", text="A "),
     Delta(kind="content", text="list.\x1b[31m")],
    result("A list.\x1b[31m", "hm, so"),
)  # fmt: skip


def talk(*streams, live=False, **options):
    client, out = FakeClient(*streams), io.StringIO()
    return chat.Chat(client, chat.Options(**options), chat.Screen(out, live=live)), client, out


def test_a_file_gets_the_answer_alone():
    conversation, client, out = talk(THOUGHT, system="be brief")
    assert conversation.hear("what?") == 0
    assert out.getvalue() == "A list.�[31m\n"
    [(messages, options)] = client.asked
    assert messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what?"}]
    assert options["effort"] == "max"
    assert options["session"].startswith("chat-")


def test_a_terminal_folds_the_reasoning_and_shows_it_on_demand():
    conversation, _, out = talk(THOUGHT, live=True)
    conversation.hear("what?")
    first, answer, _ = out.getvalue().split("\n")
    assert first.split(chat.CLEAR_LINE)[-2:][0] == f"{chat.DIM}thinking ... 6 characters{chat.PLAIN}"
    assert "thought for " in first
    assert "(6 characters; /think)" in first
    assert answer.startswith("A list.")
    assert "\x1b[31m" not in out.getvalue()
    conversation.hear("/think")
    assert out.getvalue().endswith(f"{chat.DIM}hm, so{chat.PLAIN}\n")


def test_reasoning_streams_when_asked_for():
    conversation, _, out = talk(THOUGHT, show_thinking=True)
    conversation.hear("what?")
    assert out.getvalue() == "hm, so\nA list.�[31m\n"


def test_turns_follow_each_other_and_new_forgets_them():
    second = Stream([Delta(kind="content", text="Yes.")], result("Yes."))
    conversation, client, _ = talk(THOUGHT, second, second, second)
    for line in ("one", "two", "/new", "three", "/system you are a cat", "/effort none", "four"):
        assert conversation.hear(line) == 0
    roles = [[message["role"] for message in messages] for messages, _ in client.asked]
    assert roles == [["user"], ["user", "assistant", "user"], ["user"], ["system", "user"]]
    said = client.asked[1][0][1]
    assert said == {"role": "assistant", "content": "A list.\x1b[31m", "reasoning_content": "hm, so"}
    assert client.asked[3][1]["thinking"] is False
    assert "effort" not in client.asked[3][1]
    assert len({options["session"] for _, options in client.asked}) == 1


def test_tool_calls_are_shown_and_repeated():
    deltas = [
        Delta(kind="content", text="Look:"),
        Delta(kind="tool_call", call_name="get", index=0),
        Delta(kind="tool_call", text='{"a":', index=0),
        Delta(kind="tool_call", text="1}", index=0),
        Delta(kind="tool_call", call_name="put", text="{}", index=1),
    ]
    calls = [ToolCall("get", '{"a":1}'), ToolCall("put", "{}")]
    conversation, _, out = talk(Stream(deltas, result("Look:", calls=calls, reason="tool_calls")))
    conversation.hear("go")
    assert out.getvalue() == 'Look:\n[call] get {"a":1}\n[call] put {}\n'
    assert [call["function"]["name"] for call in conversation.messages[-1]["tool_calls"]] == ["get", "put"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), None])
def test_an_answer_that_breaks_off_leaves_no_trace(error):
    import grpc

    failure = error or ServiceError(grpc.StatusCode.UNAVAILABLE, "the service is draining")
    broken = Stream([Delta(kind="content", text="Half"), failure], result())
    conversation, client, out = talk(broken, THOUGHT)
    assert conversation.hear("one") == 1
    assert broken.cancelled == (error is not None)
    assert out.getvalue() == "Half\n" + ("stopped\n" if error else "error: UNAVAILABLE: the service is draining\n")
    conversation.hear("two")
    assert [message["content"] for message in client.asked[1][0]] == ["two"]


def test_commands(tmp_path):
    cut = Stream([Delta(kind="content", text="Long")], result("Long", reason="length"))
    conversation, _, out = talk(cut)
    conversation.hear("one")
    assert out.getvalue().endswith("(cut off: the longest answer is reached)\n")
    conversation.hear("/stats")
    assert "completion_tokens 5" in out.getvalue()
    assert "2.0 tokens a second" in out.getvalue()
    assert out.getvalue().endswith("engine: hit_rate 0.5123, waiting 2\n")
    conversation.hear(f"/save {tmp_path / 'c.json'}")
    assert [message["content"] for message in json.loads((tmp_path / "c.json").read_text())] == ["one", "Long"]
    conversation.hear(f"/save {tmp_path}")
    assert "cannot write" in out.getvalue()
    assert conversation.hear("/dance") == 2
    assert "/dance is no command; /help lists them" in out.getvalue()
    conversation.hear("/effort huge")
    assert "effort is 'huge', expected low, high, max or none" in out.getvalue()
    conversation.hear("/help")
    assert chat.HELP in out.getvalue()
    assert conversation.hear("/quit") is None


def test_nobody_there(capsys):
    assert chat.main(["--address", "127.0.0.1:1", "--prompt", "hi"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: no service at 127.0.0.1:1 (UNAVAILABLE")
    assert "python -m serving" in error


def test_a_service_of_ids_cannot_chat():
    conversation = chat.Chat(FakeClient(tokenizer=False), chat.Options(), chat.Screen(io.StringIO(), live=False))
    with pytest.raises(RuntimeError, match="nano has no tokenizer"):
        conversation.greet()
