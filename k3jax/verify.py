"""`python -m k3jax.verify`: a checkpoint against stored reference outputs, or against itself."""

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from k3jax import program

if TYPE_CHECKING:
    from collections.abc import Iterable

    from k3jax.verification.compare import Comparison

# Relative RMS and router margin allowed by default. float32: the bound of the whole project. bfloat16: near twice the
# largest values seen against float32 references (0.18 and 0.12: random models of nine layers, all caps in use).
BOUNDS = {"float32": (2e-4, 1e-4), "bfloat16": (0.3, 0.2)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Compares a checkpoint with reference outputs: one line per quantity with its relative RMS and worst pair.

    Exit code 1 when a relative RMS exceeds the tolerance, or a router chose other experts although the k-th score
    was further than the margin from the next.

    Examples:
      python -m k3jax.verify path/to/checkpoint --golden path/to/golden.npz
      python -m k3jax.verify path/to/checkpoint --self
      python -m k3jax.verify --draft path/to/draft --golden path/to/golden.npz
      python -m k3jax.verify path/to/checkpoint --golden golden.npz --dtype bfloat16 --mesh tp2
      python -m k3jax.verify path/to/checkpoint --against xla --dtype bfloat16 --implementation mosaic
    """

    checkpoint: tuple[Path, ...]
    """Directory or file in the released format, or a saved model. With --draft only for a draft without a head."""
    draft: Path | None = None
    """Directory of a DSpark draft, to compare with --golden instead of a model."""
    golden: Path | None = None
    """File of reference outputs (.npz)."""
    self: bool = False
    """Compare the model with itself in other forms: chunked and recurrent KDA, cached and uncached, ..."""
    against: Literal["xla"] | None = None
    """Compare with the portable forms of the same checkpoint in float32: allowed is 1.5 times their own error in
    `--dtype`. Meant for `--dtype bfloat16 --implementation mosaic`, on a GPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations and weights."""
    tolerance: float | None = None
    """Relative RMS allowed. Default: 2e-4 in float32, 0.3 in bfloat16."""
    margin: float | None = None
    """Score distance up to which a router may choose otherwise. Default: 1e-4 in float32, 0.2 in bfloat16."""
    mesh: str | None = None
    """Mesh preset, e.g. tp2; default: one device. On GPUs tp2, tp4 and tp8 sum in one hop where a trial at the start
    proves it; tp2-nccl and tp2-one-hop ask for one of both."""
    implementation: Literal["xla", "mosaic", "triton"] | None = None
    """Force one kernel backend."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; the exit code."""
    options = program.parse(Options, "k3jax.verify", arguments)
    return program.run(lambda: verify(options))


def verify(options: Options) -> int:
    """Prints the report; 1 on a breach."""
    checkpoint = _paths(options)
    if options.draft is not None:
        return verify_draft(options, checkpoint)
    import jax.numpy as jnp

    from k3jax import api
    from k3jax.verification import against, golden, selfcheck
    from k3jax.verification.comparison import Bounds, Verification

    reference = None if options.golden is None else golden.read(options.golden)
    dtype = jnp.dtype(options.dtype)
    model = api.load(checkpoint, dtype=dtype, mesh=options.mesh, implementation=options.implementation)
    if options.against is not None:
        portable, reference = (
            api.load(checkpoint, dtype=jnp.dtype(kind), mesh=options.mesh, implementation=options.against)
            for kind in (options.dtype, "float32")
        )
        return report(against.run(model, portable, reference), f"{against.RATIO} times the portable forms' error")
    tolerance, margin = BOUNDS[options.dtype]
    tolerance = tolerance if options.tolerance is None else options.tolerance
    margin = margin if options.margin is None else options.margin
    if reference is None:
        return report(selfcheck.run(model, tolerance), tolerance)
    for case in reference.cases:
        if missing := case.missing(model.config):
            print(f"note {case.name}: the file has no {', '.join(missing)}")
    if reference.unknown:
        print(f"note the file also holds {', '.join(reference.unknown)}, which mean nothing here: not compared")
    return report(Verification(model, reference, Bounds(tolerance, margin)).run(), tolerance)


def _paths(options: Options) -> Path | None:
    """The checkpoint; raises `UsageError` for options that do not go together and paths that do not exist."""
    if (options.golden is not None) + options.self + (options.against is not None) != 1:
        raise program.UsageError("give --golden FILE, --self or --against xla, one of them")
    if len(options.checkpoint) > 1:
        shown = " ".join(map(str, options.checkpoint))
        raise program.UsageError(f"{len(options.checkpoint)} checkpoints are given ({shown}); give one")
    if options.draft is None and not options.checkpoint:
        raise program.UsageError("no checkpoint; give the path of one, or --draft DIR --golden FILE")
    if options.draft is not None and options.golden is None:
        raise program.UsageError("--draft needs --golden FILE")
    if options.draft is not None:
        program.require_path(options.draft, "draft")
    for path in options.checkpoint:
        program.require_path(path, "checkpoint")
    if options.golden is not None:
        program.require_path(options.golden, "golden file")
    return options.checkpoint[0] if options.checkpoint else None


def verify_draft(options: Options, checkpoint: Path | None) -> int:
    """Compares a draft with a golden file of its own, which holds the target's features; 1 on a breach."""
    import jax.numpy as jnp

    from k3jax import api
    from k3jax.dspark.config import DSparkConfig
    from k3jax.verification import draft as golden_draft

    assert options.draft is not None
    assert options.golden is not None
    golden = golden_draft.read(options.golden)
    config = DSparkConfig.from_file(options.draft, golden.block_size)
    golden.require(config)
    dtype = jnp.dtype(options.dtype)
    tables = {}
    if checkpoint is not None:
        model = api.load(checkpoint, dtype=dtype)
        if problems := list(config.misfits(model.config)):
            raise program.UsageError(f"{options.draft} is not a draft of {checkpoint}: {'; '.join(problems)}")
        target = model.graph.merge(model.leaves)
        tables = {"embedding": target.embedding[...], "head": target.head[...]}
    module = api.read_draft(options.draft, config, dtype=dtype, head=tables.get("head"))
    for table in module.borrows:
        if table not in tables:
            raise program.UsageError(
                f"{options.draft} has no {table} of its own; give the checkpoint of its target too"
            )
    if golden.unknown:
        print(f"note the file also holds {', '.join(golden.unknown)}, which mean nothing here: not compared")
    tolerance = BOUNDS[options.dtype][0] if options.tolerance is None else options.tolerance
    return report(golden_draft.DraftVerification(module, golden, tolerance, tables).run(), tolerance)


def report(comparisons: "Iterable[Comparison]", tolerance: float | str) -> int:
    """Prints a line each and a summary; 1 when one failed."""
    seen: list[Comparison] = []
    for comparison in comparisons:
        print(comparison, flush=True)
        seen.append(comparison)
    failed = [comparison for comparison in seen if not comparison.passed]
    arrays = [item for item in seen if not item.name.endswith(("router_ids", ".tokens"))]
    largest = ""
    if arrays:
        worst = max(arrays, key=lambda item: item.error)
        largest = f", largest relative RMS {worst.error:.2e} ({worst.name})"
    stated = tolerance if isinstance(tolerance, str) else f"{tolerance:g}"
    print(f"{len(seen)} compared, {len(failed)} failed; tolerance {stated}{largest}")
    if not seen:
        print("error: the golden file holds nothing to compare; expected logits, states or router ids", file=sys.stderr)
    return program.FAILURE if failed or not seen else 0


if __name__ == "__main__":
    sys.exit(main())
