"""What the commands of `python -m k3jax.train` do; storage is passed in, so nothing here reads checkpoints."""

import dataclasses
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import tokenizer
from k3jax.config import K3Config
from k3jax.params import Tree
from k3jax.tokenizer import train as tokenizer_train
from k3jax.train import corpus, data, tokens
from k3jax.train.forward import Batch
from k3jax.train.ngram import NgramModel

TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")
VOCABULARY_BYTES = 60_000_000
"""Training text from which byte pairs are learnt."""


class TrainingError(ValueError):
    """Settings or data that cannot be trained on."""


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What `prepare` makes."""

    out: Path
    vocab_size: int
    tokenizer: Path | None = None
    """Directory with a tokenizer to use instead of learning one."""
    root: Path | None = None
    """Take the Python files below this folder instead of the machine's packages."""
    listed: Path | None = None
    """Take exactly the files of this stored list that are here unchanged."""
    limit: int | None = None
    """Bytes of text to stop at."""
    length: int = 1024
    """Predictions per window of the chat data."""
    conversations: int = 60_000
    """Most conversations about documented functions."""
    workers: int = 1
    seed: int = 0


def prepare(settings: Preparation) -> dict[str, int]:
    """Corpus, tokenizer and packed ids in `settings.out`; returns the sizes. `sizes.json` is written last."""
    out = settings.out
    out.mkdir(parents=True, exist_ok=True)
    (out / tokens.SIZES).unlink(missing_ok=True)
    sources = corpus.collect(settings.limit, settings.root, settings.listed)
    if settings.tokenizer is None:
        text = (source.text for source in _up_to(sources, VOCABULARY_BYTES))
        tokenizer_train.train(text, settings.vocab_size, out)
    else:
        for name in TOKENIZER_FILES:
            shutil.copyfile(settings.tokenizer / name, out / name)
    sizes = tokens.write_corpus(sources, out, out, settings.workers)
    sizes |= tokens.write_chat(
        sources, out, out, settings.workers, length=settings.length, seed=settings.seed, most=settings.conversations
    )
    partial = out / (tokens.SIZES + ".partial")
    partial.write_text(json.dumps(sizes, indent=1) + "\n", encoding="utf-8")
    partial.rename(out / tokens.SIZES)
    return sizes


def _up_to(sources: Sequence[corpus.Source], limit: int) -> list[corpus.Source]:
    """Training files up to `limit` bytes."""
    chosen, used = [], 0
    for source in sources:
        if not source.held_out and used < limit:
            chosen.append(source)
            used += len(source.text)
    return chosen


@dataclasses.dataclass(frozen=True)
class Training:
    """What `pretrain` does."""

    config: K3Config
    data: Path
    out: Path
    steps: int | None
    seconds: float | None
    """With `steps` as well, whichever ends first."""
    chat_steps: int | None = None
    chat_seconds: float | None = None
    rows: int = 64
    length: int = 1024
    peak: float = 4e-3
    chat_peak: float = 1.5e-3
    seed: int = 0
    balanced: bool = True
    remat: bool = True
    micro_batches: int = 1
    dtype: str = "bfloat16"
    wait: float = 0.0
    save_seconds: float = 600.0
    validation_batches: int = 2
    settle_batches: int = 16
    settle_rounds: int = 5


Export = Callable[[Path, K3Config, Tree], None]


def pretrain(
    settings: Training, save: Any, load: Any, export: Export | None, initial: Tree | None = None
) -> dict[str, Any]:
    """Trains, resuming what `settings.out` holds; evaluates on all held-out files, exports and draws the curves.

    A new run starts from the parameters `initial`, a checkpoint's tree, if they are given.
    """
    from k3jax.train import report

    with report.Journal(settings.out / "log.jsonl") as journal:
        run = _create(settings, save, journal)
        if initial is not None:
            run.state = run.state._replace(masters=_masters(settings.config, initial, run.mesh))
        _compile(run, settings, journal)
        data.wait_for(settings.data, settings.wait)
        check_tokenizer(settings)
        run.phases = _phases(settings)
        batches = data.validation_batches(
            settings.data, rows=settings.rows, length=settings.length, pad=settings.config.pad_token_id
        )
        run.validation = batches[: settings.validation_batches]
        run.resume(load)
        summaries: dict[str, Any] = {}

        def phase_end(name: str) -> None:
            summaries[name] = _conclude(settings, run, name, batches, export)

        run.phase_end = phase_end
        run.train()
        return summaries


def _create(settings: Training, save: Any, journal: Any) -> Any:
    from k3jax.train import step
    from k3jax.train.evaluate import make_evaluate
    from k3jax.train.run import Run

    mesh = step.data_mesh()
    if settings.rows % (mesh.size * settings.micro_batches):
        raise TrainingError(
            f"rows is {settings.rows}, expected a multiple of {mesh.size} devices x {settings.micro_batches}"
        )
    dtype = jnp.dtype(settings.dtype)
    directory = settings.out / "states"
    directory.mkdir(parents=True, exist_ok=True)
    journal.write("start", devices=[str(device) for device in mesh.devices.flat], settings=_plain(settings))
    return Run(
        config=settings.config,
        mesh=mesh,
        step=step.make_step(
            settings.config,
            mesh,
            dtype=dtype,
            remat=settings.remat,
            micro_batches=settings.micro_batches,
            muon_dtype=dtype,
        ),
        state=step.create_state(settings.config, settings.seed, mesh),
        phases=(),
        journal=journal,
        directory=directory,
        save=save,
        save_seconds=settings.save_seconds,
        evaluate=make_evaluate(settings.config, mesh, dtype=dtype),
    )


def _masters(config: K3Config, packed: Tree, mesh: Any) -> Tree:
    """A checkpoint's values as float32 parameters on every device."""
    from k3jax.train import specs
    from k3jax.train.run import place_whole

    return place_whole(jax.jit(partial(specs.master_parameters, config))(packed), mesh)


def _compile(run: Any, settings: Training, journal: Any) -> None:
    """Runs the programs once on a copy of the state, so that a phase's clock measures training alone."""
    from k3jax.train import step
    from k3jax.train.run import place, place_whole

    begin = time.monotonic()
    ids = np.zeros((settings.rows, settings.length + 1), np.int32)
    batch = place(Batch(ids, np.ones((settings.rows, settings.length), np.float32)), run.mesh)
    assert run.evaluate is not None
    jax.block_until_ready(run.evaluate(run.state.masters, batch))
    journal.write("compiled", program="evaluate", took=round(time.monotonic() - begin, 1))
    begin = time.monotonic()
    controls = place_whole(step.Controls(np.float32(0), np.bool_(True)), run.mesh)
    copy = jax.tree.map(lambda leaf: leaf + 0, run.state)
    jax.block_until_ready(run.step(copy, batch, controls))
    journal.write("compiled", program="step", took=round(time.monotonic() - begin, 1))


def _phases(settings: Training) -> list[Any]:
    from k3jax.train.data import ChatBatches, TextBatches
    from k3jax.train.run import Phase

    shape = {"rows": settings.rows, "length": settings.length, "seed": settings.seed}
    phases = []
    if settings.steps != 0:
        phases.append(
            Phase(
                name="pretrain",
                batches=TextBatches(settings.data, **shape),
                peak=settings.peak,
                steps=settings.steps,
                seconds=settings.seconds,
                balanced=settings.balanced,
            )
        )
    if settings.chat_steps or settings.chat_seconds:
        phases.append(
            Phase(
                name="chat",
                batches=ChatBatches(settings.data, **shape),
                peak=settings.chat_peak,
                steps=settings.chat_steps,
                seconds=settings.chat_seconds,
                balanced=settings.balanced,
            )
        )
    return phases


def _conclude(settings: Training, run: Any, phase: str, batches: list[Any], export: Export | None) -> dict[str, Any]:
    """Exports and evaluates at the end of a phase, and draws the curves so far."""
    from k3jax.train import report
    from k3jax.train.evaluate import evaluate_batches
    from k3jax.train.run import place

    if settings.balanced:
        run.state = run.state._replace(masters=settled(settings, run.evaluate, run.mesh, run.state.masters))
    if export is not None:
        export_directory(settings.out / "checkpoint", settings, run.state.masters, export)
    result = evaluate_batches(run.evaluate, run.state.masters, (place(batch, run.mesh) for batch in batches))
    sizes = json.loads((settings.data / tokens.SIZES).read_text(encoding="utf-8"))
    summary = {
        "phase": phase,
        **_held_out(result, sizes),
        "tokens": run.progress.tokens,
        "balanced": settings.balanced,
        **sizes,
    }
    run.journal.write("summary", **summary)
    (settings.out / f"summary-{phase}.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    records = report.read(settings.out / "log.jsonl")
    (settings.out / "curves.json").write_text(json.dumps(report.curves(records)) + "\n", encoding="utf-8")
    report.draw({settings.out.name: records}, settings.out / "curves.png")
    return summary


def _held_out(result: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """Figures of an evaluation on all held-out files."""
    return {
        "validation_bits_per_byte": result.bits_per_byte(sizes["validation_bytes"]),
        "validation_nats_per_token": result.loss,
        "validation_load_max_over_mean": [round(float(value), 4) for value in result.imbalance],
    }


def settled(settings: Training, evaluate: Any, mesh: Any, masters: Tree) -> Tree:
    """The parameters with biases from pooled training text."""
    from k3jax.train.run import place
    from k3jax.train.settle import settle

    # An order of its own, so that the pool is a fresh sample of the text.
    text = data.TextBatches(settings.data, rows=settings.rows, length=settings.length, seed=settings.seed + 2)
    pool = [place(text(i), mesh) for i in range(settings.settle_batches)]
    return settle(settings.config, evaluate, masters, pool, rounds=settings.settle_rounds)


def settle_checkpoint(settings: Training, packed: Tree, export: Export) -> dict[str, Any]:
    """Settles the biases of a checkpoint's tree, evaluates before and after, and exports to `settings.out`."""
    from k3jax.train import step
    from k3jax.train.evaluate import evaluate_batches, make_evaluate
    from k3jax.train.run import place

    mesh = step.data_mesh()
    masters = _masters(settings.config, packed, mesh)
    evaluate = make_evaluate(settings.config, mesh, dtype=jnp.dtype(settings.dtype))
    shape = {"rows": settings.rows, "length": settings.length}
    ids = np.full((settings.rows, settings.length + 1), settings.config.pad_token_id, np.int32)
    padding = Batch(ids, np.zeros((settings.rows, settings.length), np.float32))
    jax.block_until_ready(evaluate(masters, place(padding, mesh)))  # compiles while the data is prepared
    data.wait_for(settings.data, settings.wait)
    batches = data.validation_batches(settings.data, **shape, pad=settings.config.pad_token_id)
    sizes = json.loads((settings.data / tokens.SIZES).read_text(encoding="utf-8"))
    results: dict[str, Any] = {}
    for stage in ("before", "after"):
        if stage == "after":
            masters = settled(settings, evaluate, mesh, masters)
        result = evaluate_batches(evaluate, masters, (place(batch, mesh) for batch in batches))
        results[stage] = _held_out(result, sizes)
    export_directory(settings.out / "checkpoint", settings, masters, export)
    (settings.out / "settled.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def export_directory(path: Path, settings: Training, masters: Tree, export: Export) -> None:
    """A checkpoint in the released format with its tokenizer and the list of files it was trained on."""
    from k3jax.train.specs import packed_parameters

    shutil.rmtree(path, ignore_errors=True)
    export(path, settings.config, jax.jit(partial(packed_parameters, settings.config))(masters))
    for name in (*TOKENIZER_FILES, tokens.SOURCES):
        shutil.copyfile(settings.data / name, path / name)
    generation = {"max_length": settings.config.max_position_embeddings, "eos_token_id": settings.config.eos_token_id}
    (path / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def check_tokenizer(settings: Training) -> None:
    """Raises `TrainingError` unless the data was prepared for the configuration's vocabulary."""
    found = tokenizer.load(settings.data).vocab_size
    if found != settings.config.vocab_size:
        raise TrainingError(
            f"the tokenizer in {settings.data} has {found} ids, the configuration {settings.config.vocab_size}; "
            "prepare the data with the same --config"
        )


def _plain(settings: Training) -> dict[str, Any]:
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    values["config"] = dataclasses.asdict(settings.config)
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def baseline(directory: Path, order: int = 5) -> dict[str, int | float]:
    """Bits per byte of the n-gram model of the same tokenizer on the same held-out files."""
    training, validation = (np.load(directory / name) for name in (tokens.TRAINING, tokens.VALIDATION))
    sizes = json.loads((directory / tokens.SIZES).read_text(encoding="utf-8"))
    model = NgramModel(training, tokenizer.load(directory).vocab_size, order)
    nats = model.nats(validation)
    predicted = len(validation) - order + 1
    return {
        "order": order,
        "bits_per_byte": nats * len(validation) / predicted / math.log(2) / sizes["validation_bytes"],
        "nats_per_token": nats / predicted,
    }


def processes() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
