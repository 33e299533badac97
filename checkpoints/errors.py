"""The one error of this package."""

from collections.abc import Iterable

SHOWN = 200
"""Problems that the text of an error lists; `problems` always has all of them."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: `problems` names every reason found, not only the first."""

    def __init__(self, title: str, problems: Iterable[str] = ()) -> None:
        self.title = title
        self.problems = tuple(problems)
        super().__init__(title, self.problems)

    def __str__(self) -> str:
        if not self.problems:
            return self.title
        lines = [f"{self.title}: {len(self.problems)} problem(s)", *self.problems[:SHOWN]]
        if (left := len(self.problems) - SHOWN) > 0:
            lines.append(f"and {left} more (`python -m checkpoints check` prints them all)")
        return "\n  - ".join(lines)
