"""What is asked, and when."""

import dataclasses
import random
import string
from collections.abc import Iterator

WORD = 5
"""Letters of a random word; with its blank about two tokens of nano."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One question: as ids for protocols that take them, else as text."""

    ids: list[int]
    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Random prompts of one length that may begin alike."""

    prompt_tokens: int
    """Ids of a prompt; as text it has half as many words."""
    shared_tokens: int = 0
    """Of these, how many are the same in all prompts."""
    output_tokens: int = 64
    vocabulary: int = 256
    """Ids are drawn below this one."""
    seed: int = 0

    def prompts(self, count: int) -> Iterator[Prompt]:
        """`count` prompts, the same for the same seed."""
        common = self._draw(random.Random(f"{self.seed} shared"), self.shared_tokens)
        for number in range(count):
            own = self._draw(random.Random(f"{self.seed} {number}"), self.prompt_tokens - self.shared_tokens)
            yield Prompt(common.ids + own.ids, f"{common.text} {own.text}".strip())

    def _draw(self, rng: random.Random, tokens: int) -> Prompt:
        ids = [rng.randrange(self.vocabulary) for _ in range(tokens)]
        words = ["".join(rng.choices(string.ascii_lowercase, k=WORD)) for _ in range(-(-tokens // 2))]
        return Prompt(ids, " ".join(words))


def arrivals(rate: int | float, count: int, seed: int) -> list[float]:
    """Seconds from the start at which requests come in: a Poisson process of `rate` a second."""
    rng, now, times = random.Random(f"{seed} arrivals"), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times
