"""Trains a small K3 the way K3 is trained: Quantile Balancing, per-head Muon, MXFP4-aware experts.

Examples:
    python -m k3jax.train pretrain --config tiny --out run --steps 20 --rows 4 --length 64 --limit-mb 1
    python -m k3jax.train pretrain --config nano --out run --steps 1 --rows 2 --length 64 --limit-mb 1.5
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

from k3jax import program

ConfigName = Literal["nano", "tiny"]
_SETTLING = ("settle_batches", "settle_rounds")


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
    listed: Path | None = None
    """Take exactly the files of this list (training_files.tsv.xz of a checkpoint) that are here unchanged."""
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
    initial: Path | None = None
    """Checkpoint to start from instead of random parameters."""
    steps: int | None = None
    """Steps of pre-training (0: none)."""
    seconds: float | None = None
    """Time for pre-training, turned into steps once the time of a step is known; with --steps, whichever ends first."""
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
    settle_batches: int = 16
    """Batches over which the correction biases are set at the end of a phase."""
    settle_rounds: int = 5
    """Times that they are set."""
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
    settle_batches: int = 16
    """Batches of the pool."""
    settle_rounds: int = 5
    """Times that the biases are set."""
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

    Example: python -m k3jax.train draft --checkpoint checkpoints/nano --data data --out draft-run --steps 2000
    """

    checkpoint: Path
    """The target."""
    data: Path
    """Folder made by `prepare` with the target's tokenizer."""
    out: Path
    """Folder of texts, log, saved states and the finished draft."""
    steps: int
    seconds: float | None = None
    """Time for writing texts and training; the schedule ends after --steps or then, whichever comes first."""
    rows: int = 16
    """Texts per step, if they have the greatest length; as many times more of shorter ones."""
    anchors: int = 64
    """Blocks per text of the greatest length; as many times fewer in shorter ones."""
    peak: float = 2e-3
    """Largest learning rate."""
    length: tuple[int, ...] = (256,)
    """Tokens per text, of each kind of texts."""
    texts: tuple[int, ...] = (2048,)
    """Texts to write, of each kind and in each round."""
    rounds: int = 1
    """Times that texts are written: new ones take the place of the old ones at even parts of the schedule."""
    block: int = 7
    """Tokens drafted per step."""
    layers: int = 2
    """Layers of the draft."""
    rank: int = 64
    """Width of the Markov head."""
    markov: Literal["vanilla", "gated", "rnn"] = "vanilla"
    """Kind of the Markov head."""
    taps: int = 3
    """Layers of the target that the draft reads."""
    tap_layers: tuple[int, ...] = ()
    """Which ones, instead of as many at even steps."""
    width: int = 2
    """Width of the draft's MLPs in widths of the stream."""
    kv_heads: int | None = None
    """Key and value heads (default: a third of the heads)."""
    corpus: int = 0
    """Texts of the data that are trained on as well, of each kind."""
    cross_entropy: float = 0.1
    """Weight of the cross-entropy."""
    decay: float = 4.0
    """Rows of a block after which their weight has fallen by e."""
    soft: bool = False
    """Cross-entropy against the target's distributions instead of the texts' tokens."""
    reach: bool = False
    """Weigh each row by the chance that its block stands up to there."""
    pace: bool = False
    """Weigh each row by how much the number of steps depends on it, in place of --decay and --reach."""
    confidence: float = 1.0
    """Weight of the confidence head's loss."""
    initial: Path | None = None
    """Draft to start from, of the same shape or with fewer layers, key and value heads or taps."""
    resident: bool = False
    """Run the target once over all texts and keep its taps on the device: faster, more memory."""
    save_every: int = 500
    """Steps between saved states."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the target."""
    implementation: Literal["mosaic", "triton", "xla"] | None = None
    """Kernels of the target."""
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Tokens per step that a draft gives on held-out Python, prose and chat requests, for both acceptance rules.

    Example: python -m k3jax.train acceptance --checkpoint checkpoints/nano --draft draft-run/draft --data data
    """

    checkpoint: Path
    """The target."""
    draft: Path
    """A DSpark directory."""
    data: Path
    """Folder made by `prepare` with the target's tokenizer."""
    rows: int = 32
    """Beginnings of each task."""
    prompt: int = 64
    """Tokens of a beginning."""
    long_prompt: int = 512
    """Tokens of a beginning with much context."""
    tokens: int = 192
    """Tokens that each row writes."""
    temperature: float = 1.0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of target and draft."""
    implementation: Literal["mosaic", "triton", "xla"] | None = None
    """Kernels of the target."""
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
        Prepare | Pretrain | Settle | Baseline | Draft | Acceptance | Draw,
        prog="python -m k3jax.train",
        description=__doc__,
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    run: dict[type, Any] = {
        Prepare: _prepare,
        Pretrain: _pretrain,
        Settle: _settle,
        Baseline: _baseline,
        Draft: _draft,
        Acceptance: _acceptance,
        Draw: _draw,
    }
    try:
        run[type(command)](command)
    except program.UsageError as error:
        return _fail(error, program.USAGE)
    except (FileNotFoundError, ValueError) as error:
        return _fail(error, program.FAILURE)
    except KeyboardInterrupt:
        return _fail("interrupted; run the same command again to go on from the last saved state", program.INTERRUPTED)
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
        listed=command.listed,
        limit=_bytes(command.limit_mb),
        length=command.length,
        workers=programs.processes(),
        seed=command.seed,
    )
    print(json.dumps(programs.prepare(settings)))


def _check(command: Pretrain) -> None:
    """Refuses what would fail only after minutes of compiling or preparing."""
    from k3jax.train import data

    if command.steps is None and command.seconds is None:
        raise program.UsageError("give --steps, --seconds or both")
    least = {"steps": 0, "seconds": 0, "chat_steps": 0, "chat_seconds": 0, "rows": 1, "length": 1}
    least |= {"micro_batches": 1, "settle_batches": 1, "settle_rounds": 0}
    for name, bound in least.items():
        if (value := getattr(command, name)) is not None and value < bound:
            raise program.UsageError(f"--{name.replace('_', '-')} is {value}, expected at least {bound}")
    if command.initial is not None and not command.initial.exists():
        raise FileNotFoundError(f"--initial {command.initial} does not exist; give the directory of a checkpoint")
    if command.data is not None and not command.wait:
        data.wait_for(command.data, 0.0)


def _pretrain(command: Pretrain) -> None:
    _check(command)
    import jax

    import checkpoints
    from checkpoints import orbax_adapter
    from k3jax.train import programs
    from k3jax.train.configs import CONFIGS

    if command.compilation_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(command.compilation_cache.resolve()))
    data = command.data or command.out / "data"
    if command.data is None and not (data / "sizes.json").is_file():
        _prepare(Prepare(data, command.config, limit_mb=command.limit_mb, length=command.length, seed=command.seed))
    config, initial = CONFIGS[command.config](), None
    if command.initial is not None:
        config, initial = checkpoints.load(command.initial, config, dtype=jax.numpy.bfloat16)
    names = ("steps", "seconds", "chat_steps", "chat_seconds", "rows", "length", "peak", "chat_peak", "seed")
    names = (*names, *_SETTLING, "micro_batches", "dtype", "wait", "save_seconds")
    settings = programs.Training(
        config=config,
        data=data,
        out=command.out,
        balanced=not command.unbalanced,
        remat=not command.no_remat,
        **{name: getattr(command, name) for name in names},
    )
    print(json.dumps(programs.pretrain(settings, orbax_adapter.write, orbax_adapter.read, _export, initial)))


def _export(path: Path, config: Any, tree: Any) -> None:
    """One file in the released format."""
    import checkpoints

    checkpoints.export(path, config, tree, max_shard_bytes=1 << 40)


def _settle(command: Settle) -> None:
    import jax.numpy as jnp

    import checkpoints
    from k3jax.train import programs

    config, tree = checkpoints.load(command.checkpoint, dtype=jnp.bfloat16)
    names = ("data", "out", "rows", "length", "seed", "wait", *_SETTLING)
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
    from checkpoints import orbax_adapter
    from k3jax.train import data, draft_data, draft_losses, draft_program

    data.wait_for(command.data, 0.0)
    model = _target(command)
    config = draft_program.draft_config(
        model.config,
        block_size=command.block,
        num_layers=command.layers,
        markov_rank=command.rank,
        markov_kind=command.markov,
        num_taps=command.taps,
        tap_layers=command.tap_layers,
        width=command.width,
        kv_heads=command.kv_heads,
    )
    loss = {name: getattr(command, name) for name in ("cross_entropy", "confidence", "decay", "soft", "reach", "pace")}
    names = ("out", "steps", "seconds", "rows", "anchors", "rounds", "peak", "texts", "length", "corpus", "resident")
    values = {name: getattr(command, name) for name in (*names, "save_every", "seed")}
    plan = draft_program.Plan(**values, objective=draft_losses.Objective(**loss))
    prepared = draft_data.Prepared(command.data)
    initial = None if command.initial is None else _draft_masters(command.initial, config, command.seed)
    state = draft_program.run(model, config, prepared, plan, orbax_adapter.write, orbax_adapter.read, initial)
    print(draft_program.summary(plan, state, config))


def _draft_masters(path: Path, config: Any, seed: int) -> Any:
    """float32 parameters of a stored draft, grown to `config`. Raises `ValueError` when it cannot grow so."""
    import jax.numpy as jnp

    from checkpoints.checking import require, tensor_problems
    from checkpoints.source import find_source
    from checkpoints.streaming import load_tree
    from k3jax import params
    from k3jax.dspark.config import DSparkConfig
    from k3jax.dspark.tensors import draft_specs
    from k3jax.train import draft_grow, draft_run

    found = DSparkConfig.from_file(path)
    if problems := draft_grow.misfits(found, config):
        raise ValueError(f"{path} is a draft of another shape: {'; '.join(problems)}")
    source, problems = find_source(path)
    specs = draft_specs(found)
    # Any other tensor may be there as well (the empty prefix): it is not read.
    require(path, source, problems + list(tensor_problems(source, params.hf_tensors(specs), ("",))))
    masters = load_tree(source, specs, dtype=jnp.dtype(jnp.float32))
    return draft_grow.grow(found, masters, config, draft_run.create(config, seed).masters)


def _target(command: Draft | Acceptance) -> Any:
    """The model that a draft belongs to, with decoded experts: it works on large batches."""
    import jax
    import jax.numpy as jnp

    import checkpoints
    from k3jax.runtime import Model
    from k3jax.train import specs

    dtype = jnp.dtype(command.dtype)
    config, packed = checkpoints.load(command.checkpoint, dtype=dtype)
    tree = jax.jit(lambda packed: specs.dense_parameters(config, packed, dtype))(packed)
    return Model.of(config, tree, implementation=command.implementation)


def _acceptance(command: Acceptance) -> None:
    from k3jax import api
    from k3jax.train import data, draft_acceptance, draft_data

    data.wait_for(command.data, 0.0)
    model = _target(command)
    names = ("rows", "prompt", "long_prompt", "tokens", "temperature", "seed")
    protocol = draft_acceptance.Protocol(**{name: getattr(command, name) for name in names})
    draft = api.load_draft(command.draft, model)
    print(json.dumps(draft_acceptance.measure(model, draft, draft_data.Prepared(command.data), protocol)))


def _draw(command: Draw) -> None:
    from k3jax.train import report

    if command.names and len(command.names) != len(command.logs):
        raise program.UsageError(f"{len(command.names)} names for {len(command.logs)} logs; give one each or none")
    names = command.names or tuple(str(path) for path in command.logs)
    runs = {name: report.read(path) for name, path in zip(names, command.logs, strict=True)}
    report.draw(runs, command.out)


def _bytes(megabytes: float | None) -> int | None:
    return None if megabytes is None else int(megabytes * 1e6)


if __name__ == "__main__":
    sys.exit(main())
