"""How many tokens a step of speculative decoding gives on held-out beginnings, for both acceptance rules."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from k3jax.generation.decoding import Decoding, Event, Request
from k3jax.generation.stepping import Emission
from k3jax.runtime import Model
from k3jax.sampling import Sampling
from k3jax.speculation.acceptance import Rule
from k3jax.speculation.drafters import Draft
from k3jax.train.draft_data import Prepared


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """What is written during a measurement."""

    rows: int = 32
    """Beginnings of each task."""
    prompt: int = 64
    """Tokens of a beginning."""
    long_prompt: int = 512
    """Tokens of a beginning with much context."""
    tokens: int = 192
    """Tokens that each row writes; ends of documents do not stop it."""
    temperature: float = 1.0
    seed: int = 0


class Task(NamedTuple):
    """Beginnings, and the ids that end what follows them."""

    prompts: list[list[int]]
    stop_ids: tuple[int, ...] = ()


class Measured(NamedTuple):
    """Of one task."""

    acceptance_length: float
    """Tokens per step and row, the target's own one included, before stops and limits."""
    standard_error: float
    """Of the acceptance length, with whole rows as the independent draws."""
    survival: list[float]
    """Chance that the first, second, ... draft of a step stands."""


class _Counting(Decoding):
    """A decoding that notes how many drafts stood, by step and row; -1 for rows that were done."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stood: list[np.ndarray] = []

    def _deliver(self, emission: Emission) -> Iterator[Event]:
        if emission.accepted is not None:
            running = self._running & (np.asarray(emission.count) > 0)
            self.stood.append(np.where(running, np.asarray(emission.accepted), -1))
        yield from super()._deliver(emission)


def accepted(model: Model, draft: Draft, rule: Rule, tasks: dict[str, Task], protocol: Protocol) -> dict[str, Measured]:
    """All tasks in one batch, so that the programs are compiled once."""
    requests = [Request(p, protocol.tokens, task.stop_ids) for task in tasks.values() for p in task.prompts]
    seeds = [protocol.seed + row for row in range(len(requests))]
    sampling = Sampling.of(len(requests), temperature=protocol.temperature, seed=seeds)
    decoding = _Counting(model, requests, sampling, draft._replace(rule=rule))
    for _ in decoding:
        pass
    stood, row, results = np.stack(decoding.stood), 0, {}
    for name, task in tasks.items():
        results[name] = summarise(stood[:, row : row + len(task.prompts)])
        row += len(task.prompts)
    return results


def summarise(stood: Int[np.ndarray, "steps rows"]) -> Measured:
    """Figures of drafts that stood, by step and row; -1 for steps that a row did not take."""
    taken = stood >= 0
    steps = stood[taken]
    survival = [round(float((steps >= k).mean()), 3) for k in range(1, int(steps.max(initial=0)) + 1)]
    mean, counts = float(steps.mean()), taken.sum(axis=0)
    # A ratio of sums over rows: the spread of each row's total around what its number of steps foretells.
    excess = np.where(taken, stood, 0).sum(axis=0) - mean * counts
    rows = np.count_nonzero(counts)
    spread = float(np.sqrt((excess**2).sum() * rows / max(1, rows - 1)))
    return Measured(round(1 + mean, 3), round(spread / int(counts.sum()), 3), survival)


def measure(model: Model, draft: Draft, prepared: Prepared, protocol: Protocol) -> dict[str, dict[str, Any]]:
    """Figures by rule and task; every beginning comes from held-out files."""
    rules: tuple[Rule, ...] = ("block", "standard")
    given = tasks(prepared, protocol)
    return {
        rule: {name: value._asdict() for name, value in accepted(model, draft, rule, given, protocol).items()}
        for rule in rules
    }


def tasks(prepared: Prepared, protocol: Protocol) -> dict[str, Task]:
    """Files to continue after a short or a long beginning, and chat requests for documented functions.

    A task without held-out files to take it from is left out.
    """
    rng, found = np.random.default_rng(protocol.seed), {}
    kinds = (
        ("python", "python", protocol.prompt),
        ("python, long context", "python", protocol.long_prompt),
        ("prose", "prose", protocol.prompt),
        ("prose, long context", "prose", protocol.long_prompt),
    )
    for name, kind, size in kinds:
        try:
            windows = prepared.windows(rng, protocol.rows, size, split="validation", kind=kind)
        except ValueError:
            continue
        found[name] = Task([window.tolist() for window in windows])
    prompts, stop_ids = prepared.requests(rng, protocol.rows)
    return found | ({"requests": Task(prompts, stop_ids)} if prompts else {})
