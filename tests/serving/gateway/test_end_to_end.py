"""The official OpenAI client against smg against the real service with nano."""

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import jsonschema
import pytest

from serving.gateway import processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["list", "dict"]}},
    "required": ["a", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ADD = {"type": "object", "properties": {"a": DIGIT, "b": DIGIT}, "required": ["a", "b"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds two digits.", "parameters": ADD}}]
ASK = [{"role": "user", "content": "Write a function that returns the length of a list."}]
FLAGS = ["--port", "0", "--max-num-seqs", "4", "--max-length", "1024", "--max-prefill-tokens", "128"]


@pytest.fixture(scope="module")
def addresses():
    """Of the service, the gateway and the page."""
    pytest.importorskip("smg", reason="the gateway needs the extra `gateway`")
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(
            processes.running(processes.service_command(FLAGS), stdout=subprocess.PIPE, start_new_session=True)
        )
        worker = processes.service_address(service)
        command = [sys.executable, "-m", "serving.gateway", "--worker", worker, "--port", "0", "--page-port", "0"]
        gateway = stack.enter_context(processes.running(command, stdout=subprocess.PIPE))
        word, url, page = gateway.stdout.readline().split()
        assert word == "ready"
        yield {"worker": worker, "url": url, "page": page, "service": service, "gateway": gateway}


@pytest.fixture(scope="module")
def client(addresses):
    openai = pytest.importorskip("openai", reason="the official client is in the extra `gateway`")
    with openai.OpenAI(base_url=addresses["url"] + "/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client


def chat(client, **options):
    defaults = {"model": "nano", "messages": ASK, "temperature": 0, "max_completion_tokens": 48}
    return client.chat.completions.create(**defaults | options)


def folded(chunks):
    """Reasoning, content, finish reason and usage of a stream."""
    reasoning = content = ""
    reason = usage = None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return reasoning, content, reason, usage


def test_models(client):
    assert [model.id for model in client.models.list()] == ["nano"]


def test_a_stream_says_what_the_whole_answer_says(client):
    whole = chat(client)
    [choice] = whole.choices
    assert choice.message.reasoning_content
    assert whole.usage.completion_tokens_details.reasoning_tokens > 0
    reasoning, content, reason, usage = folded(chat(client, stream=True, stream_options={"include_usage": True}))
    assert (reasoning, content) == (choice.message.reasoning_content, choice.message.content or "")
    assert reason == choice.finish_reason
    assert usage.completion_tokens == whole.usage.completion_tokens
    # The second time the prompt is in the cache.
    assert usage.prompt_tokens_details.cached_tokens >= 64


def test_no_reasoning_when_it_is_turned_off(client):
    answer = chat(client, reasoning_effort="none").choices[0].message
    assert answer.content
    assert not getattr(answer, "reasoning_content", None)


def test_seeds_and_several_choices(client):
    def sample(seed):
        answer = chat(client, temperature=1.0, seed=seed, n=2, reasoning_effort="none", max_completion_tokens=24)
        assert sorted(choice.index for choice in answer.choices) == [0, 1]
        return [choice.message.content for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    first = sample(5)
    assert first == sample(5)
    assert first != sample(6)
    assert first[0] != first[1]


def test_a_schema_is_kept_to(client):
    answer = chat(client, response_format=FORMAT, reasoning_effort="none")
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
    assert answer.choices[0].finish_reason == "stop"


def test_a_schema_holds_from_the_end_of_the_reasoning(client):
    """Nano does not always find the end of its reasoning; when it does, what follows is what was asked for."""
    ended = 0
    for seed in range(5):
        options = {"response_format": FORMAT, "temperature": 1.0, "seed": seed, "reasoning_effort": "low"}
        reasoning, content, reason, _ = folded(chat(client, stream=True, max_completion_tokens=160, **options))
        assert reasoning
        assert reason in ("stop", "length")
        if reason == "stop":
            jsonschema.validate(json.loads(content), SCHEMA)
            ended += 1
    assert ended >= 2


@pytest.mark.parametrize("effort", ["none", "low"])
def test_a_schema_beside_tools_leaves_both_open(client, effort):
    """What comes after the reasoning, if it ends, is an answer that fits or a call that has been declared."""
    options = {"response_format": FORMAT, "tools": TOOLS, "reasoning_effort": effort, "temperature": 1.0}
    ended = 0
    for seed in range(4):
        answer = chat(client, seed=seed, max_completion_tokens=160, **options).choices[0]
        for call in (answer.message.tool_calls or [])[:1]:
            assert call.function.name == "add"
        if answer.finish_reason == "stop" and not answer.message.tool_calls:
            jsonschema.validate(json.loads(answer.message.content), SCHEMA)
        ended += answer.finish_reason != "length"
    assert ended >= 1


def test_a_bad_schema_is_refused_with_the_reason(client):
    import openai

    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objct"}}}
    with pytest.raises(openai.BadRequestError, match="objct"):
        chat(client, response_format=bad)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_tools(client, choice):
    asked = {"tools": TOOLS, "tool_choice": choice, "reasoning_effort": "none", "max_completion_tokens": 120}
    answer = chat(client, **asked).choices[0]
    # Nano calls again and again until it is cut off.
    assert answer.finish_reason in ("tool_calls", "stop", "length")
    assert answer.message.tool_calls
    for call in answer.message.tool_calls[:-1] or answer.message.tool_calls:
        assert call.function.name == "add"
        jsonschema.validate(json.loads(call.function.arguments), ADD)
    # The call goes back with a result; the conversation goes on.
    call = answer.message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
    message = {"role": "assistant", "content": None, "tool_calls": [call.to_dict()]}
    following = chat(client, messages=[*ASK, message, result], tools=TOOLS, max_completion_tokens=16)
    assert following.usage.completion_tokens == 16


def test_streamed_tool_calls(client):
    options = {"tools": TOOLS, "tool_choice": "required", "reasoning_effort": "none", "max_completion_tokens": 120}
    names, arguments = "", ""
    for chunk in chat(client, stream=True, **options):
        for call in (chunk.choices[0].delta.tool_calls or ()) if chunk.choices else ():
            if call.index == 0:
                names += call.function.name or ""
                arguments += call.function.arguments or ""
    assert names == "add"
    jsonschema.validate(json.loads(arguments), ADD)


def test_logprobs(client):
    answer = chat(client, logprobs=True, top_logprobs=3, max_completion_tokens=8, reasoning_effort="none")
    content = answer.choices[0].logprobs.content
    assert len(content) == 8
    for token in content:
        assert token.logprob <= 0
        values = [top.logprob for top in token.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert values[0] == pytest.approx(token.logprob, abs=1e-4)  # greedy


def test_completions(client):
    whole = client.completions.create(model="nano", prompt="def main(", max_tokens=24, temperature=0)
    assert whole.usage.completion_tokens == 24
    pieces = client.completions.create(model="nano", prompt="def main(", max_tokens=24, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text
    word = whole.choices[0].text.split()[1]
    stopped = client.completions.create(model="nano", prompt="def main(", max_tokens=24, temperature=0, stop=[word])
    assert stopped.choices[0].text == whole.choices[0].text[: whole.choices[0].text.index(word)]
    assert stopped.choices[0].finish_reason == "stop"


def test_log_probabilities_of_completions_get_lost_in_the_gateway(client, addresses):
    """The service gives them, smg 1.x drops them: the README says so for as long as it does."""
    import grpc
    from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

    answer = client.completions.create(model="nano", prompt="def main(", max_tokens=4, temperature=0, logprobs=2)
    assert answer.choices[0].logprobs is None
    with grpc.insecure_channel(addresses["worker"]) as channel:
        params = vllm_engine_pb2.SamplingParams(temperature=0, max_tokens=4, logprobs=2)
        request = vllm_engine_pb2.GenerateRequest(text="def main(", sampling_params=params)
        (message,) = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request)
    given = message.complete.output_logprobs
    assert len(given.token_logprobs) == len(given.top_logprobs) == 4


def test_responses(client):
    answer = client.responses.create(model="nano", input=ASK[0]["content"], temperature=0, max_output_tokens=48)
    kinds = [item.type for item in answer.output]
    assert kinds[0] == "reasoning"
    assert answer.usage.output_tokens == 48 or "message" in kinds
    form = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}}
    thinking = {"effort": "none"}
    typed = client.responses.create(
        model="nano", input=ASK[0]["content"], text=form, reasoning=thinking, temperature=0, max_output_tokens=80
    )
    jsonschema.validate(json.loads(typed.output_text), SCHEMA)
    events = list(
        client.responses.create(model="nano", input="Hello", temperature=0, max_output_tokens=24, stream=True)
    )
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode()


def test_anthropic_messages(addresses):
    url, body = (
        addresses["url"] + "/v1/messages",
        {"model": "nano", "max_tokens": 48, "messages": ASK, "temperature": 0},
    )
    whole = json.loads(post(url, body))
    assert (whole["type"], whole["role"]) == ("message", "assistant")
    said = "".join(part.get("thinking", "") + part.get("text", "") for part in whole["content"])
    assert said
    lines = [line for line in post(url, body | {"stream": True}).splitlines() if line.startswith("data:")]
    events = [json.loads(line.removeprefix("data:")) for line in lines]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") + delta.get("text", "") for delta in deltas) == said
    assert events[-1]["type"] == "message_stop"
    tools = [{"name": "add", "description": "Adds.", "input_schema": ADD}]
    options = {"tools": tools, "tool_choice": {"type": "any"}, "max_tokens": 200, "thinking": {"type": "disabled"}}
    called = json.loads(post(url, body | options))
    inputs = [part["input"] for part in called["content"] if part["type"] == "tool_use"]
    assert inputs
    jsonschema.validate(inputs[0], ADD)


def running_requests(addresses):
    import grpc
    from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

    with grpc.insecure_channel(addresses["worker"]) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        return stub.GetLoads(vllm_engine_pb2.GetLoadsRequest()).loads[0].num_running_reqs


def test_a_client_that_leaves_frees_the_engine(client, addresses):
    stream = chat(client, stream=True, max_completion_tokens=800, temperature=1.0, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert running_requests(addresses) == 1
    stream.close()
    end = time.monotonic() + 5
    while running_requests(addresses):
        assert time.monotonic() < end, "the request still runs five seconds after its client has left"
        time.sleep(0.02)


def test_the_page_talks_to_nano(addresses, tmp_path):
    from tests.serving.gateway.browser import browser

    with browser(tmp_path) as page:
        page.open(addresses["page"])
        page.until("document.querySelector('#model')?.textContent === 'nano'")
        page.value("document.querySelector('#limit').value = 40")
        page.type("#question", ASK[0]["content"])
        page.press_enter()
        page.until("document.querySelector('.stats') !== null", seconds=60)
        assert page.text(".reasoning .text")[0]
        assert " tokens in (" in page.text(".stats")[0]
        assert page.errors == []


def test_a_service_that_dies_gives_every_client_an_error(client, addresses):
    """Last: nothing answers afterwards. Whatever the protocol, nobody takes the half answer for a whole one."""
    import openai

    import serving

    endless = {"stream": True, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
    # Four at a time: the service has as many rows.
    streams = [iter(chat(client, max_completion_tokens=800, **endless))]
    streams.append(iter(client.completions.create(model="nano", prompt="def main(", max_tokens=800, **endless)))
    # Anthropic's protocol cannot ask to go on after the end, so that one starts last.
    anthropic = {"model": "nano", "max_tokens": 800, "messages": ASK, "stream": True, "temperature": 0}
    body = json.dumps(anthropic).encode()
    request = urllib.request.Request(addresses["url"] + "/v1/messages", body, {"Content-Type": "application/json"})
    with contextlib.ExitStack() as stack:
        direct = stack.enter_context(serving.Client(addresses["worker"], retries=0))
        own = iter(direct.generate("def main(", max_tokens=800, ignore_eos=True))
        for stream in (*streams, own):
            next(stream)
        sent = stack.enter_context(urllib.request.urlopen(request, timeout=120))
        assert sent.readline().startswith(b"event:")
        addresses["service"].send_signal(signal.SIGKILL)
        for stream in streams:
            with pytest.raises(openai.APIError):
                for _ in stream:
                    pass
        with pytest.raises(serving.ServiceError):
            list(own)
        events = [line for line in sent.read().decode().splitlines() if line.startswith("event:")]
    assert "event: error" in events
    assert "event: message_stop" not in events
    with pytest.raises(openai.APIError):
        chat(client)
    addresses["gateway"].send_signal(signal.SIGTERM)
    assert addresses["gateway"].wait(60) == 0
