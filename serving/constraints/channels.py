"""A grammar inside the assistant's message: what comes before and after it in XTML."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from k3jax.tokenizer import control as control_tokens
from serving.constraints.grammars import Grammar, literal
from serving.constraints.vocabulary import Vocabulary

Channel = Literal["think", "response", "message"]
"""What the prompt has left open: a channel, or a message in which a channel has to be opened."""

_OPEN, _CLOSE, _SEP = control_tokens.OPEN, control_tokens.CLOSE, control_tokens.SEP
_BEFORE: Mapping[Channel, str] = {
    # The marker that closes the channel has been seen when the grammar starts.
    "think": f"think{_SEP}",
    "response": "",
    "message": "",
}
END = f"{_CLOSE}message{_SEP}"


def wrap(body: Grammar, vocabulary: Vocabulary, channel: Channel | None, calls: Mapping[str, Any] | None = None) -> str:
    """Grammar text for `body` within `channel`; with `calls`, a structural tag, these may come instead."""
    if channel is None:
        return _document("start: @body", body=body)
    opened = "" if channel == "response" else f"{_OPEN}response{_SEP}"
    answer = f"{spell(opened, vocabulary)} @body {spell(f'{_CLOSE}response{_SEP}', vocabulary)}"
    if calls is None:
        return _document(frame(answer, vocabulary, channel), body=body)
    from serving.constraints import structural

    rules = structural.TagRules(vocabulary)
    called = rules.expression(structural.reachable(calls["format"], channel))
    return _document("\n".join([frame(f"({answer} | {called})", vocabulary, channel), *rules.lines]), body=body)


def frame(inside: str, vocabulary: Vocabulary, channel: Channel) -> str:
    """The rule `start`: the end of the open think channel, `inside`, the end of the message."""
    return f"start: {spell(_BEFORE[channel], vocabulary)} {inside} {spell(END, vocabulary)}"


def spell(text: str, vocabulary: Vocabulary) -> str:
    """Text with names of control tokens as a Lark sequence; empty for no text."""
    pieces = vocabulary.split(text)
    return " ".join(vocabulary.special(piece) if piece in vocabulary.control else literal(piece) for piece in pieces)


def _document(start: str, **parts: Grammar) -> str:
    grammars = [{"name": "start", "lark_grammar": start}, *({"name": name, **part} for name, part in parts.items())]
    return json.dumps({"grammars": grammars})
