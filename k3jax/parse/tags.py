"""Events to tags: `<|open|>name key="value"<|sep|>` and `<|close|>name<|sep|>`.

Models drop separators and add blanks; a tag also ends at the next marker, and
a tag without attributes at the first character that cannot belong to it.
"""

import re
from dataclasses import dataclass, field

from k3jax.parse.lexer import Event, Kind

CHANNELS = ("think", "response", "tools")
_WITH_ATTRIBUTES = ("message", "call", "argument", "json")
_NAMES = CHANNELS + _WITH_ATTRIBUTES
# The look-behind keeps a long word without a quote linear: it is tried from its first letter alone.
_ATTRIBUTE = re.compile(r'(?<!\w)(\w+)="([^"]*)"')
LONGEST_BLANK = 64  # more blanks than this are text: what is held back stays short


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag. A close tag's name may be empty: it closes whatever is open.

    Attributes:
      opens: whether it is an open tag.
      name: the element's.
      raw: its spelling, for the inside of an argument.
      shown: what a reader sees of it where it means nothing.
      attributes: unescaped, by key.
    """

    opens: bool
    name: str
    raw: str
    shown: str
    attributes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loose:
    """Markers and control tokens that make no tag; `raw` and `shown` as for `Tag`."""

    raw: str
    shown: str


Item = str | Tag | Loose | None  # text, a tag, no tag, or the end of the message


class TagAssembler:
    """Turns events into text, tags and None (the end), holding back an unfinished tag."""

    def __init__(self) -> None:
        self._marker: Event | None = None
        self._header: list[str] = []
        self._collecting = False  # the name is known and attributes may follow: only a marker ends the tag

    def push(self, event: Event) -> list[Item]:
        """The items that `event` completes."""
        if self._marker is not None:
            return self._inside(self._marker, event)
        if event.kind is Kind.TEXT:
            return [event.text]
        if event.kind is Kind.SEP or event.kind is Kind.CONTROL:
            return [Loose(event.text, event.shown)]
        if event.kind is Kind.END:
            return [None]
        self._marker = event
        return []

    def finish(self) -> None:
        """Drops an unfinished tag: it began with a control token, so it is no text."""
        self._reset()

    def _inside(self, marker: Event, event: Event) -> list[Item]:
        if event.kind is Kind.TEXT:
            self._header.append(event.text)
            return [] if self._collecting else self._decide(marker)
        if event.kind is Kind.CONTROL and self._collecting:
            return []  # no attribute holds a control token
        header = self._reset()
        if event.kind is Kind.SEP:
            return [_tag_or_loose(marker, header, event)]
        return [_tag_or_loose(marker, header), *self.push(event)]

    def _reset(self) -> str:
        header = "".join(self._header)
        self._marker, self._header, self._collecting = None, [], False
        return header

    def _decide(self, marker: Event) -> list[Item]:
        """What the header so far must be, if that is certain."""
        header = "".join(self._header)
        self._header = [header]
        bare = header.lstrip()
        blank = len(header) - len(bare) > LONGEST_BLANK
        if not blank and any(name.startswith(bare) for name in _NAMES):
            return []
        name = next((name for name in _NAMES if bare.startswith(name)), None) if not blank else None
        rest = bare[len(name) :] if name else ""
        if name and marker.kind is Kind.OPEN and name in _WITH_ATTRIBUTES and (not rest or rest[0].isspace()):
            self._collecting = True
            return []
        if name and (marker.kind is Kind.CLOSE or name in CHANNELS):
            if not rest.strip() and len(rest) <= LONGEST_BLANK:
                return []
            self._reset()
            header = header[: -len(rest)]
            return [Tag(marker.kind is Kind.OPEN, name, marker.text + header, marker.shown + header), rest]
        self._reset()
        return [Loose(marker.text + header, marker.shown + header)]


def _tag_or_loose(marker: Event, header: str, separator: Event | None = None) -> Tag | Loose:
    raw = marker.text + header + (separator.text if separator else "")
    shown = marker.shown + header + (separator.shown if separator else "")
    bare = header.strip()
    if marker.kind is Kind.CLOSE:
        return Tag(False, bare, raw, shown) if bare in _NAMES or not bare else Loose(raw, shown)
    name = bare.split(maxsplit=1)[0] if bare else ""
    if name in _WITH_ATTRIBUTES or bare in CHANNELS:
        return Tag(True, name, raw, shown, {key: unescape(value) for key, value in _ATTRIBUTE.findall(header)})
    return Loose(raw, shown)


def unescape(value: str) -> str:
    """An attribute value as it was before escaping."""
    return value.replace("&quot;", '"').replace("&amp;", "&")
