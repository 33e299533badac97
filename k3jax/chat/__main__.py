"""Shows what a conversation is to the model, and what an output is to its readers.

For render and count PATH is JSON: a list of messages, or the body of a
chat-completions request (messages, tools, tool_choice, response_format,
thinking_effort, ...). Its sampling and transport fields are ignored; an unknown
field is an error. For parse PATH is a model's output. `-` reads standard input.

Examples:
    python -m k3jax.chat render request.json
    python -m k3jax.chat render request.json --format ids --tokenizer path/to/Kimi-K3
    python -m k3jax.chat count request.json --tokenizer path/to/Kimi-K3
    python -m k3jax.chat parse output.txt --stream
    echo '[{"role": "user", "content": "Hi"}]' | python -m k3jax.chat render - --format segments

Exit codes: 0 done, 1 the input cannot be used, 2 wrong usage.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from k3jax import chat, parse, tokenizer
from k3jax.chat import request as chat_request
from k3jax.chat import segments as chat_segments
from k3jax.chat.segments import Segment
from k3jax.tokenizer import Tokenizer

Effort = Literal["file", "low", "high", "max", "none"]

_CONTROL_STYLE, _TEXT_STYLES = "1;35", ("36", "33")  # bold magenta; cyan and yellow
# A prompt may not steer the terminal: its control characters, but for line breaks, become Unicode's pictures of them.
_SYMBOLS = {code: 0x2400 + code for code in range(0x20) if chr(code) != "\n"} | {0x7F: 0x2421}


class UsageError(ValueError):
    """Arguments that cannot be meant."""


@dataclasses.dataclass(frozen=True)
class Render:
    """Print the prompt of a conversation.

    Example: python -m k3jax.chat render request.json --format ids --tokenizer path/to/Kimi-K3
    """

    file: Path
    """JSON file of the conversation; - for standard input."""
    format: Literal["text", "ids", "segments"] = "text"
    """Text to read, token ids as JSON, or segments (in colour, else one JSON pair [text, is control] a line)."""
    tokenizer: Path | None = None
    """Directory or file of the vocabulary; needed for ids."""
    thinking_effort: Effort = "file"
    """The effort to ask for: the file's (max if it names none), or this one; none for no effort message."""
    no_thinking: bool = False
    """Render without the think channel and the effort message, whatever the file says."""
    color: Literal["auto", "always", "never"] = "auto"
    """When to colour segments; auto: on a terminal. Control characters in colour are shown as symbols."""


@dataclasses.dataclass(frozen=True)
class Count:
    """Count the prompt's tokens.

    Example: python -m k3jax.chat count request.json --tokenizer path/to/Kimi-K3
    """

    file: Path
    """JSON file of the conversation; - for standard input."""
    tokenizer: Path | None = None
    """Directory or file of the vocabulary; needed."""
    thinking_effort: Effort = "file"
    """The effort to ask for: the file's (max if it names none), or this one; none for no effort message."""
    no_thinking: bool = False
    """Render without the think channel and the effort message, whatever the file says."""


@dataclasses.dataclass(frozen=True)
class Parse:
    """Print the message in a model's output: a JSON list of ids, or text.

    Example: python -m k3jax.chat parse output.json --tokenizer path/to/Kimi-K3 --prefilled response
    """

    file: Path
    """File of the output; - for standard input."""
    tokenizer: Path | None = None
    """Directory or file of the vocabulary; needed for ids."""
    prefilled: Literal["think", "response", "message", "none"] = "think"
    """The channel that the prompt left open."""
    stream: bool = False
    """Print each delta, a token (of text: a character) at a time, one JSON object a line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    import tyro

    command = tyro.cli(
        Render | Parse | Count,
        prog="python -m k3jax.chat",
        description=__doc__,
        args=arguments,
        config=(tyro.conf.PositionalRequiredArgs, tyro.conf.FlagCreatePairsOff),
    )
    run: Any = {Render: _render, Parse: _parse, Count: _count}[type(command)]
    try:
        run(command)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough (`| head`); nothing may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UsageError as error:
        return _fail(error, 2)
    except (ValueError, OSError) as error:
        return _fail(error, 1)
    return 0


def _fail(error: Exception, code: int) -> int:
    print("error: " + " ".join(str(error).split()), file=sys.stderr)
    return code


def _render(command: Render) -> None:
    if command.format == "ids":
        print(json.dumps(chat_segments.encode(_vocabulary(command.tokenizer, "--format ids"), _segments(command))))
    elif command.format == "text":
        print(chat_segments.to_text(_segments(command)))
    else:
        _print_segments(_segments(command), command.color)


def _count(command: Count) -> None:
    vocabulary = _vocabulary(command.tokenizer, "count")
    segments = _segments(command)
    ids = chat_segments.encode(vocabulary, segments)
    control = sum(map(vocabulary.is_control, ids))
    counts = {"tokens": len(ids), "control": control, "ordinary": len(ids) - control, "segments": len(segments)}
    print(json.dumps(counts | {"characters": sum(len(segment.text) for segment in segments)}))


def _parse(command: Parse) -> None:
    text = _read(command.file)
    output = _ids_of(text)
    vocabulary: Tokenizer | None = None
    if output is not None:
        vocabulary = _vocabulary(command.tokenizer, "an output of ids")
    parser = parse.StreamParser(vocabulary, prefilled=None if command.prefilled == "none" else command.prefilled)
    for piece in text if output is None else output:
        _print_deltas(parser.push(piece), command.stream)
    _print_deltas(parser.finish(), command.stream)
    if not command.stream:
        print(json.dumps(dataclasses.asdict(parser.message), ensure_ascii=False, indent=2))


def _vocabulary(path: Path | None, reader: str) -> Tokenizer:
    if path is None:
        raise UsageError(f"{reader} needs --tokenizer, a directory or file of the vocabulary")
    return tokenizer.load(path)


def _print_deltas(deltas: Sequence[parse.Delta], show: bool) -> None:
    for delta in deltas if show else ():
        fields = delta._asdict().items()
        print(json.dumps({key: value for key, value in fields if value not in (None, False)}, ensure_ascii=False))


def _ids_of(text: str) -> list[int] | None:
    """The ids that `text` lists, None when it is an output's text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, list) and value and all(isinstance(id_, int) for id_ in value):
        return value
    return None


def _name(path: Path) -> str:
    return "standard input" if str(path) == "-" else str(path)


def _read(path: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{_name(path)} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}"
        ) from error


def _segments(command: Render | Count) -> list[Segment]:
    request = _request(command.file)
    if command.thinking_effort != "file":
        request["thinking_effort"] = None if command.thinking_effort == "none" else command.thinking_effort
    if command.no_thinking:
        request["thinking"] = False
    return chat.render_segments(**request)


def _request(path: Path) -> dict[str, Any]:
    name, text = _name(path), _read(path)
    try:
        request = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply to be read") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"{name} cannot be read as JSON: {error}") from error
    if isinstance(request, list):
        request = {"messages": request}
    if not isinstance(request, dict):
        raise ValueError(f"{name} holds a {type(request).__name__}; expected a list of messages or a request object")
    return chat_request.render_arguments(request)


def _print_segments(segments: Sequence[Segment], color: str) -> None:
    if color == "never" or (color == "auto" and not sys.stdout.isatty()):
        for segment in segments:
            print(json.dumps([segment.text, segment.special], ensure_ascii=False))
        return
    print("".join(_styled(segments)))


def _styled(segments: Sequence[Segment]) -> Iterator[str]:
    """Control tokens stand out; neighbouring texts alternate, so that their boundary shows."""
    ordinary = 0
    for segment in segments:
        ordinary += not segment.special
        style = _CONTROL_STYLE if segment.special else _TEXT_STYLES[ordinary % 2]
        yield f"\x1b[{style}m{segment.text.translate(_SYMBOLS)}\x1b[0m"


if __name__ == "__main__":
    sys.exit(main())
