"""Tools that a prompt declares, read back from its tokens: a gateway sends its rendering, and not the tools."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from k3jax.tokenizer import Tokenizer
from k3jax.tokenizer import control as control_tokens

_FENCE, _FENCE_END = "```json\n", "\n```"


def declared_tools(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[Mapping[str, Any]]:
    """Tools that may be called after `prompt`, as its system messages declare them; none where it forbids calls.

    Only control tokens make a message, so nothing that a user writes can declare a tool.
    """
    tools: list[Mapping[str, Any]] = []
    for kind, body in _system_messages(tokenizer, prompt):
        if kind == "tool-choice" and "MUST NOT" in body:
            return []
        if kind == "tool-declare":
            tools += _listed(body)
    return tools


def loosened(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same tools with any arguments."""
    return [{"type": "function", "function": {"name": _function(tool)["name"]}} for tool in tools]


def _system_messages(tokenizer: Tokenizer, prompt: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Type and text of the messages that carry the options of a request."""
    ids = tokenizer.control_ids
    opening, separator, closing = (
        ids[name] for name in (control_tokens.OPEN, control_tokens.SEP, control_tokens.CLOSE)
    )
    tokens = list(prompt)
    for start in (at for at, token in enumerate(tokens) if token == opening):
        head = list(itertools.takewhile(lambda token: token != separator, tokens[start + 1 : start + 64]))
        text = tokenizer.decode(head)
        if text.startswith('message role="system" type="'):
            body = itertools.takewhile(lambda token: token != closing, tokens[start + len(head) + 2 :])
            yield text.split('"')[3], tokenizer.decode(list(body))


def _listed(body: str) -> list[Mapping[str, Any]]:
    """The tools in a declaration; none that has no name."""
    _, _, fenced = body.partition(_FENCE)
    try:
        value = json.loads(fenced.rpartition(_FENCE_END)[0])
    except (ValueError, RecursionError):
        return []
    return [tool for tool in value if _function(tool).get("name")] if isinstance(value, list) else []


def _function(tool: object) -> Mapping[str, Any]:
    """The part of a tool that names it."""
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return inner if isinstance(inner, Mapping) and isinstance(inner.get("name"), str) else {}
