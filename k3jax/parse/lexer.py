"""Model output as events: text, the four markers and other control tokens.

Two lexers make the same events. From ids only real control tokens are
markers, and a marker spelled in ordinary tokens is text; from a string, where
the two look alike, every complete spelling is a marker, and other control
tokens are text.
"""

import codecs
import re
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from k3jax.tokenizer import Tokenizer
from k3jax.tokenizer import control as control_tokens


class Kind(Enum):
    """What an event is."""

    TEXT = "text"
    OPEN = "open"
    CLOSE = "close"
    SEP = "sep"
    END = "end"
    CONTROL = "control"


class Event(NamedTuple):
    """One event.

    Attributes:
      kind: text, a marker, or another control token.
      text: the text or the marker's spelling.
      shown: what a reader sees of it where it is no markup: nothing of a control token.
    """

    kind: Kind
    text: str
    shown: str


MARKERS = {
    control_tokens.OPEN: Kind.OPEN,
    control_tokens.CLOSE: Kind.CLOSE,
    control_tokens.SEP: Kind.SEP,
    control_tokens.END_OF_MESSAGE: Kind.END,
}


class IdLexer:
    """Events from token ids, a character at a time even when its bytes come in several tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._events = {id_: Event(Kind.CONTROL, name, "") for id_, name in tokenizer.control.items()}
        self._events |= {tokenizer.control_id(name): Event(kind, name, "") for name, kind in MARKERS.items()}
        self._events |= {id_: Event(Kind.END, tokenizer.control[id_], "") for id_ in tokenizer.eos_ids}

    def push(self, ids: Iterable[int]) -> list[Event]:
        """Events that `ids` complete. Raises ValueError for an id out of range."""
        events: list[Event] = []
        run: list[bytes] = []
        for id_ in ids:
            event = self._events.get(id_)
            if event is None:
                run.append(self._token_bytes(id_))
                continue
            self._add_text(events, run, final=True)
            events.append(event)
            run = []
        self._add_text(events, run, final=False)
        return events

    def finish(self) -> list[Event]:
        """The character whose bytes never came, as U+FFFD."""
        events: list[Event] = []
        self._add_text(events, [], final=True)
        return events

    def _add_text(self, events: list[Event], run: list[bytes], final: bool) -> None:
        text = self._decode(b"".join(run), final)
        if text:
            events.append(_text(text))


def _text(text: str) -> Event:
    return Event(Kind.TEXT, text, text)


class TextLexer:
    """Events from text; holds back a suffix that may be the start of a marker."""

    _marker = re.compile("|".join(map(re.escape, MARKERS)))
    _longest = max(map(len, MARKERS))

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[Event]:
        """Events that `text` completes."""
        text = self._held + text
        events: list[Event] = []
        at = 0
        for match in self._marker.finditer(text):
            if match.start() > at:
                events.append(_text(text[at : match.start()]))
            events.append(Event(MARKERS[match.group()], match.group(), match.group()))
            at = match.end()
        keep = self._partial(text, at)
        self._held = text[keep:]
        if keep > at:
            events.append(_text(text[at:keep]))
        return events

    def finish(self) -> list[Event]:
        """A marker that was begun and not finished: ordinary text."""
        text, self._held = self._held, ""
        return [_text(text)] if text else []

    def _partial(self, text: str, at: int) -> int:
        start = text.rfind("<", max(at, len(text) - self._longest + 1))
        if start >= 0 and any(marker.startswith(text[start:]) for marker in MARKERS):
            return start
        return len(text)
