"""Requests from keyword arguments."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from serving.protocol import messages

Prompt = str | Sequence[int]

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "logit_bias"),
)
_CONSTRAINTS = ("json_schema", "json_object", "regex", "grammar", "choice", "structural_tag")
_PLAIN = (
    *("request_id", "max_tokens", "min_tokens", "stop", "include_stop", "ignore_eos", "n", "logprobs"),
    *("prompt_logprobs", "return_token_ids", "session", "session_seconds", "retention", "salt", "priority", "tenant"),
)
_RENAMED = {"stop_ids": "stop_token_ids"}


def generate(prompt: Prompt, options: Mapping[str, Any]) -> Any:
    """A request that continues text or ids. Raises TypeError for an unknown option."""
    request = messages.GenerateRequest()
    _set_prompt(request, prompt)
    _set_options(request, options)
    return request


def chat(conversation: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Any:
    """A request that answers OpenAI-style messages. Raises TypeError for an unknown option."""
    options = dict(options)
    request = messages.GenerateRequest()
    request.conversation.CopyFrom(_conversation(conversation, options))
    _set_options(request, options)
    return request


def cached(prompt: Prompt, kind: Any, salt: str) -> Any:
    """A request about the cached state of a prompt."""
    request = kind(salt=salt)
    _set_prompt(request, prompt)
    return request


def _set_prompt(request: Any, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text.text = prompt
    else:
        request.token_ids.CopyFrom(messages.TokenIds(ids=prompt))


def _set_options(request: Any, options: Mapping[str, Any]) -> None:
    known = {*_SAMPLING, *_CONSTRAINTS, *_PLAIN, *_RENAMED, "from_first_token"}
    if unknown := sorted(options.keys() - known):
        raise TypeError(f"unknown option {unknown[0]!r}; expected some of {', '.join(sorted(known))}")
    for name, value in options.items():
        if value is None:
            continue
        if name in _SAMPLING:
            _assign(request.sampling, name, value)
        elif name in _CONSTRAINTS:
            _constrain(request.constraint, name, value)
        elif name == "from_first_token":
            request.constraint.from_first_token = value
        else:
            _assign(request, _RENAMED.get(name, name), value)


def _assign(message: Any, name: str, value: Any) -> None:
    field = getattr(message, name)
    if isinstance(value, Mapping):
        field.update(value)
    elif hasattr(field, "extend"):
        field.extend([value] if isinstance(value, str) else value)
    else:
        setattr(message, name, value)


def _constrain(constraint: Any, kind: str, value: Any) -> None:
    if kind == "choice":
        constraint.choice.choices.extend(value)
    else:
        setattr(constraint, kind, json.dumps(value) if isinstance(value, Mapping) else value)


def _conversation(conversation: Sequence[Mapping[str, Any]], options: dict[str, Any]) -> Any:
    """Takes the options of a conversation out of `options`."""
    tools, choice = options.pop("tools", None) or (), options.pop("tool_choice", None) or ""
    form = options.pop("response_format", None)
    thinking = options.pop("thinking", None)
    message = messages.Conversation(
        messages=map(_message, conversation),
        tools=map(_tool, tools),
        tool_choice=choice["function"]["name"] if isinstance(choice, Mapping) else choice,
        effort=options.pop("effort", None) or "",
        response_format_json=json.dumps(form) if form else "",
        continue_final=options.pop("continue_final", False),
    )
    if thinking is not None:
        message.thinking = thinking
    return message


def _message(message: Mapping[str, Any]) -> Any:
    return messages.Message(
        role=message["role"],
        content=list(_parts(message.get("content"))),
        reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
        tool_calls=[
            messages.ToolCall(
                id=call.get("id") or "", name=call["function"]["name"], arguments_json=call["function"]["arguments"]
            )
            for call in message.get("tool_calls") or ()
        ],
        name=message.get("name") or "",
        tool_call_id=message.get("tool_call_id") or "",
    )


def _parts(content: str | Iterable[Mapping[str, Any]] | None) -> Iterable[Any]:
    if content is None:
        return
    if isinstance(content, str):
        yield messages.Part(text=content)
        return
    for part in content:
        if part.get("type", "text") == "text":
            yield messages.Part(text=part["text"])
        else:
            source = part.get("image_url") or {}
            yield messages.Part(image=messages.Image(url=source["url"] if isinstance(source, Mapping) else source))


def _tool(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function", tool)
    schema = function.get("parameters")
    return messages.Tool(
        name=function["name"],
        description=function.get("description") or "",
        parameters_json=json.dumps(schema) if schema is not None else "",
        strict=bool(function.get("strict")),
    )
