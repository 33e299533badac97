"""Chat on a terminal: a question becomes a prompt, sampled ids become channels."""

from collections.abc import Iterator

from k3jax import chat
from k3jax.parse import Delta, Message, StreamParser
from k3jax.tokenizer import Tokenizer

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def render(tokenizer: Tokenizer, question: str, system: str | None, thinking: bool) -> list[int]:
    """The prompt for one question, up to the channel that the model continues."""
    messages = [{"role": "system", "content": system}] if system else []
    return chat.render(tokenizer, [*messages, {"role": "user", "content": question}], thinking=thinking)


class ChannelPrinter:
    """Turns ids into text for a terminal: the think channel dimmed (`color`) and set apart from the answer."""

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool, color: bool) -> None:
        self._parser = StreamParser(tokenizer, thinking=thinking)
        self._color = color
        self._channel: str | None = None

    def push(self, token: int) -> str:
        """What a token adds."""
        return "".join(self._show(self._parser.push(token)))

    def finish(self, reason: str) -> str:
        """The rest, when the output has ended for `reason`."""
        return "".join(self._show(self._parser.finish(reason))) + self._close()

    @property
    def message(self) -> Message:
        """The parsed message."""
        return self._parser.message

    def _show(self, deltas: list[Delta]) -> Iterator[str]:
        for delta in deltas:
            yield self._enter(delta)
            yield f"{delta.name} " if delta.name is not None else ""
            yield delta.text

    def _enter(self, delta: Delta) -> str:
        """The border between two channels, or between two tool calls."""
        channel = f"{delta.kind} {delta.index}"
        if channel == self._channel:
            return ""
        border = self._close() + ("" if self._channel is None else "\n\n")
        self._channel = channel
        return border + (DIM if self._color and delta.kind == "reasoning" else "")

    def _close(self) -> str:
        return PLAIN if self._color and (self._channel or "").startswith("reasoning") else ""
