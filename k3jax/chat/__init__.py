"""Chat: messages to the exact prompt that Moonshot's encoder makes.

`render` gives ids, `render_segments` the pieces before encoding. The order is
tools, thinking effort, the conversation, tool choice, response format, and
the generation prompt that opens the assistant's first channel.
"""

from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack

from k3jax.chat import options as chat_options
from k3jax.chat import segments as chat_segments
from k3jax.chat.arguments import Revision, arguments_body
from k3jax.chat.images import image_prompt
from k3jax.chat.segments import Segment, close_tag, element, message, open_tag, text_body
from k3jax.chat.turns import Call, Turn, turns
from k3jax.tokenizer import Tokenizer

__all__ = ["Revision", "Segment", "image_prompt", "render", "render_completion", "render_segments"]

Message = Mapping[str, object]


class RenderOptions(TypedDict, total=False):
    """The less common options of `render`.

    Attributes:
      response_schema: schema that goes before the one inside `response_format`.
      images: one image prompt (see `image_prompt`) per image part, in the messages' order.
      revision: how JSON-string arguments of past tool calls are written.
      add_generation_prompt: open the assistant's channel at the end.
      continue_final: leave the last message, the assistant's, open to be continued:
        in its response if it has content, else in its reasoning.
    """

    response_schema: object
    images: Sequence[str]
    revision: Revision | str
    add_generation_prompt: bool
    continue_final: bool


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]] | None = None,
    thinking_effort: str | None = "max",
    thinking: bool = True,
    tool_choice: str | Mapping[str, object] | None = None,
    response_format: Mapping[str, object] | None = None,
    **options: Unpack[RenderOptions],
) -> list[int]:
    """Token ids of the prompt.

    Args:
      tokenizer: of the K3 vocabulary or a small one with the same control names.
      messages: OpenAI-style messages; roles system, developer, user, assistant, tool.
      tools: tool objects to declare.
      thinking_effort: low, high or max; None for no effort message. Ignored without thinking.
      thinking: whether the assistant has a think channel, in the history too.
      tool_choice: `required` or `none` add a message; `auto`, None or a named tool do not.
      response_format: `json_object`, `json_schema` or `text`.
      **options: see `RenderOptions`.

    Raises ValueError naming the message and the field, and TypeError for an unknown option.
    """
    segments = render_segments(messages, tools, thinking_effort, thinking, tool_choice, response_format, **options)
    return chat_segments.encode(tokenizer, segments)


def render_segments(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]] | None = None,
    thinking_effort: str | None = "max",
    thinking: bool = True,
    tool_choice: str | Mapping[str, object] | None = None,
    response_format: Mapping[str, object] | None = None,
    **options: Unpack[RenderOptions],
) -> list[Segment]:
    """The prompt's segments, each to be encoded on its own; arguments as for `render`."""
    _require_known(options)
    revision = _revision(options.get("revision", Revision.R2))
    conversation = turns(messages, options.get("images", ()))
    last = [conversation.pop()] if options.get("continue_final") and conversation else []
    segments = chat_options.tool_declaration(tools, "tools", dynamic=False)
    segments += chat_options.effort_message(thinking_effort) if thinking else []
    segments += _conversation(conversation, thinking, revision)
    segments += chat_options.tool_choice_message(tool_choice)
    segments += chat_options.response_format_message(response_format, options.get("response_schema"))
    if options.get("continue_final"):
        return segments + _unfinished(last[0] if last else None, thinking, revision)
    return segments + (_generation_prompt(thinking) if options.get("add_generation_prompt", True) else [])


def render_completion(
    tokenizer: Tokenizer, message: Message, thinking: bool = True, revision: Revision | str = Revision.R2
) -> list[int]:
    """Ids that the model should generate after the generation prompt to say the assistant's `message`."""
    if message.get("role") != "assistant":
        raise ValueError(f"messages[0].role is {message.get('role')!r}; a completion is the assistant's")
    [turn] = turns([message])
    body = _assistant_body(turn, thinking, _revision(revision))
    # The generation prompt already holds the opening tag of the first channel.
    opened = len(open_tag("think"))
    return chat_segments.encode(tokenizer, [*body[opened:], *close_tag("message"), chat_segments.END_OF_MESSAGE])


def _require_known(options: Mapping[str, object]) -> None:
    unknown = sorted(set(options) - set(RenderOptions.__annotations__))
    if unknown:
        known = ", ".join(RenderOptions.__annotations__)
        raise TypeError(f"unknown option {', '.join(unknown)}; besides the named arguments expected {known}")


def _revision(revision: Revision | str) -> Revision:
    if revision not in list(Revision):
        raise ValueError(f"revision is {revision!r}; expected one of {', '.join(Revision)}")
    return Revision(revision)


def _conversation(conversation: Sequence[Turn], thinking: bool, revision: Revision) -> list[Segment]:
    segments: list[Segment] = []
    calls: tuple[Call, ...] = ()
    results = 0
    for turn in conversation:
        if turn.role == "assistant":
            calls, results = turn.calls, 0
            segments += message(*_header(turn), body=_assistant_body(turn, thinking, revision))
        elif turn.role == "tool":
            results += 1
            attributes = (("role", "tool"), ("tool", _tool_name(turn, calls, results)), ("index", str(results)))
            segments += message(*attributes, body=turn.body)
        elif turn.tools:
            segments += chat_options.tool_declaration(turn.tools, f"{turn.place}.tools", dynamic=True)
        else:
            segments += message(*_header(turn), body=turn.body)
    return segments


def _header(turn: Turn) -> list[tuple[str, str]]:
    return [("role", turn.role), *([("name", turn.name)] if turn.name else [])]


def _tool_name(turn: Turn, calls: tuple[Call, ...], index: int) -> str:
    if turn.name:
        return turn.name
    if index <= len(calls):
        return calls[index - 1].name
    raise ValueError(
        f"{turn.place} is tool result {index} of {len(calls)} calls and names no tool; "
        "expected a 'tool' or 'name' field, or an assistant call that it answers"
    )


def _assistant_body(turn: Turn, thinking: bool, revision: Revision) -> list[Segment]:
    segments = element("think", body=_reasoning(turn, revision)) if thinking else []
    segments += element("response", body=turn.body)
    if not turn.calls:
        return segments
    segments += open_tag("tools")
    for i, call in enumerate(turn.calls):
        body = arguments_body(call.arguments, f"{turn.place}.tool_calls[{i}].function.arguments", revision)
        segments += element("call", ("tool", call.name), ("index", str(i + 1)), body=body)
    return segments + close_tag("tools")


def _reasoning(turn: Turn, revision: Revision) -> list[Segment]:
    if revision is Revision.R1 and not turn.reasoning.strip():
        return []
    return text_body(turn.reasoning)


def _generation_prompt(thinking: bool) -> list[Segment]:
    return [*open_tag("message", ("role", "assistant")), *open_tag("think" if thinking else "response")]


def _unfinished(turn: Turn | None, thinking: bool, revision: Revision) -> list[Segment]:
    if turn is None or turn.role != "assistant":
        place = "messages" if turn is None else turn.place
        raise ValueError(f"{place}: continue_final needs an assistant message at the end")
    if turn.calls:
        raise ValueError(f"{turn.place}.tool_calls: a message with tool calls is finished and cannot be continued")
    segments = open_tag("message", *_header(turn))
    if thinking and not turn.body:
        return [*segments, *open_tag("think"), *_reasoning(turn, revision)]
    if thinking:
        segments += element("think", body=_reasoning(turn, revision))
    return [*segments, *open_tag("response"), *turn.body]
