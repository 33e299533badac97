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
      python -m k3jax.verify path/to/checkpoint --golden golden.npz --dtype bfloat16 --mesh tp2
    """

    checkpoint: Path
    """Directory or file in the released format, or a saved model."""
    golden: Path | None = None
    """File of reference outputs (.npz)."""
    self: bool = False
    """Compare the model with itself in other forms: chunked and recurrent KDA, cached and uncached, ..."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations and weights."""
    tolerance: float | None = None
    """Relative RMS allowed. Default: 2e-4 in float32, 0.3 in bfloat16."""
    margin: float | None = None
    """Score distance up to which a router may choose otherwise. Default: 1e-4 in float32, 0.2 in bfloat16."""
    mesh: str | None = None
    """Mesh preset; default: one device."""
    implementation: Literal["xla", "mosaic", "triton"] | None = None
    """Force one kernel backend."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; the exit code."""
    options = program.parse(Options, "k3jax.verify", arguments)
    return program.run(lambda: verify(options))


def verify(options: Options) -> int:
    """Prints the report; 1 on a breach."""
    if (options.golden is None) == (not options.self):
        raise program.UsageError("give --golden FILE or --self, one of the two")
    program.require_path(options.checkpoint, "checkpoint")
    if options.golden is not None:
        program.require_path(options.golden, "golden file")
    import jax.numpy as jnp

    from k3jax import api
    from k3jax.verification import golden, selfcheck
    from k3jax.verification.comparison import Bounds, Verification

    reference = None if options.golden is None else golden.read(options.golden)
    dtype = jnp.dtype(options.dtype)
    model = api.load(options.checkpoint, dtype=dtype, mesh=options.mesh, implementation=options.implementation)
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


def report(comparisons: "Iterable[Comparison]", tolerance: float) -> int:
    """Prints a line each and a summary; 1 when one failed."""
    seen: list[Comparison] = []
    for comparison in comparisons:
        print(comparison, flush=True)
        seen.append(comparison)
    failed = [comparison for comparison in seen if not comparison.passed]
    arrays = [item for item in seen if "router_ids" not in item.name]
    largest = ""
    if arrays:
        worst = max(arrays, key=lambda item: item.error)
        largest = f", largest relative RMS {worst.error:.2e} ({worst.name})"
    print(f"{len(seen)} compared, {len(failed)} failed; tolerance {tolerance:g}{largest}")
    if not seen:
        print("error: the golden file holds nothing to compare; expected logits, states or router ids", file=sys.stderr)
    return program.FAILURE if failed or not seen else 0


if __name__ == "__main__":
    sys.exit(main())
