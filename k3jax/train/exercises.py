"""Small programming exercises in the form of documented functions, so that simple requests get short answers.

Documented functions of packages are rarely as small as what people ask for first. Each line of `exercises.txt`
is an exercise with free names; the choice of names makes more than a thousand different functions.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from k3jax.train.instructions import Documented

_NAMES = {
    "n": ("n", "x", "number", "value", "num"),
    "a": ("a", "x", "first", "left"),
    "b": ("b", "y", "second", "right"),
    "c": ("c", "z", "third", "other"),
    "items": ("items", "values", "numbers", "data", "sequence"),
    "text": ("text", "string", "s", "line"),
    "path": ("path", "filename", "file"),
    "table": ("mapping", "table", "d", "counts"),
    "words": ("words", "lines", "names", "strings"),
    "k": ("2", "3", "4", "5", "7", "10", "12", "100"),
}
"""Words that stand for each placeholder."""

_EXERCISES = Path(__file__).with_name("exercises.txt").read_text(encoding="utf-8").splitlines()
"""Lines `task | function names | arguments | body`, whose rows are separated by semicolons."""


def exercises(count: int, seed: int) -> Iterator[Documented]:
    """`count` exercises with random names, the same for the same seed."""
    chooser = random.Random(seed)
    for _ in range(count):
        yield _exercise(chooser.choice(_EXERCISES), chooser)


def _exercise(line: str, chooser: random.Random) -> Documented:
    task, names, arguments, body = (part.strip() for part in line.split(" | "))
    words: dict[str, str] = {}
    for key, choices in _NAMES.items():  # two placeholders never share a word
        words[key] = chooser.choice([word for word in choices if word not in words.values()])
    taken = tuple(words[key.strip()] for key in arguments.split(","))
    name = chooser.choice(names.split(", "))
    rows = [f"    {row}" for row in body.format(**words).split(";")]
    code = "\n".join((f"def {name}({', '.join(taken)}):", *rows)) + "\n"
    return Documented(name, taken, task.format(**words), "", code)
