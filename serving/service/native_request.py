"""`k3jax.v1` requests as wishes: text, ids or a conversation that is rendered here."""

import asyncio
import dataclasses
import json
import uuid
from typing import Any

from k3jax import chat, parse
from k3jax.chat.options import EFFORTS
from serving.service.model_card import ModelCard
from serving.service.options import Limits
from serving.service.refusals import invalid, unsupported
from serving.service.wish import Wish, structured
from serving.service.worker_request import encode

SETTINGS = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    "seed",
)
NAMES = {name: f"sampling.{name}" for name in (*SETTINGS, "logit_bias")} | {
    "id": "request_id",
    "tokens": "token_ids",
    "stop_ids": "stop_token_ids",
    "pin_seconds": "session_seconds",
}
PIN_SECONDS = 300.0
"""For how long a session's prefix stays when the client does not say."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and how to read what follows them."""

    tokens: list[int]
    channel: str | None = None
    """Of a conversation: the channel that the prompt leaves open."""
    thinking: bool = True
    is_conversation: bool = False


async def read(request: Any, card: ModelCard, limits: Limits) -> tuple[Wish, Prompt]:
    """Wish and prompt of a `GenerateRequest`. Raises a `Refusal` that names the field."""
    prompt = await read_prompt(request, card, limits)
    given = request.sampling
    sampling = {name: getattr(given, name) for name in SETTINGS if given.HasField(name)}
    constraint = _constraint(request)
    wish = Wish(
        id=request.request_id or uuid.uuid4().hex,
        tokens=prompt.tokens,
        max_tokens=_optional(request, "max_tokens"),
        n=request.n or 1,
        sampling=sampling,
        min_tokens=request.min_tokens,
        stop=tuple(request.stop),
        stop_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        logit_bias=dict(given.logit_bias),
        logprobs=_optional(request, "logprobs"),
        prompt_logprobs=_optional(request, "prompt_logprobs"),
        constraint=constraint,
        from_first_token=request.constraint.from_first_token,
        salt=request.salt,
        tenant=request.tenant or None,
        priority=request.priority,
        retention=_optional(request, "retention"),
        session=request.session or None,
        pin_seconds=_pin_seconds(request),
        fields=NAMES,
    )
    return wish, prompt


def _optional(request: Any, name: str) -> Any:
    return getattr(request, name) if request.HasField(name) else None


def _pin_seconds(request: Any) -> float:
    if not request.session:
        return 0.0
    return request.session_seconds if request.HasField("session_seconds") else PIN_SECONDS


def _constraint(request: Any) -> tuple[str, Any] | None:
    kind = request.constraint.WhichOneof("kind")
    if kind is None:
        return _forced_call(request)
    value = tuple(request.constraint.choice.choices) if kind == "choice" else getattr(request.constraint, kind)
    if not value:
        raise invalid(f"constraint.{kind}", "is empty")
    choice = request.conversation.tool_choice if request.WhichOneof("prompt") == "conversation" else ""
    if choice not in ("", "auto", "none"):
        text = f"is set beside conversation.tool_choice {choice!r}, and an answer cannot be both; leave one of them out"
        raise invalid(f"constraint.{kind}", text)
    return kind, value


def _forced_call(request: Any) -> tuple[str, Any] | None:
    """A choice of tools that must be followed is a constraint."""
    conversation = request.conversation
    choice = conversation.tool_choice
    if request.WhichOneof("prompt") != "conversation" or choice in ("", "auto", "none"):
        return None
    names = [tool.name for tool in conversation.tools]
    if not names:
        raise invalid("conversation.tool_choice", f"is {choice!r}, but there are no tools")
    if choice != "required" and choice not in names:
        raise invalid("conversation.tool_choice", f"is {choice!r}, expected auto, none, required or a tool's name")
    constraints = structured("conversation.tool_choice")
    try:
        value = constraints.tool_calls([_tool(tool, index) for index, tool in enumerate(conversation.tools)], choice)
    except ValueError as error:
        raise invalid("conversation.tool_choice", str(error)) from error
    return "structural_tag", json.dumps(value)


async def read_prompt(request: Any, card: ModelCard, limits: Limits) -> Prompt:
    """The prompt of any request that has one. Raises a `Refusal` that names the field."""
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        return Prompt(list(request.token_ids.ids))
    if kind == "text":
        return Prompt(await encode(request.text.text, "text", card, limits))
    if kind == "conversation":
        return await _conversation(request.conversation, card, limits)
    raise invalid("prompt", "is not set; give token_ids, text or conversation")


async def _conversation(conversation: Any, card: ModelCard, limits: Limits) -> Prompt:
    tokenizer = card.tokenizer
    if tokenizer is None:
        text = "the checkpoint has no tokenizer, so text cannot be read; send token_ids"
        raise unsupported("conversation", text)
    if conversation.ByteSize() > limits.prompt_bytes:
        raise invalid("conversation", f"has {conversation.ByteSize()} bytes, expected at most {limits.prompt_bytes}")
    if len(conversation.tools) > limits.tools:
        raise invalid("conversation.tools", f"has {len(conversation.tools)} tools, expected at most {limits.tools}")
    arguments = render_arguments(conversation)

    def render() -> Prompt:
        tokens = chat.render(tokenizer, **arguments)
        thinking = arguments["thinking"]
        return Prompt(tokens, parse.open_channel(tokenizer, tokens), thinking, True)

    try:
        # Rendering walks the whole conversation; a long one would hold up the event loop.
        return await asyncio.to_thread(render) if conversation.ByteSize() > 20_000 else render()
    except ValueError as error:
        raise invalid("conversation", str(error)) from error


def render_arguments(conversation: Any) -> dict[str, Any]:
    """Keyword arguments of `chat.render`. Raises a `Refusal` that names the field."""
    effort, choice = conversation.effort or "max", conversation.tool_choice
    if effort not in (*EFFORTS, "none"):
        raise invalid("conversation.effort", f"is {effort!r}, expected {', '.join(EFFORTS)} or none")
    names = [tool.name for tool in conversation.tools]
    return {
        "messages": [
            _message(message, f"conversation.messages[{i}]") for i, message in enumerate(conversation.messages)
        ],
        "tools": [_tool(tool, index) for index, tool in enumerate(conversation.tools)] or None,
        "thinking_effort": None if effort == "none" else effort,
        "thinking": conversation.thinking if conversation.HasField("thinking") else effort != "none",
        "tool_choice": {"type": "function", "function": {"name": choice}} if choice in names else choice or None,
        "response_format": _json(conversation.response_format_json, "conversation.response_format_json"),
        "continue_final": conversation.continue_final,
    }


def _message(message: Any, place: str) -> dict[str, Any]:
    for part in message.content:
        if part.WhichOneof("kind") == "image":
            raise unsupported(f"{place}.content.image", "this model is served without vision; send text only")
    fields: dict[str, Any] = {"role": message.role, "content": "".join(part.text for part in message.content)}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
            for call in message.tool_calls
        ]
    fields |= {key: value for key in ("name", "tool_call_id") if (value := getattr(message, key))}
    return fields


def _tool(tool: Any, index: int) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters_json:
        function["parameters"] = _json(tool.parameters_json, f"conversation.tools[{index}].parameters_json")
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _json(text: str, field: str) -> Any:
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise invalid(field, f"holds a {type(value).__name__}, expected an object")
    return value
