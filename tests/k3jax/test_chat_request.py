"""Request bodies, in every spelling that servers accept, as the renderer's arguments."""

import pytest

from k3jax import chat
from k3jax.chat.request import render_arguments

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {}),
        ({"temperature": 1.0, "model": "k3", "stop": ["a"]}, {}),
        ({"reasoning_effort": "low"}, {"thinking_effort": "low"}),
        ({"reasoning_effort": "none"}, {"thinking": False}),
        ({"reasoning_effort": None}, {}),
        ({"enable_thinking": False}, {"thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"thinking": False}),
        (
            {"thinking": {"type": "enabled", "keep": "all", "effort": "high"}},
            {"thinking": True, "thinking_effort": "high"},
        ),
        ({"thinking": {"effort": "high"}, "reasoning_effort": "low"}, {"thinking": True, "thinking_effort": "low"}),
        ({"thinking_effort": "high", "reasoning_effort": "low"}, {"thinking_effort": "high"}),
        ({"thinking_effort": None}, {"thinking_effort": None}),
        ({"thinking": True, "reasoning_effort": "none"}, {"thinking": True}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"thinking": False}),
        (
            {"chat_template_kwargs": {"thinking": True, "thinking_effort": "low"}},
            {"thinking": True, "thinking_effort": "low"},
        ),
        ({"chat_template_kwargs": {"thinking_effort": "low"}, "thinking_effort": "max"}, {"thinking_effort": "low"}),
        ({"continue_final_message": True}, {"continue_final": True}),
        ({"tool_choice": "none", "response_format": {"type": "text"}},) * 2,
    ],
)
def test_spellings(body: dict[str, object], expected: dict[str, object]) -> None:
    assert render_arguments({"messages": MESSAGES, **body}) == {"messages": MESSAGES, **expected}


def test_null_fields_of_tools_are_dropped_but_not_in_parameters() -> None:
    parameters = {"type": "object", "default": None}
    tool = {
        "type": "function",
        "strict": None,
        "function": {"name": "f", "description": None, "parameters": parameters},
    }
    arguments = render_arguments({"messages": MESSAGES, "tools": [tool]})
    assert arguments["tools"] == [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert tool["strict"] is None
    rendered = "".join(segment.text for segment in chat.render_segments(**arguments))
    assert '"parameters":{"default":null,"type":"object"}' in rendered


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"mesages": MESSAGES}, "unknown key 'mesages'"),
        ({"messages": "x"}, "holds no messages"),
        (
            {"messages": MESSAGES, "reasoning_effort": "medium"},
            "reasoning_effort is 'medium'; expected none, low, high, max",
        ),
        ({"messages": MESSAGES, "thinking": {"effort": "xhigh"}}, "thinking.effort is 'xhigh'"),
        ({"messages": MESSAGES, "thinking": "yes"}, "thinking is 'yes'"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs has the unknown key 'x'"),
        ({"messages": MESSAGES, "chat_template_kwargs": 1}, "chat_template_kwargs is a int"),
    ],
)
def test_a_wrong_body_is_named(body: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render_arguments(body)
