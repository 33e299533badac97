"""A chat-completions request body as the renderer's arguments.

Servers spell the same wish in several ways. The renderer's own names, at the
top or in `chat_template_kwargs`, win over the portable ones:
`reasoning_effort` (`none` turns thinking off), `enable_thinking`, and
Moonshot's `thinking` object. A null field counts as absent, but a null
`thinking_effort` (also spelled `none`) means no effort message.
"""

from collections.abc import Mapping, Sequence

from k3jax.chat.options import EFFORTS

_RENDERER = (
    *("messages", "tools", "tool_choice", "response_format", "thinking_effort"),
    *("response_schema", "revision", "continue_final", "add_generation_prompt"),
)
_BOOLEANS = ("continue_final", "continue_final_message", "add_generation_prompt", "enable_thinking")
_PORTABLE = ("thinking", "reasoning_effort", "enable_thinking", "chat_template_kwargs", "continue_final_message")
# What a request may also hold that does not touch the prompt.
_OTHER = (
    *("model", "stream", "stream_options", "n", "seed", "stop", "stop_token_ids", "logprobs", "top_logprobs"),
    *("prompt_logprobs", "logit_bias", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "max_tokens", "max_completion_tokens", "min_tokens"),
    *("ignore_eos", "parallel_tool_calls", "cache_salt", "user", "metadata", "store", "service_tier"),
    *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "safety_identifier"),
    "prompt_cache_key",
)


def render_arguments(body: Mapping[str, object]) -> dict[str, object]:
    """Keyword arguments for `chat.render_segments` (and `chat.render`) from a request body.

    Null fields of a tool are dropped, as servers do; nulls inside its
    parameters stay. Raises ValueError naming the key.
    """
    unknown = sorted(set(body) - {*_RENDERER, *_PORTABLE, *_OTHER})
    if unknown:
        raise ValueError(
            f"the request has the unknown key {unknown[0]!r}; the prompt depends on {', '.join(_RENDERER)}"
        )
    if not isinstance(body.get("messages"), Sequence) or isinstance(body["messages"], str):
        raise ValueError("the request holds no messages; expected a list under 'messages'")
    native = _given(body) | _given(_template_arguments(body))
    for key in _BOOLEANS:
        if not isinstance(native.get(key, False), bool):
            raise ValueError(f"{key} is {native[key]!r}; expected true or false")
    arguments = {key: native[key] for key in _RENDERER if key in native}
    if "continue_final_message" in native:
        arguments.setdefault("continue_final", native["continue_final_message"])
    tools = native.get("tools")
    if isinstance(tools, Sequence):
        arguments["tools"] = [_without_nulls(tool) for tool in tools]
    return arguments | _thinking(native) | _effort(native)


def _given(fields: Mapping[str, object]) -> dict[str, object]:
    """Without null fields, which mean absent; only for `thinking_effort` null is a value."""
    return {key: value for key, value in fields.items() if value is not None or key == "thinking_effort"}


def _template_arguments(body: Mapping[str, object]) -> Mapping[str, object]:
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"chat_template_kwargs is a {type(given).__name__}; expected an object")
    if "messages" in given:
        raise ValueError("chat_template_kwargs holds 'messages'; expected them at the top of the request alone")
    unknown = sorted(set(given) - {*_RENDERER, "thinking", "enable_thinking", "preserve_thinking"})
    if unknown:
        raise ValueError(f"chat_template_kwargs has the unknown key {unknown[0]!r}")
    return given


def _thinking(native: Mapping[str, object]) -> dict[str, object]:
    thinking = native.get("thinking")
    if isinstance(thinking, bool):
        return {"thinking": thinking}
    if native.get("reasoning_effort") == "none":
        return {"thinking": False}
    if native.get("enable_thinking") is not None:
        return {"thinking": native["enable_thinking"]}
    if thinking is None:
        return {}
    kind = thinking.get("type", "enabled") if isinstance(thinking, Mapping) else None
    if kind not in ("enabled", "disabled"):
        raise ValueError(f"thinking is {thinking!r}; expected true, false or an object of type enabled or disabled")
    return {"thinking": kind == "enabled"}


def _effort(native: Mapping[str, object]) -> dict[str, object]:
    if "thinking_effort" in native:
        effort = native["thinking_effort"]
        return {"thinking_effort": None if effort == "none" else effort}
    thinking = native.get("thinking")
    moonshot = thinking.get("effort") if isinstance(thinking, Mapping) else None
    name = "thinking.effort" if native.get("reasoning_effort") is None else "reasoning_effort"
    effort = moonshot if native.get("reasoning_effort") is None else native["reasoning_effort"]
    if effort is None or effort == "none":
        return {}
    if effort not in EFFORTS:
        raise ValueError(f"{name} is {effort!r}; expected none, {', '.join(EFFORTS)}")
    return {"thinking_effort": effort}


def _without_nulls(tool: object) -> object:
    if not isinstance(tool, Mapping):
        return tool
    kept = {key: value for key, value in tool.items() if value is not None}
    if isinstance(kept.get("function"), Mapping):
        kept["function"] = {key: value for key, value in kept["function"].items() if value is not None}
    return kept
