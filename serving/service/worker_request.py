"""`vllm.grpc.engine.GenerateRequest` as a wish. In proto3 a number that was not set is zero: it means unset here."""

import asyncio
import uuid
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as worker

from serving.service.model_card import ModelCard
from serving.service.options import Limits
from serving.service.refusals import Refusal, invalid, unsupported
from serving.service.wish import Wish

PLACE = "sampling_params."
OWN_NAMES = {
    "id": "request_id",
    "tokens": "tokenized.input_ids",
    "constraint": "sampling_params",
    "stop_ids": PLACE + "stop_token_ids",
}
NAMES = OWN_NAMES | {
    name: PLACE + name
    for name in (
        *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("max_tokens", "min_tokens", "stop", "n", "logprobs", "prompt_logprobs", "seed", "logit_bias"),
    )
}
"""Our names of fields to the protocol's."""

OFF_BY_ZERO = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
TEXTS = ("json_schema", "regex", "grammar", "structural_tag")
LONG_TEXT = 20_000
"""Characters from which encoding would hold up the event loop."""


async def read(request: worker.GenerateRequest, card: ModelCard, limits: Limits) -> Wish:
    """The wish of a request. Raises a `Refusal` that names the field."""
    _refuse_unserved(request)
    params = request.sampling_params
    tokens, salt = await _tokens(request, card, limits), ""
    return Wish(
        id=request.request_id or uuid.uuid4().hex,
        tokens=truncated(tokens, params),
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        n=params.n or 1,
        sampling=sampling(params),
        min_tokens=params.min_tokens,
        stop=tuple(params.stop),
        stop_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logit_bias=dict(params.logit_bias),
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        constraint=constraint(params),
        from_first_token=params.grammar_from_first_token,
        salt=salt,
        fields=NAMES,
    )


def _refuse_unserved(request: worker.GenerateRequest) -> None:
    for name in ("mm_inputs", "media_refs"):
        if request.HasField(name):
            raise unsupported(name, "this model is served without vision; send text only")
    if request.extra_mm_inputs:
        raise unsupported("extra_mm_inputs", "this model is served without vision; send text only")
    if request.HasField("kv_transfer_params") or request.kv_transfer_params_json:
        name = "kv_transfer_params" if request.HasField("kv_transfer_params") else "kv_transfer_params_json"
        raise unsupported(name, "no connector is configured; use ExportState and ImportState of k3jax.v1")
    if request.data_parallel_rank > 0:
        raise invalid("data_parallel_rank", f"is {request.data_parallel_rank}, this server is rank 0 of 1")


async def _tokens(request: worker.GenerateRequest, card: ModelCard, limits: Limits) -> list[int]:
    if request.WhichOneof("input") != "text":
        # An absent input has no tokens either, and the check of the wish says so.
        return list(request.tokenized.input_ids)
    return await encode(request.text, "text", card, limits)


async def encode(text: str, field: str, card: ModelCard, limits: Limits) -> list[int]:
    """Ids of a client's text: never a control token. Raises a `Refusal` without a tokenizer or for too long a text."""
    if card.tokenizer is None:
        raise unsupported(field, "the checkpoint has no tokenizer, so text cannot be read; send token ids")
    if len(text) > limits.prompt_bytes:
        raise invalid(field, f"has {len(text)} characters, expected at most {limits.prompt_bytes}")
    if len(text) < LONG_TEXT:
        return card.tokenizer.encode(text)
    return await asyncio.to_thread(card.tokenizer.encode, text)


def sampling(params: worker.SamplingParams) -> dict[str, Any]:
    """The settings that the client has set."""
    values = {name: getattr(params, name) for name in OFF_BY_ZERO if getattr(params, name)}
    if params.HasField("temperature"):
        values["temperature"] = params.temperature
    if params.HasField("seed"):
        values["seed"] = params.seed % 2**32
    return values


def truncated(tokens: list[int], params: worker.SamplingParams) -> list[int]:
    """The last `truncate_prompt_tokens` tokens; -1 keeps all, since the context's limit is checked anyway."""
    if not params.HasField("truncate_prompt_tokens") or params.truncate_prompt_tokens == -1:
        return tokens
    if params.truncate_prompt_tokens < 1:
        raise _field("truncate_prompt_tokens", f"is {params.truncate_prompt_tokens}, expected -1 or at least 1")
    return tokens[-params.truncate_prompt_tokens :]


def constraint(params: worker.SamplingParams) -> tuple[str, Any] | None:
    """Kind and value of the constraint. Raises a `Refusal` for an empty one."""
    kind = params.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not params.json_object):
        return None
    value = tuple(params.choice.choices) if kind == "choice" else getattr(params, kind)
    if not value:
        raise _field(kind, "is empty")
    return kind, value


def _field(name: str, problem: str) -> Refusal:
    return invalid(PLACE + name, problem)
