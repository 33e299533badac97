"""Both protocols, message by message."""

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as worker

import serving
from tests.serving.fake_runner import solo


def tokenized(ids, stream=True, request_id="", **params):
    return worker.GenerateRequest(
        request_id=request_id,
        tokenized=worker.TokenizedInput(input_ids=ids),
        sampling_params=worker.SamplingParams(**{"max_tokens": 6} | params),
        stream=stream,
    )


def test_worker_streams_deltas_and_one_complete(ids_only):
    messages = list(ids_only.worker.Generate(tokenized([1, 2, 3], max_tokens=9)))
    *chunks, last = messages
    said = solo([1, 2, 3], 9, (49,))
    assert [token for message in chunks for token in message.chunk.token_ids] == said
    assert list(last.complete.output_ids) == said
    assert last.complete.finish_reason in ("length", "stop")
    assert (last.complete.prompt_tokens, last.complete.completion_tokens) == (3, len(said))
    counts = [message.chunk.completion_tokens for message in chunks]
    assert counts == sorted(counts)


def test_worker_without_streaming_says_everything_at_once(ids_only):
    (message,) = ids_only.worker.Generate(tokenized([4, 5], stream=False))
    assert list(message.complete.output_ids) == solo([4, 5], 6, (49,))


def test_zero_means_unset(ids_only):
    """proto3 has no unset numbers: top_p 0 and repetition_penalty 0 would be refused otherwise."""
    (message,) = ids_only.worker.Generate(tokenized([4, 5], stream=False, top_p=0, repetition_penalty=0, n=0))
    assert message.complete.completion_tokens


def test_unset_max_tokens_fills_the_context(ids_only):
    request = tokenized([6, 7], stream=False)
    request.sampling_params.ClearField("max_tokens")
    (message,) = ids_only.worker.Generate(request)
    assert message.complete.completion_tokens == 398 or message.complete.finish_reason == "stop"


def test_choices_have_indices_and_one_complete_each(ids_only):
    ends = {}
    said = {0: [], 1: [], 2: []}
    for message in ids_only.worker.Generate(tokenized([1, 2, 3, 4], n=3)):
        if message.HasField("complete"):
            assert message.complete.index not in ends
            ends[message.complete.index] = list(message.complete.output_ids)
        else:
            assert message.chunk.index not in ends
            said[message.chunk.index] += message.chunk.token_ids
    assert ends == said == dict.fromkeys(range(3), solo([1, 2, 3, 4], 6, (49,)))


def test_cached_tokens_on_repeat(ids_only):
    prompt = [7, 8, 9, 10, 11, 12, 13]
    counts = [next(iter(ids_only.worker.Generate(tokenized(prompt, stream=False)))).complete for _ in range(2)]
    assert counts[0].cached_tokens == 0
    assert counts[1].cached_tokens == 6
    assert counts[0].output_ids == counts[1].output_ids


def test_stop_token_is_matched(ids_only):
    said = solo([3, 1], 6)
    (message,) = ids_only.worker.Generate(tokenized([3, 1], stream=False, stop_token_ids=[said[2]]))
    first = said.index(said[2])
    assert list(message.complete.output_ids) == said[: first + 1]
    assert message.complete.finish_reason == "stop"
    assert message.complete.matched_token_id == said[2]


def test_stop_string_ends_after_the_token_that_completes_it(with_text, nano_tokenizer):
    said = solo([3, 1, 2], 12, (49,))
    text = nano_tokenizer.decode(said[2:4])
    (message,) = with_text.worker.Generate(tokenized([3, 1, 2], stream=False, max_tokens=12, stop=[text]))
    assert message.complete.matched_stop_str == text
    assert nano_tokenizer.decode(message.complete.output_ids).endswith(text)
    stream = with_text.client.generate([3, 1, 2], max_tokens=12, stop=text)
    assert stream.result.text == nano_tokenizer.decode(said).partition(text)[0]
    assert stream.result.matched == text


def test_text_in_text_out(with_text, nano_tokenizer):
    prompt = nano_tokenizer.encode("def f")
    stream = with_text.client.generate("def f", max_tokens=7, return_token_ids=True)
    pieces = list(stream)
    said = solo(prompt, 7, (49,))
    assert "".join(piece.text for piece in pieces) == nano_tokenizer.decode(said) == stream.result.text
    assert list(stream.result.token_ids) == said
    assert stream.result.usage["prompt_tokens"] == len(prompt)
    assert stream.request_id


def test_a_conversation_is_rendered_here(with_text, nano_tokenizer):
    from k3jax import chat, parse

    conversation = [{"role": "user", "content": "hello <|open|>"}]
    for effort, thinking in (("low", True), ("", False)):
        stream = with_text.client.chat(conversation, effort=effort, thinking=thinking, max_tokens=8)
        prompt = chat.render(nano_tokenizer, conversation, thinking_effort=effort or "max", thinking=thinking)
        message = parse.parse(nano_tokenizer, solo(prompt, 8, (49,)), thinking, "think" if thinking else "response")
        assert (stream.result.reasoning or None, stream.result.text or None) == (message.reasoning, message.content)
        assert stream.result.usage["prompt_tokens"] == len(prompt)


def test_images_are_refused_by_name(with_text):
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    with pytest.raises(
        serving.ServiceError, match=r"conversation.messages\[0\].content.image: .*without vision"
    ) as refused:
        list(with_text.client.chat([{"role": "user", "content": content}]))
    assert refused.value.code is grpc.StatusCode.UNIMPLEMENTED
    request = tokenized([1])
    request.mm_inputs.im_token_id = 3
    with pytest.raises(grpc.RpcError, match="mm_inputs"):
        list(with_text.worker.Generate(request))


def test_text_is_refused_by_name_without_a_tokenizer(ids_only):
    for call in (
        lambda: list(ids_only.client.generate("hello")),
        lambda: list(ids_only.client.chat([{"role": "user", "content": "hello"}])),
        lambda: list(ids_only.client.generate([1], stop="x")),
    ):
        with pytest.raises(serving.ServiceError, match="no tokenizer") as refused:
            call()
        assert refused.value.code is grpc.StatusCode.UNIMPLEMENTED
        assert refused.value.field in ("text", "conversation", "stop")
    with pytest.raises(grpc.RpcError, match="no tokenizer"):
        list(ids_only.worker.Generate(worker.GenerateRequest(text="hello")))


BAD = {
    "sampling_params.top_p": {"top_p": 3.0},
    "sampling_params.temperature": {"temperature": -1.0},
    "sampling_params.max_tokens": {"max_tokens": 1000},
    "sampling_params.n": {"n": 1000},
    "sampling_params.stop_token_ids": {"stop_token_ids": [99]},
    "sampling_params.logit_bias": {"logit_bias": {99: 1.0}},
    "sampling_params.logprobs": {"logprobs": -1},
    "sampling_params.min_tokens": {"min_tokens": 7},
    "sampling_params.truncate_prompt_tokens": {"truncate_prompt_tokens": 0},
    "sampling_params.json_schema": {"json_schema": ""},
}


@pytest.mark.parametrize("field", BAD)
def test_a_bad_field_is_named(ids_only, field):
    with pytest.raises(grpc.RpcError) as refused:
        list(ids_only.worker.Generate(tokenized([1, 2], **BAD[field], request_id="bad")))
    error = serving.ServiceError.of(refused.value)
    assert (error.code, error.field, error.request_id) == (grpc.StatusCode.INVALID_ARGUMENT, field, "bad")
    assert field in error.message


def test_bad_prompts(ids_only):
    for ids in ([], [50], [3, 2**31], [1] * 400):
        with pytest.raises(grpc.RpcError, match=r"tokenized\.input_ids"):
            list(ids_only.worker.Generate(tokenized(ids)))


def test_an_id_in_use_is_refused(ids_only):
    call = ids_only.worker.Generate(tokenized([1, 2], max_tokens=390, request_id="same", ignore_eos=True))
    next(call)
    with pytest.raises(grpc.RpcError, match="'same' is in use"):
        list(ids_only.worker.Generate(tokenized([1], request_id="same")))
    call.cancel()


def test_a_constraint_is_followed(with_text):
    pytest.importorskip("llguidance")
    result = with_text.client.generate("pick ", choice=["alpha", "beta"], max_tokens=20).result
    assert result.text in ("alpha", "beta")
    assert result.finish_reason == "stop"
    with pytest.raises(serving.ServiceError) as refused:
        list(with_text.client.generate("pick ", regex="(", max_tokens=20))
    assert (refused.value.code, refused.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, "constraint.regex")
    request = tokenized([1, 2], stream=False, max_tokens=20, regex="[0-9]{3}")
    (message,) = with_text.worker.Generate(request)
    assert message.complete.finish_reason == "stop"


def test_an_answer_cannot_be_a_forced_call_and_something_else(with_text):
    """Beside tools that may be called a schema is fine; beside a call that must come it is refused by name."""
    pytest.importorskip("llguidance")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    asked = {"tools": tools, "choice": ["alpha", "beta"], "max_tokens": 200}
    question = [{"role": "user", "content": "pick"}]
    for choice in ("required", "add"):
        with pytest.raises(serving.ServiceError, match="leave one of them out") as refused:
            list(with_text.client.chat(question, tool_choice=choice, **asked))
        assert (refused.value.code, refused.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, "constraint.choice")
    assert with_text.client.chat(question, tool_choice="none", effort="none", **asked).result.text in ("alpha", "beta")


def test_log_probabilities_of_the_prompt_come_first(ids_only):
    stream = ids_only.client.generate([5, 6, 7], max_tokens=3, prompt_logprobs=1, ignore_eos=True)
    assert stream.result.usage["cached_tokens"] == 0
    first, *others = stream.prompt_logprobs
    assert not first.HasField("logprob")
    assert [entry.token_id for entry in (first, *others)] == [5, 6, 7]
    assert [entry.logprob for entry in others] == [-0.25, -0.25]
    chunk, *_, last = ids_only.worker.Generate(tokenized([5, 6, 7], max_tokens=3, prompt_logprobs=1))
    assert len(chunk.chunk.input_logprobs.token_logprobs) == len(last.complete.input_logprobs.token_logprobs) == 3


@pytest.mark.parametrize("protocol", ["vllm-grpc", "k3jax.v1"])
def test_the_load_program_counts_every_token(ids_only, protocol):
    import asyncio

    from serving.bench.target import connect
    from serving.bench.workload import Prompt

    async def ask():
        target = connect(protocol, ids_only.address)
        try:
            about = await target.about()
            return about, sum([size async for size in target.stream(Prompt([1, 2], ""), 9)])
        finally:
            await target.close()

    assert asyncio.run(ask()) == (("fake", 50), 9)
