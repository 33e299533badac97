"""The channels of an assistant message: think, response, tools.

The completion starts inside the channel that the prompt left open. The rules
follow what models do: they skip a close tag, open a channel again, answer
inside the think channel, or stop anywhere.
"""

from enum import Enum

from k3jax.parse.calls import CallAssembler, Delta
from k3jax.parse.tags import LONGEST_BLANK, Item, Loose, Tag
from k3jax.tokenizer import control as control_tokens

# Models sometimes open the channel again that the prompt has opened, and may spell it in ordinary tokens.
_SPELLED_THINK = f"{control_tokens.OPEN}think{control_tokens.SEP}"


class Channel(Enum):
    """Where in the message the output is; DONE after the message's close."""

    OUTSIDE = "outside"
    THINK = "think"
    RESPONSE = "response"
    TOOLS = "tools"
    DONE = "done"


class ChannelMachine:
    """Sorts text and tags into reasoning, content and tool calls."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.reasoning: list[str] | None = [] if channel is Channel.THINK else None
        self.content: list[str] = []
        self.calls = CallAssembler()
        self.closed = False  # the model ended its message
        self._prefilled = channel is Channel.THINK  # no think tag of the model's own so far
        self._head: str | None = "" if self._prefilled else None  # held until it is no repeated think tag
        self._answered = channel is Channel.RESPONSE  # a response channel was opened
        self._stray: list[str] = []  # text between channels: the content if no response comes

    def push(self, item: Item) -> list[Delta]:
        """The deltas of one item."""
        if self.channel is Channel.DONE:
            return []
        if isinstance(item, str):
            return self._text(item)
        if item is None:
            return self._end()
        return self._loose(item) if isinstance(item, Loose) else self._tag(item)

    def finish(self) -> list[Delta]:
        """What is known only at the end of the output."""
        if self.channel is Channel.DONE:
            return []
        return self._flush_head() + self.calls.finish() + self._flush_stray()

    def _text(self, text: str) -> list[Delta]:
        if self.channel is Channel.RESPONSE:
            return self._emit_content(text)
        if self.channel is Channel.TOOLS:
            return self.calls.text(text)
        if self.channel is Channel.OUTSIDE:
            self._stray.append(text)
            return []
        return self._emit_reasoning(text) if self._head is None else self._begin_reasoning(self._head + text)

    def _loose(self, item: Loose) -> list[Delta]:
        """An argument keeps every token that the model wrote; elsewhere a control token is nothing to read."""
        text = item.raw if self.channel is Channel.TOOLS else item.shown
        return self._text(text) if text else []

    def _tag(self, tag: Tag) -> list[Delta]:
        deltas: list[Delta] = []
        if self.channel is Channel.TOOLS:
            deltas, taken = self.calls.tag(tag)
            if taken:
                return deltas
        return deltas + (self._open(tag) if tag.opens else self._close(tag))

    def _open(self, tag: Tag) -> list[Delta]:
        if tag.name == "think":
            return self._open_think()
        if tag.name == "message":
            return []
        if tag.name == "tools":
            return self._open_tools()
        if tag.name == "call" and tag.attributes.get("tool"):
            return self._open_tools() + self.calls.tag(tag)[0]  # the model skipped the tools tag
        if tag.name != "response":
            return self._text(tag.shown) if tag.shown else []
        self._stray, self._answered = [], True
        deltas = self._flush_head()
        self.channel = Channel.RESPONSE
        return deltas

    def _open_tools(self) -> list[Delta]:
        deltas = self._flush_head() + self._flush_stray()
        self.channel = Channel.TOOLS
        return deltas

    def _begin_reasoning(self, head: str) -> list[Delta]:
        """The first text after a prefilled think tag: dropped as far as it repeats the tag."""
        bare = head.lstrip()
        if len(head) - len(bare) > LONGEST_BLANK:
            self._head = None
            return self._emit_reasoning(head)
        if _SPELLED_THINK.startswith(bare):
            self._head = head
            if bare == _SPELLED_THINK:
                self._open_think()
            return []
        self._head = None
        if not bare.startswith(_SPELLED_THINK):
            return self._emit_reasoning(head)
        self._open_think()
        return self._emit_reasoning(bare[len(_SPELLED_THINK) :])

    def _open_think(self) -> list[Delta]:
        self.reasoning = self.reasoning or []
        self.channel, self._prefilled, self._head = Channel.THINK, False, None
        return []

    def _close(self, tag: Tag) -> list[Delta]:
        if tag.name == "message":
            return self._close_message()
        if self.channel is Channel.THINK:
            if tag.name == "response" and self._prefilled:
                deltas = self._flush_head() + self._reclassify()
                self.channel = Channel.OUTSIDE
                return deltas
            return self._leave() if tag.name in ("think", "") else []
        mine = {Channel.RESPONSE: "response", Channel.TOOLS: "tools"}.get(self.channel)
        return self._leave() if mine is not None and tag.name in (mine, "") else []

    def _leave(self) -> list[Delta]:
        deltas = self._flush_head()
        self.channel, self._prefilled = Channel.OUTSIDE, False
        return deltas

    def _close_message(self) -> list[Delta]:
        deltas = self._flush_head()
        if self.channel is Channel.THINK and self._prefilled:
            deltas += self._reclassify()
        return deltas + self._end()

    def _end(self) -> list[Delta]:
        deltas = self._flush_head() + self.calls.end() + self._flush_stray()
        self.channel, self.closed = Channel.DONE, True
        return deltas

    def _reclassify(self) -> list[Delta]:
        """The model answered inside the think channel: what it wrote is the content."""
        text = "".join(self.reasoning or [])
        self.reasoning, self._prefilled, self._answered = [], False, True
        if not text:
            return []
        self.content.append(text)
        return [Delta("content", "".join(self.content), reclassified=True)]

    def _flush_head(self) -> list[Delta]:
        text, self._head = self._head, None
        return self._emit_reasoning(text) if text else []

    def _flush_stray(self) -> list[Delta]:
        text = "".join(self._stray)
        self._stray = []
        return self._emit_content(text) if text.strip() and not self._answered else []

    def _emit_reasoning(self, text: str) -> list[Delta]:
        self.reasoning = self.reasoning or []
        self.reasoning.append(text)
        return [Delta("reasoning", text)]

    def _emit_content(self, text: str) -> list[Delta]:
        self.content.append(text)
        return [Delta("content", text)]
