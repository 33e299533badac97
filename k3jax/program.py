"""What all programs share: arguments by tyro, errors in one line, exit codes."""

import contextlib
import inspect
import io
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import UnionType

FAILURE, USAGE, INTERRUPTED = 1, 2, 130
"""Exit codes: something went wrong; the command line or the input is wrong; Ctrl-C."""


class UsageError(ValueError):
    """A command line or an input that cannot be used."""


def parse[Options](
    options: type[Options] | UnionType, program: str, arguments: Sequence[str] | None = None, description: str = ""
) -> Options:
    """The command line as a dataclass, or as one of a union; a wrong one ends in one line on stderr and exit code 2.

    `description` heads the help of a union; a dataclass has its docstring.
    """
    import tyro  # takes a third of a second

    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            markers = (tyro.conf.PositionalRequiredArgs, tyro.conf.FlagCreatePairsOff)
            # tyro would cut the examples off the docstring.
            text = description or inspect.getdoc(options)
            return tyro.cli(options, prog=f"python -m {program}", args=arguments, description=text, config=markers)
    except SystemExit as stop:
        if stop.code == USAGE:
            print(f"error: {_first_part(box.getvalue())}; see python -m {program} --help", file=sys.stderr)
        raise


def require_path(path: Path, what: str) -> None:
    """Raises `UsageError` unless there is something at `path`."""
    if not path.exists():
        raise UsageError(f"{what} {path} does not exist; give the path of one")


def _first_part(box: str) -> str:
    """The text of tyro's error box between its title and its first rule; some terminals get it in ASCII."""
    lines = [line.strip("│╭╮╰╯ \n") for line in box.splitlines()[1:]]
    body = itertools.dropwhile(_is_rule, lines)
    return " ".join(line for line in itertools.takewhile(lambda line: not _is_rule(line), body) if line).rstrip(".")


def _is_rule(line: str) -> bool:
    return len(line) > 2 and set(line) <= {"─", "-"}


class Waiting:
    """A word on a terminal while nothing else can be shown."""

    def __init__(self, what: str) -> None:
        self._width = len(what) + 4 if sys.stderr.isatty() else 0
        if self._width:
            print(f"{what} ...", end="\r", file=sys.stderr, flush=True)

    def done(self) -> None:
        """Wipes the word."""
        if self._width:
            print(" " * self._width, end="\r", file=sys.stderr, flush=True)
            self._width = 0


@contextlib.contextmanager
def status(what: str) -> Iterator[Waiting]:
    """Shows `what` on standard error while the block runs, if that is a terminal."""
    waiting = Waiting(what)
    try:
        yield waiting
    finally:
        waiting.done()


def run(main: Callable[[], int]) -> int:
    """The exit code of `main`; its known errors become one line on stderr.

    ValueErrors that say the input is wrong (`UsageError`, prompts, sampling settings) give 2, other errors 1. A reader
    that goes away ends the program quietly.
    """
    try:
        code = main()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\ninterrupted" if sys.stdout.isatty() else "interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python would complain once more while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except (ValueError, OSError, RuntimeError, NotImplementedError, ExceptionGroup) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return USAGE if _is_usage(error) else FAILURE


def one_line(error: BaseException) -> str:
    """Everything an error says, on one line; the parts of a group follow its title."""
    parts = [str(error), *(map(one_line, error.exceptions) if isinstance(error, ExceptionGroup) else ())]
    return "; ".join(" ".join(part.split()) for part in parts) or type(error).__name__


def _is_usage(error: BaseException) -> bool:
    from k3jax.generation.prompt import LengthError, PromptError
    from k3jax.sampling import SamplingError
    from k3jax.sharding import ShardingError
    from k3jax.speculation.widths import WidthsError

    known = UsageError | PromptError | LengthError | SamplingError | ShardingError | WidthsError
    return isinstance(error, known)
