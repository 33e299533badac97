"""`python -m k3jax.bench`: how fast the kernels run on this machine's GPU."""

import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from k3jax import program

OPS = ("kda",)
"""Op folders under `pallas/` whose `bench.py` offers `gate()` and `measure()`."""

COLUMNS = ("kernel", "measured us", "floor us", "of floor", "goal us", "peer us", "peer / ours", "peer")
WIDTHS = (37, 11, 8, 8, 7, 7, 11, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Checks an op's kernels for correctness, then prints their times beside the byte floor, the goal and a peer.

    A failed check prints what failed, no times, and exits with 1. Without a GPU only the check runs.

    Examples:
      python -m k3jax.bench kernels
      python -m k3jax.bench kernels --op kda --json kda.json
    """

    subject: Literal["kernels"]
    """What to measure."""
    op: str = "kda"
    """Folder of the op."""
    implementation: Literal["xla", "mosaic", "triton"] | None = None
    """Backend that the correctness check runs. Default: the best for the device, which is also what is timed."""
    json: Path | None = None
    """Also write the numbers to this file."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; the exit code."""
    options = program.parse(Options, "k3jax.bench", arguments)
    return program.run(lambda: kernels(options))


def load_op(op: str) -> ModuleType:
    """The op's benchmark; raises `UsageError` for an op without one."""
    if op not in OPS:
        raise program.UsageError(f"--op {op}: no such benchmark; choose one of {', '.join(OPS)}")
    return importlib.import_module(f"pallas.{op}.bench")


def kernels(options: Options) -> int:
    """Gate, then table; 1 when the gate is red."""
    import jax

    bench = load_op(options.op)
    with program.status("checking correctness"):
        checks = bench.gate(options.implementation)
    failed = [check for check in checks if not check.passed]
    for check in failed:
        print(f"error: {check.name}: {check.error:.2e} exceeds {check.bound:.0e}", file=sys.stderr)
    if failed:
        return program.FAILURE
    worst = max(check.error for check in checks)
    print(f"{options.op}: {len(checks)} checks passed, largest relative error {worst:.1e}")
    if (platform := jax.default_backend()) != "gpu":
        print(f"no times: the default backend is {platform!r}, and no GPU was measured")
        return 0
    print(_line(COLUMNS))
    measurements = []
    for measurement in bench.measure():
        measurements.append(measurement._asdict())
        print(_line(_cells(measurements[-1])), flush=True)
        # After every line: a run that is cut short keeps what it has measured.
        if options.json is not None:
            record = {"device": jax.devices()[0].device_kind, "op": options.op, "measurements": measurements}
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS)).rstrip()


def _cells(line: dict[str, Any]) -> tuple[str, ...]:
    measured, peer = line["measured"], line["peer"]
    return (
        line["name"],
        f"{measured:.1f}",
        f"{line['floor']:.1f}",
        f"{line['floor'] / measured:.0%}",
        f"{line['goal']:.1f}",
        "-" if peer is None else f"{peer:.1f}",
        "-" if peer is None else f"{peer / measured:.2f}",
        line["peer_name"] or "-",
    )


if __name__ == "__main__":
    sys.exit(main())
