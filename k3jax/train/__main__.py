"""Trains a small K3 the way K3 is trained: Quantile Balancing, per-head Muon, MXFP4-aware experts.

Examples:
    python -m k3jax.train pretrain --config tiny --out run --steps 20 --rows 4 --length 64 --limit-mb 1
    python -m k3jax.train prepare --config nano --out data
    python -m k3jax.train pretrain --config nano --data data --out run --seconds 350 --chat-seconds 90
    python -m k3jax.train settle --checkpoint run/checkpoint --data data --out settled
    python -m k3jax.train baseline --data data

`pretrain` goes on where its --out folder stopped. Exit codes: 0 done, 1 the data or the run cannot be used,
2 wrong usage.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

ConfigName = Literal["nano", "tiny"]


class UsageError(ValueError):
    """Arguments that cannot be meant."""


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Collect permissively licensed Python files of this machine, learn a tokenizer, pack ids and chat windows.

    Example: python -m k3jax.train prepare --config nano --out data
    """

    out: Path
    """Folder to write."""
    config: ConfigName = "nano"
    """Configuration that names the vocabulary size."""
    tokenizer: Path | None = None
    """Folder of a tokenizer to use instead of learning one."""
    root: Path | None = None
    """Take the Python files below this folder instead."""
    limit_mb: float | None = None
    """Stop at this much text."""
    length: int = 1024
    """Predictions per chat window; the same as in `pretrain`."""
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Pretrain:
    """Pre-train, then the chat phase, evaluate, export in the released format; resumes by itself.

    Example: python -m k3jax.train pretrain --config nano --data data --out run --seconds 350 --chat-seconds 90
    """

    out: Path
    """Folder of log, saved states, curves and the exported checkpoint."""
    config: ConfigName = "nano"
    """Configuration to train."""
    data: Path | None = None
    """Folder made by `prepare` (default: prepared in --out)."""
    steps: int | None = None
    """Steps of pre-training; or give --seconds."""
    seconds: float | None = None
    """Time for pre-training, turned into steps once the time of a step is known."""
    chat_steps: int | None = None
    """Steps of the chat phase."""
    chat_seconds: float | None = None
    """Time for the chat phase."""
    rows: int = 64
    """Windows per step, over all devices."""
    length: int = 1024
    """Predictions per window."""
    peak: float = 4e-3
    """Largest learning rate."""
    chat_peak: float = 1.5e-3
    """Largest learning rate of the chat phase."""
    seed: int = 0
    unbalanced: bool = False
    """Train without Quantile Balancing, as a baseline."""
    no_remat: bool = False
    """Keep all activations: faster, more memory."""
    micro_batches: int = 1
    """Parts of a step that are computed one after the other."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the computation; parameters are float32."""
    wait: float = 0.0
    """Seconds to wait for --data to be complete."""
    save_seconds: float = 600.0
    """Time between saved states."""
    limit_mb: float | None = None
    """Text to prepare when --data is left out."""
    compilation_cache: Path | None = None
    """Folder of compiled programs, kept across runs."""


@dataclasses.dataclass(frozen=True)
class Settle:
    """Set a checkpoint's correction biases from pooled training text and export it; `pretrain` does so by itself.

    Example: python -m k3jax.train settle --checkpoint run/checkpoint --data data --out settled
    """

    checkpoint: Path
    """Checkpoint in the released format."""
    data: Path
    """Folder made by `prepare`."""
    out: Path
    """Folder for the exported checkpoint and settled.json."""
    rows: int = 64
    """Windows per batch, over all devices."""
    length: int = 1024
    """Predictions per window."""
    seed: int = 0
    wait: float = 0.0
    """Seconds to wait for --data to be complete."""


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Bits per byte of a Kneser-Ney 5-gram model with the same tokenizer on the same files.

    Example: python -m k3jax.train baseline --data data --out baseline.json
    """

    data: Path
    """Folder made by `prepare`."""
    out: Path | None = None
    """File for the result (default: standard output)."""
    wait: float = 0.0
    """Seconds to wait for --data to be complete."""


@dataclasses.dataclass(frozen=True)
class Draft:
    """Let a checkpoint write texts and train a DSpark draft on them; goes on where its --out folder stopped.

    Example: python -m k3jax.train draft --checkpoint checkpoints/nano --out draft-run --steps 2000
    """

    checkpoint: Path
    """The target, with its tokenizer."""
    out: Path
    """Folder of texts, log, saved states and the finished draft."""
    steps: int
    rows: int = 16
    """Texts per step."""
    anchors: int = 64
    """Blocks per text."""
    peak: float = 1e-3
    """Largest learning rate."""
    texts: int = 2048
    """Texts to write, once."""
    length: int = 256
    """Tokens per text."""
    block: int = 7
    """Tokens drafted per step."""
    layers: int = 2
    """Layers of the draft."""
    rank: int = 64
    """Width of the Markov head."""
    save_every: int = 500
    """Steps between saved states."""
    limit_mb: float = 8.0
    """Training files to take beginnings of texts from."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the target."""
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Draw:
    """Draw the curves of one or more runs.

    Example: python -m k3jax.train draw --out curves.png --logs run/log.jsonl other/log.jsonl --names nano "QB off"
    """

    out: Path
    """PNG to write."""
    logs: tuple[Path, ...]
    """Journals (log.jsonl)."""
    names: tuple[str, ...] = ()
    """Their names, in the same order."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    import tyro

    command = tyro.cli(
        Prepare | Pretrain | Settle | Baseline | Draft | Draw,
        prog="python -m k3jax.train",
        description=__doc__,
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    from k3jax.train.programs import TrainingError

    programs: dict[type, Any] = {
        Prepare: _prepare,
        Pretrain: _pretrain,
        Settle: _settle,
        Baseline: _baseline,
        Draft: _draft,
        Draw: _draw,
    }
    try:
        programs[type(command)](command)
    except UsageError as error:
        return _fail(error, 2)
    except (TrainingError, FileNotFoundError, ValueError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted; run the same command again to go on from the last saved state", 130)
    return 0


def _fail(error: object, code: int) -> int:
    print("error: " + " ".join(str(error).split()), file=sys.stderr)
    return code


def _prepare(command: Prepare) -> None:
    from k3jax.train import programs
    from k3jax.train.configs import CONFIGS

    settings = programs.Preparation(
        out=command.out,
        vocab_size=CONFIGS[command.config]().vocab_size,
        tokenizer=command.tokenizer,
        root=command.root,
        limit=_bytes(command.limit_mb),
        length=command.length,
        workers=programs.processes(),
        seed=command.seed,
    )
    print(json.dumps(programs.prepare(settings)))


def _pretrain(command: Pretrain) -> None:
    if (command.steps is None) == (command.seconds is None):
        raise UsageError("give exactly one of --steps and --seconds")
    import jax

    from checkpoints import orbax_adapter
    from k3jax.train import programs
    from k3jax.train.configs import CONFIGS

    if command.compilation_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(command.compilation_cache.resolve()))
    data = command.data or command.out / "data"
    if command.data is None and not (data / "sizes.json").is_file():
        _prepare(Prepare(data, command.config, limit_mb=command.limit_mb, length=command.length, seed=command.seed))
    names = ("steps", "seconds", "chat_steps", "chat_seconds", "rows", "length", "peak", "chat_peak", "seed")
    settings = programs.Training(
        config=CONFIGS[command.config](),
        data=data,
        out=command.out,
        balanced=not command.unbalanced,
        remat=not command.no_remat,
        **{name: getattr(command, name) for name in (*names, "micro_batches", "dtype", "wait", "save_seconds")},
    )

    print(json.dumps(programs.pretrain(settings, orbax_adapter.write, orbax_adapter.read, _export)))


def _export(path: Path, config: Any, tree: Any) -> None:
    """One file in the released format."""
    import checkpoints

    checkpoints.export(path, config, tree, max_shard_bytes=1 << 40)


def _settle(command: Settle) -> None:
    import jax.numpy as jnp

    import checkpoints
    from k3jax.train import programs

    config, tree = checkpoints.load(command.checkpoint, dtype=jnp.bfloat16)
    names = ("data", "out", "rows", "length", "seed", "wait")
    settings = programs.Training(
        config=config, steps=0, seconds=None, **{name: getattr(command, name) for name in names}
    )
    print(json.dumps(programs.settle_checkpoint(settings, tree, _export)))


def _baseline(command: Baseline) -> None:
    from k3jax.train import data, programs

    data.wait_for(command.data, command.wait)
    text = json.dumps(programs.baseline(command.data))
    if command.out is None:
        print(text)
    else:
        command.out.write_text(text + "\n", encoding="utf-8")


def _draft(command: Draft) -> None:
    import numpy as np

    from checkpoints import orbax_adapter
    from k3jax import api
    from k3jax.train import corpus, draft_program, tokens

    model = api.load(command.checkpoint, dtype=command.dtype)
    if model.tokenizer is None:
        raise UsageError(f"{command.checkpoint} has no tokenizer, expected the one that the target was trained with")
    encoder = model.tokenizer
    sources = [source for source in corpus.collect(_bytes(command.limit_mb)) if not source.held_out]
    documents = (np.asarray(encoder.encode(source.text), np.uint16) for source in sources)
    config = draft_program.draft_config(
        model.config, block_size=command.block, num_layers=command.layers, markov_rank=command.rank
    )
    names = ("out", "steps", "rows", "anchors", "peak", "texts", "length", "save_every", "seed")
    plan = draft_program.Plan(**{name: getattr(command, name) for name in names})
    prompts = draft_program.prompts_from(tokens.pack(documents, model.config.bos_token_id + 1), plan)
    state = draft_program.run(model, config, prompts, plan, orbax_adapter.write, orbax_adapter.read)
    print(draft_program.summary(plan, state, config))


def _draw(command: Draw) -> None:
    from k3jax.train import report

    if command.names and len(command.names) != len(command.logs):
        raise UsageError(f"{len(command.names)} names for {len(command.logs)} logs; give one each or none")
    names = command.names or tuple(str(path) for path in command.logs)
    runs = {name: report.read(path) for name, path in zip(names, command.logs, strict=True)}
    report.draw(runs, command.out)


def _bytes(megabytes: float | None) -> int | None:
    return None if megabytes is None else int(megabytes * 1e6)


if __name__ == "__main__":
    sys.exit(main())
