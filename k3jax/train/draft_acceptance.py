"""How many tokens a step of speculative decoding gives on held-out beginnings, for both acceptance rules."""

import dataclasses
from typing import NamedTuple

import numpy as np

from k3jax.generation.decoding import Decoding, Request
from k3jax.runtime import Model
from k3jax.sampling import Sampling
from k3jax.speculation.acceptance import Rule
from k3jax.speculation.drafters import Draft
from k3jax.train.draft_data import Kind, Prepared


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """What is written during a measurement."""

    rows: int = 64
    """Beginnings of each kind."""
    prompt: int = 64
    """Tokens of a beginning."""
    tokens: int = 192
    """Tokens that each row writes; ends of documents do not stop it."""
    temperature: float = 1.0
    seed: int = 0


class Task(NamedTuple):
    """Beginnings, and the ids that end what follows them."""

    prompts: list[list[int]]
    stop_ids: tuple[int, ...] = ()


def acceptance_length(model: Model, draft: Draft, rule: Rule, task: Task, protocol: Protocol) -> float:
    """Tokens per step and row, the target's own one included."""
    requests = [Request(prompt, protocol.tokens, task.stop_ids) for prompt in task.prompts]
    seeds = [protocol.seed + row for row in range(len(requests))]
    sampling = Sampling.of(len(requests), temperature=protocol.temperature, seed=seeds)
    decoding = Decoding(model, requests, sampling, draft._replace(rule=rule))
    for _ in decoding:
        pass
    return decoding.statistics.tokens_per_step


def measure(model: Model, draft: Draft, prepared: Prepared, protocol: Protocol) -> dict[str, dict[str, float]]:
    """Acceptance lengths by task and rule; every beginning comes from held-out files.

    "python" and "prose" are windows of files that are continued, "requests" are chat prompts for documented functions.
    """
    rules: tuple[Rule, ...] = ("block", "standard")
    tasks = _tasks(prepared, protocol)
    return {
        name: {rule: round(acceptance_length(model, draft, rule, task, protocol), 3) for rule in rules}
        for name, task in tasks.items()
    }


def _tasks(prepared: Prepared, protocol: Protocol) -> dict[str, Task]:
    rng = np.random.default_rng(protocol.seed)
    kinds: tuple[Kind, ...] = ("python", "prose")
    windows = {
        kind: prepared.windows(rng, protocol.rows, protocol.prompt, split="validation", kind=kind) for kind in kinds
    }
    tasks = {kind: Task([window.tolist() for window in windows[kind]]) for kind in kinds}
    prompts, stop_ids = prepared.requests(rng, protocol.rows)
    return tasks | {"requests": Task(prompts, stop_ids)} if prompts else tasks
