"""Structured output: what a request may say, token by token.

    constraint = after("json_schema", schema, tokenizer, prompt)
    constraint.mask()                   # bits of the tokens that may come next
    constraint.advance([token])

A chat prompt leaves a channel of the assistant's message open. The grammar then waits for the end of the reasoning and
is put into the response channel; where the prompt declares tools, calls may come instead. After a raw prompt it starts
at once. Needs llguidance (extra `structured`).
"""

from collections.abc import Mapping, Sequence

from k3jax.parse import open_channel
from k3jax.tokenizer import Tokenizer
from k3jax.tokenizer import control as control_tokens
from serving.constraints.channels import Channel, wrap
from serving.constraints.declared import declared_tools, loosened
from serving.constraints.errors import ConstraintError
from serving.constraints.grammars import KINDS, body_of
from serving.constraints.matcher import GrammarConstraint
from serving.constraints.structural import tag_grammar
from serving.constraints.tools import tool_calls
from serving.constraints.vocabulary import Vocabulary, vocabulary_of

__all__ = [
    "KINDS",
    "Channel",
    "ConstraintError",
    "GrammarConstraint",
    "after",
    "channel_of",
    "compile",
    "declared_tools",
    "tool_calls",
]


def channel_of(tokenizer: Tokenizer, prompt: Sequence[int]) -> Channel | None:
    """The channel that a prompt leaves open: `think`, `response`, `message`, or None for a raw prompt."""
    if tokenizer.control_ids.get(control_tokens.OPEN) not in prompt:
        return None
    return open_channel(tokenizer, prompt)  # pyright: ignore[reportReturnType]


def after(
    kind: str, value: object, tokenizer: Tokenizer, prompt: Sequence[int], *, from_first_token: bool = False
) -> GrammarConstraint:
    """A constraint for what follows `prompt`: `compile` with its channel and with the tools that it declares.

    A structural tag says itself what may be called. `from_first_token` applies the grammar at once. Tools whose
    arguments no grammar can follow may be called with any arguments.
    """
    channel = None if from_first_token else channel_of(tokenizer, prompt)
    tools = [] if channel is None or kind == "structural_tag" else declared_tools(tokenizer, prompt)
    if not tools:
        return compile(kind, value, tokenizer, channel=channel)
    # What is wrong with the value is found before what is wrong with a tool.
    compile(kind, value, tokenizer, channel=channel)
    try:
        return compile(kind, value, tokenizer, channel=channel, tools=tools)
    except ConstraintError:
        return compile(kind, value, tokenizer, channel=channel, tools=loosened(tools))


def compile(
    kind: str,
    value: object,
    tokenizer: Tokenizer,
    *,
    channel: Channel | None = None,
    tools: Sequence[Mapping[str, object]] = (),
) -> GrammarConstraint:
    """A constraint for one sequence. Grammars of the same text are compiled once.

    Args:
      kind: one of `KINDS`.
      value: the schema (text or object), regex, Lark or GBNF grammar, strings of a choice, structural tag; True for
        `json_object`.
      tokenizer: of the model.
      channel: what the prompt leaves open; None applies the grammar from the first token.
      tools: tools that the model may call instead of answering; only within a channel.

    Raises `ConstraintError`, which names the kind and what is wrong with the value.
    """
    vocabulary = vocabulary_of(tokenizer)
    try:
        text = _grammar(kind, value, vocabulary, channel, tools)
    except ConstraintError as error:
        if error.kind == kind:
            raise
        # What is wrong with a schema inside a tag is wrong with the tag.
        raise ConstraintError(kind, str(error)) from error
    except RecursionError as error:
        raise ConstraintError(kind, "the value is nested too deeply") from error
    return GrammarConstraint(vocabulary, vocabulary.matcher(kind, text), kind, channel)


def _grammar(
    kind: str,
    value: object,
    vocabulary: Vocabulary,
    channel: Channel | None,
    tools: Sequence[Mapping[str, object]],
) -> str:
    if kind == "structural_tag":
        return tag_grammar(value, vocabulary, channel)
    calls = tool_calls(tools, "required") if tools and channel is not None else None
    return wrap(body_of(kind, value), vocabulary, channel, calls)
