"""`python -m serving.chat`: talk to a running service on a terminal."""

import contextlib
import dataclasses
import io
import json
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from k3jax import program

DIM, PLAIN, CLEAR_LINE = "\x1b[2m", "\x1b[0m", "\r\x1b[K"
HELP = """\
/stats          figures of the last answer and of the engine
/think          show the reasoning of the last answer
/new            forget the conversation
/system TEXT    start anew with a system message
/effort LEVEL   low, high, max, or none for no reasoning
/save FILE      write the conversation as JSON
/quit           leave (also Ctrl-D); Ctrl-C stops an answer"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A chat with a service started by `python -m serving`. Reasoning is folded into one line.

    With a terminal it asks for one message after another; otherwise each line of standard input is one.

    Examples:
      python -m serving.chat
      python -m serving.chat --address 127.0.0.1:50051 --effort low --max-tokens 400
      python -m serving.chat --prompt "Write a function that adds two numbers." --effort none
    """

    address: str = "127.0.0.1:50051"
    """host:port of the service."""
    prompt: str | None = None
    """Ask this and leave."""
    system: str | None = None
    """System message."""
    effort: Literal["low", "high", "max", "none"] = "max"
    """How much to think; none: answer at once."""
    max_tokens: int | None = None
    """Longest answer, reasoning included. Default: what the context has room for."""
    temperature: float | None = None
    """Default: the service's."""
    seed: int | None = None
    show_thinking: bool = False
    """Stream the reasoning too."""
    token: str | None = None
    """Bearer token."""
    ca: Path | None = None
    """PEM of the authority that signed the service's certificate; turns TLS on."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; the exit code."""
    options = program.parse(Options, "serving.chat", arguments)
    return program.run(lambda: _talk(options))


def _talk(options: Options) -> int:
    from serving.client import Client

    with Client(options.address, token=options.token, ca=options.ca) as client:
        chat = Chat(client, options, Screen(sys.stdout, live=sys.stdout.isatty()))
        chat.greet()
        if options.prompt is not None:
            return chat.ask(options.prompt)
        if not sys.stdin.isatty():
            return max([chat.hear(line.rstrip("\n")) or 0 for line in sys.stdin if line.strip()], default=0)
        return _ask_for_lines(chat)


def _ask_for_lines(chat: "Chat") -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing and history
    while True:
        try:
            line = input("\x1b[1m> \x1b[0m").strip()
        except EOFError:
            print()
            return 0
        if line and chat.hear(line) is None:
            return 0


def shown(text: str) -> str:
    """Text from a model, safe for a terminal: control characters other than line ends and tabs become symbols."""
    return "".join(c if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f") else "\ufffd" for c in text)


class Screen:
    """Where an answer appears. Reasoning is one line that counts; on a file only the answer is written."""

    def __init__(self, out: io.TextIOBase, *, live: bool, show_thinking: bool = False) -> None:
        """`live`: `out` is a terminal, where lines can be rewritten and dimmed."""
        self._out, self._live, self.show_thinking = out, live, show_thinking
        self._thoughts = 0
        self._since = 0.0
        self._said: str | None = None
        """Kind of what was written last."""

    def begin(self) -> None:
        """A new answer."""
        self._thoughts, self._since, self._said = 0, time.monotonic(), None

    def take(self, delta: Any) -> None:
        """Shows a `serving.client.Delta`."""
        if delta.kind == "reasoning":
            self._think(shown(delta.text))
        elif delta.kind == "content":
            self._enter("content")
            self._write(shown(delta.text))
        elif delta.kind == "tool_call":
            self._enter(f"call {delta.index}")
            self._write(f"[call] {shown(delta.call_name)} " if delta.call_name else "")
            self._write(shown(delta.text))

    def end(self) -> None:
        """The answer is over."""
        self._fold()
        if self._said is not None:
            self._write("\n")

    def note(self, text: str) -> None:
        """A remark that is no part of the conversation."""
        self._write(f"{DIM}{text}{PLAIN}\n" if self._live else f"{text}\n")

    def _think(self, text: str) -> None:
        self._thoughts += len(text)
        if self.show_thinking:
            self._enter("reasoning")
            self._write(f"{DIM}{text}{PLAIN}" if self._live else text)
        elif self._live:
            self._write(f"{CLEAR_LINE}{DIM}thinking ... {self._thoughts} characters{PLAIN}")

    def _enter(self, kind: str) -> None:
        if kind != self._said:
            self._fold()
            if self._said is not None:
                self._write("\n")
            self._said = kind

    def _fold(self) -> None:
        """Replaces the line that counts by what it came to."""
        if self._thoughts and self._live and not self.show_thinking:
            seconds = time.monotonic() - self._since
            self._write(f"{CLEAR_LINE}{DIM}thought for {seconds:.1f} s ({self._thoughts} characters; /think){PLAIN}\n")
        self._thoughts = 0

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class Chat:
    """One conversation. Its prefix stays in the service's cache between the turns."""

    def __init__(self, client: Any, options: Options, screen: Screen) -> None:
        """`client`: a `serving.Client`."""
        self._client, self._options, self._screen = client, options, screen
        screen.show_thinking = options.show_thinking
        self._effort: str = options.effort
        self._system = options.system
        self._session = f"chat-{uuid.uuid4().hex[:12]}"
        self._last: Any = None
        self.messages: list[dict[str, Any]] = []
        self._start_anew()
        self._commands: Mapping[str, Callable[[str], None]] = {
            "help": lambda rest: screen.note(HELP),
            "stats": lambda rest: self._stats(),
            "think": lambda rest: self._think(),
            "new": lambda rest: self._start_anew(),
            "system": self._set_system,
            "effort": self._set_effort,
            "save": self._save,
        }

    def greet(self) -> None:
        """Says who is there. Raises `RuntimeError` naming the address when nobody is."""
        from serving.client import ServiceError

        try:
            model = self._client.model()
        except ServiceError as error:
            raise RuntimeError(
                f"no service at {self._options.address} ({error}); start one: python -m serving"
            ) from error
        if not model.has_tokenizer:
            raise RuntimeError(f"{model.name} has no tokenizer, so it serves token ids only; a chat needs text")
        if self._options.prompt is None and sys.stdin.isatty():
            self._screen.note(f"{model.name}, {model.max_length} tokens; /help")

    def hear(self, line: str) -> int | None:
        """Does what a line says; the exit code so far, or None for /quit."""
        if not line.startswith("/"):
            return self.ask(line)
        name, _, rest = line[1:].partition(" ")
        if name in ("quit", "exit"):
            return None
        command = self._commands.get(name)
        if command is None:
            self._screen.note(f"/{name} is no command; /help lists them")
            return program.USAGE
        command(rest.strip())
        return 0

    def ask(self, text: str) -> int:
        """Asks and shows the answer; an error or Ctrl-C leaves the conversation as it was before."""
        from serving.client import ServiceError

        self.messages.append({"role": "user", "content": text})
        self._screen.begin()
        stream = self._client.chat(self.messages, **self._settings())
        try:
            for delta in stream:
                self._screen.take(delta)
            self._last = stream.result
        except KeyboardInterrupt:
            stream.cancel()
            return self._give_up("stopped")
        except ServiceError as error:
            return self._give_up(f"error: {error}")
        self._screen.end()
        self.messages.append(_message(self._last))
        if self._last.finish_reason == "length":
            self._screen.note("(cut off: the longest answer is reached)")
        return 0

    def _give_up(self, why: str) -> int:
        self._screen.end()
        self.messages.pop()
        self._screen.note(why)
        return program.FAILURE

    def _settings(self) -> dict[str, Any]:
        options = self._options
        settings = {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": options.seed}
        thinking = {"thinking": False} if self._effort == "none" else {"effort": self._effort}
        return {"session": self._session, **settings, **thinking}

    def _start_anew(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self._start_anew()

    def _set_effort(self, level: str) -> None:
        if level not in ("low", "high", "max", "none"):
            self._screen.note(f"effort is {level!r}, expected low, high, max or none")
            return
        self._effort = level

    def _think(self) -> None:
        self._screen.note(shown(self._last.reasoning) if self._last and self._last.reasoning else "(no reasoning)")

    def _save(self, path: str) -> None:
        try:
            Path(path).write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            self._screen.note(f"cannot write {path!r}: {error.strerror}")

    def _stats(self) -> None:
        if self._last is not None:
            figures = {**self._last.usage, **self._last.statistics, "finish": self._last.finish_reason}
            self._screen.note("last answer: " + _listed(figures.items()))
            seconds = self._last.statistics["total_seconds"] - self._last.statistics["first_token_seconds"]
            if seconds > 0:
                self._screen.note(f"{(self._last.usage['completion_tokens'] - 1) / seconds:.1f} tokens a second")
        self._screen.note("engine: " + _listed(sorted(self._client.stats().items())))


def _listed(figures: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(
        f"{name} {f'{value:.4g}' if isinstance(value, float) else value}" for name, value in figures if value
    )


def _message(result: Any) -> dict[str, Any]:
    """An answer as the next turn repeats it."""
    calls = [
        {"id": f"call_{at}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for at, call in enumerate(result.tool_calls)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": result.text}
    return message | {"reasoning_content": result.reasoning} | ({"tool_calls": calls} if calls else {})


if __name__ == "__main__":
    sys.exit(main())
