"""The training loop: phases one after the other, each with its own data and cosine schedule, resumable."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.config import K3Config
from k3jax.train.data import Batches
from k3jax.train.evaluate import Evaluate, evaluate_batches
from k3jax.train.forward import Batch
from k3jax.train.optimizer import learning_rate
from k3jax.train.report import Journal
from k3jax.train.step import AXIS, Controls, Metrics, Step, TrainState

PROGRESS = "progress.json"
TIMED_STEPS = (4, 12)
"""Steps between which the time of a step is measured when a phase is given in seconds."""

RETIMED = 100
"""Steps between which it is checked that `steps` still fit in `seconds`."""

Save = Callable[[Path, dict[str, Any]], None]
Load = Callable[[Path, dict[str, Any]], dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of training: `steps`, or as many as fit in `seconds`; with both, whichever ends first."""

    name: Literal["pretrain", "chat"]
    batches: Batches
    peak: float
    """Largest learning rate."""
    steps: int | None = None
    seconds: float | None = None
    balanced: bool = True

    def __post_init__(self) -> None:
        if self.steps is None and self.seconds is None:
            raise ValueError(f"phase {self.name}: steps and seconds are None; give one of them or both")

    @property
    def bounded_twice(self) -> bool:
        """Whether both `steps` and `seconds` end the phase."""
        return self.steps is not None and self.seconds is not None


@dataclasses.dataclass(slots=True)
class Progress:
    """Where a run is; stored beside every saved state."""

    phase: int = 0
    step: int = 0
    """Steps done in the phase."""
    total: int | None = None
    """Steps of the phase, once known."""
    tokens: int = 0
    """Tokens seen in the whole run."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Run:
    """A run in memory: what to train, where it stands, where it reports."""

    config: K3Config
    mesh: Mesh
    step: Step
    state: TrainState
    phases: Sequence[Phase]
    journal: Journal
    directory: Path
    save: Save
    save_seconds: float = 600.0
    log_every: int = 10
    evaluate: Evaluate | None = None
    validation: Sequence[Batch] = ()
    validate_every: int = 200
    phase_end: Callable[[str], None] = lambda name: None
    """Called with the name of every phase that is through."""
    progress: Progress = dataclasses.field(default_factory=Progress)

    def train(self, stop_after: int | None = None) -> TrainState:
        """Trains the phases that are left and saves at the end, or stops after `stop_after` more steps."""
        left = stop_after
        while self.progress.phase < len(self.phases):
            phase = self.phases[self.progress.phase]
            done = self._run_phase(phase, left)
            if left is not None and (left := left - done) <= 0:
                break
            self.phase_end(phase.name)
            self.progress = Progress(phase=self.progress.phase + 1, tokens=self.progress.tokens)
        self.checkpoint()
        return self.state

    def _run_phase(self, phase: Phase, limit: int | None) -> int:
        begin = saved = time.monotonic()
        done, started = 0, (self.progress.step, begin)
        if self.progress.total is None:
            self.progress.total = phase.steps
        while self.progress.step < (self.progress.total or 10**9) and done != limit:
            step = self.progress.step
            rate = learning_rate(step, self.progress.total or 1000, phase.peak)
            metrics = self.advance(phase, rate)
            done += 1
            if step == TIMED_STEPS[0]:
                jax.block_until_ready(metrics)
                started = (self.progress.step, time.monotonic())
            first = step == TIMED_STEPS[1] and self.progress.total is None
            if first or (phase.bounded_twice and step % RETIMED == RETIMED // 2):
                jax.block_until_ready(metrics)
                self._set_total(phase, started, begin)
            if step % self.log_every == 0:
                self._log(phase, metrics, rate, started)
            if self.validation and self.evaluate and (step + 1) % self.validate_every == 0:
                self.validate(phase.name)
            if time.monotonic() - saved > self.save_seconds:
                self.checkpoint()
                saved = time.monotonic()
        return done

    def _set_total(self, phase: Phase, started: tuple[int, float], begin: float) -> None:
        assert phase.seconds is not None
        per_step = (time.monotonic() - started[1]) / (self.progress.step - started[0])
        remaining = phase.seconds - (time.monotonic() - begin)
        fitting = self.progress.step + int(remaining / per_step)
        self.progress.total = max(self.progress.step, min(fitting, phase.steps or fitting))

    def advance(self, phase: Phase, rate: float) -> Metrics:
        """One step of `phase`; the result may still be computing."""
        batch = place(phase.batches(self.progress.step), self.mesh)
        controls = Controls(np.float32(rate), np.bool_(phase.balanced))
        self.state, metrics = self.step(self.state, batch, place_whole(controls, self.mesh))
        self.progress.step += 1
        self.progress.tokens += batch.weight.size
        return metrics

    def _log(self, phase: Phase, metrics: Metrics, rate: float, started: tuple[int, float]) -> None:
        values = jax.device_get(metrics)
        steps, seconds = self.progress.step - started[0], time.monotonic() - started[1]
        tokens = self.progress.tokens / max(1, self.progress.step)
        self.journal.write(
            "step",
            phase=phase.name,
            step=self.progress.step - 1,
            total=self.progress.total,
            tokens=self.progress.tokens,
            loss=round(float(values.loss), 5),
            gradient_norm=round(float(values.gradient_norm), 4),
            imbalance=round(float(values.imbalance.mean()), 4),
            imbalance_worst=round(float(values.imbalance.max()), 4),
            learning_rate=rate,
            tokens_per_second=round(steps * tokens / seconds) if steps > 0 and seconds > 0 else 0,
        )

    def validate(self, phase: str) -> None:
        """Logs the loss on the validation batches of the run."""
        assert self.evaluate is not None
        result = evaluate_batches(self.evaluate, self.state.masters, [place(b, self.mesh) for b in self.validation])
        self.journal.write(
            "validation", phase=phase, step=self.progress.step, tokens=self.progress.tokens, loss=result.loss
        )

    def checkpoint(self) -> None:
        """Saves state and progress; an older state is kept until the new one is complete."""
        name = f"state-{self.progress.phase}-{self.progress.step}"
        if not (self.directory / name).exists():
            self.save(self.directory / name, state_tree(self.state))
        record = dataclasses.asdict(self.progress) | {"state": name}
        (self.directory / PROGRESS).write_text(json.dumps(record) + "\n", encoding="utf-8")

    def resume(self, load: Load) -> bool:
        """Continues from the directory's last checkpoint, if it has one."""
        path = self.directory / PROGRESS
        if not path.is_file():
            return False
        record = json.loads(path.read_text(encoding="utf-8"))
        name = record.pop("state")
        self.state = restore(load, self.directory / name, self.state)
        self.progress = Progress(**record)
        return True


def state_tree(state: tuple[Any, ...]) -> dict[str, jax.Array]:
    """The leaves of a state in a flat dict whose sorted keys keep their order."""
    return {f"{i:05d}": leaf for i, leaf in enumerate(jax.tree.leaves(state))}


def restore[State: tuple[Any, ...]](load: Load, path: Path, like: State) -> State:
    """The state whose `state_tree` was saved at `path`, placed like the one of the same structure."""
    tree = state_tree(like)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    restored = load(path, abstract)
    return jax.tree.unflatten(jax.tree.structure(like), [restored[key] for key in sorted(restored)])


def place(batch: Batch, mesh: Mesh) -> Batch:
    """A NumPy batch with its rows split over the mesh."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    return Batch(*(jax.device_put(jnp.asarray(array), sharding) for array in batch))


def place_whole(values: Any, mesh: Mesh) -> Any:
    """Values copied to every device."""
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec()))
