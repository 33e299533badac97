"""Structural tags: a language for formats with free text between tagged pieces, as gateways send it.

    {"format": {"type": "triggered_tags", "triggers": [...], "tags": [{"begin", "content", "end"}]}}
    {"structures": [{"begin", "schema", "end"}], "triggers": [...]}            the older form

A name of a control token in a string means that token. Free text holds no control tokens; between triggered tags it
may, as long as they do not begin a trigger.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from k3jax.tokenizer import control as control_tokens
from serving.constraints import channels, grammars
from serving.constraints.errors import ConstraintError
from serving.constraints.vocabulary import Vocabulary

KIND = "structural_tag"
ANYTHING = "/(?s:.+)/"


def tag_grammar(value: object, vocabulary: Vocabulary, channel: "channels.Channel | None") -> str:
    """Grammar text for a structural tag (text or object). Raises `ConstraintError`.

    Within a channel the tags say what follows it, and the message ends after what the format describes.
    """
    form = _read(value)
    rules = TagRules(vocabulary)
    if channel is None:
        return "\n".join([f"start: {rules.expression(form)}", *rules.lines])
    form = reachable(form, channel)
    if form.get("type") == "triggered_tags" and form.get("at_least_one"):
        # The tools channel is the last one of a message.
        form = {**form, "stop_after_first": True}
        return "\n".join([channels.frame(rules.expression(form), vocabulary, channel), *rules.lines])
    before = "think" + control_tokens.SEP if channel == "think" else ""
    return "\n".join([f"start: {channels.spell(before, vocabulary)} {rules.expression(form)}", *rules.lines])


def _read(value: object) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConstraintError(KIND, f"the tag is not JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise ConstraintError(KIND, f"the tag is a {type(value).__name__}; expected an object")
    if "structures" in value:
        return _from_structures(value)
    form = value.get("format")
    if not isinstance(form, Mapping):
        raise ConstraintError(KIND, "the tag has no 'format' object and no 'structures'")
    return dict(form)


def _from_structures(value: Mapping[str, Any]) -> dict[str, Any]:
    tags = []
    for at, item in enumerate(_list(value, "structures", "the tag")):
        if not isinstance(item, Mapping):
            raise ConstraintError(KIND, f"structures[{at}] is a {type(item).__name__}; expected an object")
        content = {"type": "json_schema", "json_schema": item.get("schema", {})}
        tags.append({"begin": item.get("begin"), "content": content, "end": item.get("end", "")})
    return {"type": "triggered_tags", "triggers": value.get("triggers", []), "tags": tags}


def reachable(form: dict[str, Any], channel: "channels.Channel") -> dict[str, Any]:
    """Without tags that begin by closing a channel which is not open where the grammar starts."""
    if form.get("type") != "triggered_tags":
        return form
    opened = "response" if channel == "response" else None
    triggers, tags = _triggers_and_tags(form)
    closing = control_tokens.CLOSE
    leaving = [tag for tag in tags if opened is not None and tag["begin"].startswith(closing + opened)]
    kept = leaving or [tag for tag in tags if not tag["begin"].startswith(closing)] or tags
    used = [trigger for trigger in triggers if any(tag["begin"].startswith(trigger) for tag in kept)]
    return {**form, "tags": kept, "triggers": used or triggers}


def _triggers_and_tags(form: Mapping[str, Any]) -> tuple[list[str], list[Mapping[str, Any]]]:
    """Of triggered tags; both checked."""
    triggers = _list(form, "triggers", "triggered_tags")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ConstraintError(KIND, f"'triggers' is {triggers!r}; expected texts")
    return list(triggers), _tags(form)


def _tags(form: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    tags = _list(form, "tags", str(form.get("type")))
    for tag in tags:
        _field(tag, "begin")
    return list(tags)


class TagRules:
    """Translates formats to Lark; `lines` are the rules that the expressions refer to."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.lines: list[str] = []
        self._vocabulary = vocabulary
        self._formats: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": lambda form: self._string(_field(form, "value")),
            "json_schema": lambda form: self._schema(form.get("json_schema", {})),
            "regex": lambda form: self._terminal(f"/{llguidance.regex_to_lark(_field(form, 'pattern'), '')}/"),
            "grammar": self._grammar,
            "any_text": lambda form: self._text(form.get("excludes", ())),
            "sequence": lambda form: self._rule(" ".join(self._elements(form))),
            "or": lambda form: self._rule(" | ".join(self._elements(form))),
            "optional": lambda form: f"({self._content(form)})?",
            "plus": lambda form: f"({self._content(form)})+",
            "star": lambda form: f"({self._content(form)})*",
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def expression(self, form: object) -> str:
        """A format as a Lark expression. Raises `ConstraintError` that names the format."""
        if not isinstance(form, Mapping):
            raise ConstraintError(KIND, f"a format is {form!r}; expected an object with a 'type'")
        kind = form.get("type", "tag" if "begin" in form else None)
        if not isinstance(kind, str) or kind not in self._formats:
            raise ConstraintError(KIND, f"the format type {kind!r} is not known; expected {', '.join(self._formats)}")
        return self._formats[kind](form) or '""'

    def _name(self, prefix: str) -> str:
        return f"{prefix}{len(self.lines)}"

    def _rule(self, text: str) -> str:
        name = self._name("r")
        self.lines.append(f"{name}: {text}")
        return name

    def _terminal(self, text: str, *, lazy: bool = False) -> str:
        name = self._name("t" if lazy else "T")
        self.lines.append(f"{name}{'[lazy]' if lazy else ''}: {text}")
        return name

    def _string(self, text: str) -> str:
        return channels.spell(text, self._vocabulary)

    def _schema(self, schema: object) -> str:
        return self._rule("%json " + json.dumps(grammars.json_schema(schema)["json_schema"]))

    def _grammar(self, form: Mapping[str, Any]) -> str:
        """The rules get names of their own, so that two grammars do not meet."""
        try:
            text = any_to_lark(_field(form, "grammar"))
        except Exception as error:  # the converter raises whatever its parser met
            raise ConstraintError(KIND, f"a grammar is neither Lark nor GBNF: {error}") from error
        return self._rule("%lark {\n" + text + "\n}")

    def _text(self, excludes: object) -> str:
        """Text in which no excluded string occurs; control tokens never do."""
        return f"{self._terminal(_without(self._plain(excludes)))}?"

    def _text_until(self, excludes: object, end: str) -> str:
        """Such text up to the first `end`, which is ordinary text: one lexeme, or the text would swallow the end."""
        text = f"({_without(self._plain(excludes))})?" if excludes else "/(?s:.*)/"
        return self._terminal(f"{text} {grammars.literal(end)}", lazy=True)

    def _plain(self, strings: object) -> list[str]:
        """Those of the strings that begin with ordinary text. Raises `ConstraintError` unless all are text."""
        if (
            isinstance(strings, str)
            or not isinstance(strings, Iterable)
            or not all(isinstance(s, str) for s in strings)
        ):
            raise ConstraintError(KIND, f"'excludes' is {strings!r}; expected a list of texts")
        return [text for text in strings if text and self._vocabulary.split(text)[0] not in self._vocabulary.control]

    def _elements(self, form: Mapping[str, Any]) -> list[str]:
        return [self.expression(element) for element in _list(form, "elements", str(form.get("type")))]

    def _content(self, form: Mapping[str, Any]) -> str:
        return self.expression(form.get("content"))

    def _tag(self, form: Mapping[str, Any], begun: int = 0) -> str:
        """A tag whose first `begun` characters have been read."""
        end = form.get("end", "")
        end = end[0] if isinstance(end, Sequence) and not isinstance(end, str) and len(end) == 1 else end
        if not isinstance(end, str):
            raise ConstraintError(KIND, f"a tag's end is {end!r}; expected one string")
        content = form.get("content", {})
        begin = self._string(_field(form, "begin")[begun:])
        if isinstance(content, Mapping) and content.get("type") == "any_text" and self._plain([end]):
            first, *rest = self._vocabulary.split(end)
            inside = self._text_until(content.get("excludes", ()), first)
            return self._rule(f"{begin} {inside} {self._string(''.join(rest))}")
        return self._rule(f"{begin} {self.expression(content)} {self._string(end)}")

    def _separated(self, form: Mapping[str, Any]) -> str:
        tags = "(" + " | ".join(self._tag(tag) for tag in _tags(form)) + ")"
        rest = "" if form.get("stop_after_first") else f" ({self._string(_field(form, 'separator'))} {tags})*"
        return tags + rest if form.get("at_least_one") else f"({tags}{rest})?"

    # Free text with tags in it.

    def _triggered(self, form: Mapping[str, Any]) -> str:
        triggers, tags = _triggers_and_tags(form)
        by_trigger: dict[str, list[Mapping[str, Any]]] = {}
        for tag in tags:
            begin = tag["begin"]
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise ConstraintError(KIND, f"no trigger begins {begin!r}; triggers are {', '.join(triggers)}")
            by_trigger.setdefault(trigger, []).append(tag)
        if form.get("at_least_one"):
            first = "(" + " | ".join(self._tag(tag) for tag in tags) + ")"
            return first if form.get("stop_after_first") else f"{first} {self._dispatch(by_trigger)}"
        return self._dispatch(by_trigger, once=bool(form.get("stop_after_first")))

    def _dispatch(self, tags: Mapping[str, list[Mapping[str, Any]]], *, once: bool = False) -> str:
        """Free text and tags in any order; a trigger must go on as one of its tags."""
        plain = [trigger for trigger in tags if self._vocabulary.split(trigger)[0] not in self._vocabulary.control]
        text = self._terminal(_without(plain))
        tagged = self._rule(" | ".join(self._begun(trigger, plain, items) for trigger, items in tags.items()))
        special = self._rule(self._free_special(set(tags) - set(plain)))
        if once:
            return self._rule(f"{text}? ({special} {text}?)* {tagged} | {text}? ({special} {text}?)*")
        return self._rule(f"{text}? (({special} | {tagged}) {text}?)*")

    def _begun(self, trigger: str, plain: list[str], tags: list[Mapping[str, Any]]) -> str:
        if trigger not in plain:
            return " | ".join(self._tag(tag) for tag in tags)
        lead = self._terminal(f"/(?s:.*)/ {grammars.literal(trigger)}", lazy=True)
        return f"{lead} (" + " | ".join(self._tag(tag, len(trigger)) for tag in tags) + ")"

    def _free_special(self, triggers: set[str]) -> str:
        """A marker of XTML outside of tags; one that begins a trigger must go on with other text."""
        follow: dict[str, list[str]] = {}
        for trigger in triggers:
            head, *rest = self._vocabulary.split(trigger)
            follow.setdefault(head, []).append(rest[0] if rest and rest[0] not in self._vocabulary.control else "")
        markers = (control_tokens.OPEN, control_tokens.CLOSE, control_tokens.SEP)
        options = [self._vocabulary.special(name) for name in markers if name not in follow]
        for head, texts in follow.items():
            if all(texts):
                begins = "|".join(re.escape(text) for text in texts)
                other = self._terminal(f"{ANYTHING} & ~/(?s:({_pattern(begins)}).*)/")
                options.append(f"{self._vocabulary.special(head)} {other}")
        return " | ".join(options)


def _without(strings: Sequence[str]) -> str:
    """A terminal: non-empty text in which none of the strings occurs."""
    if not strings:
        return ANYTHING
    return f"{ANYTHING} & ~/(?s:.*({_pattern('|'.join(map(re.escape, strings)))}).*)/"


def _pattern(text: str) -> str:
    """A regular expression between slashes."""
    return text.replace("/", r"\/").replace("\n", r"\n")


def _field(form: object, name: str) -> str:
    if not isinstance(form, Mapping) or not isinstance(form.get(name), str):
        found = form.get(name) if isinstance(form, Mapping) else form
        raise ConstraintError(KIND, f"{name!r} is {found!r}; expected text")
    return form[name]


def _list(form: Mapping[str, Any], name: str, place: str) -> Sequence[Any]:
    value = form.get(name)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConstraintError(KIND, f"{name!r} of {place} is {value!r}; expected a list with something in it")
    return value
