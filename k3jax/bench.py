"""`python -m k3jax.bench`: how fast the kernels run on this machine's GPU."""

import contextlib
import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from k3jax import program

if TYPE_CHECKING:
    from pallas.benchmark import Measurement

OPS = {
    "kda": "pallas.kda.bench",
    "attn_res": "pallas.attn_res.bench",
    "mla": "pallas.mla.bench",
    "moe": "pallas.moe.bench",
    "moe_options": "pallas.moe.bench_options",
    "gemv": "pallas.gemv.bench",
    "markov": "pallas.markov.bench",
    "draft": "k3jax.speculation.draft_bench",
    "acceptance": "k3jax.speculation.acceptance_bench",
    "collectives": "pallas.collectives.bench",
}
"""Name of an op and the module that measures it; `pallas.benchmark` says what such a module offers."""

COLUMNS = ("kernel", "measured us", "floor us", "of floor", "goal us", "peer us", "peer / ours", "peer")
WIDTHS = (41, 11, 8, 8, 7, 7, 11, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Checks an op's kernels for correctness, then prints their times beside the floor, the goal and the peers.

    A failed check prints what failed, no times, and exits with 1. Without a GPU only the check runs.

    Examples:
      python -m k3jax.bench kernels
      python -m k3jax.bench kernels --op kda --json kda.json
      python -m k3jax.bench speculate --layers 8
    """

    subject: Literal["kernels", "speculate"]
    """What to measure: an op's kernels, or a speculative step of a few K3 layers and its parts."""
    op: str = "kda"
    """Name of the op."""
    implementation: Literal["xla", "mosaic", "triton"] | None = None
    """Backend that the correctness check runs. Default: the best for the device, which is also what is timed."""
    layers: int = 8
    """With speculate: the first layers of K3."""
    experts: int | None = None
    """With speculate: experts in each layer. Default: all that fit."""
    context: int = 1024
    """With speculate: tokens in the cache."""
    draft_weights: Literal["auto", "model", "int8"] = "auto"
    """With speculate: kind of the draft's matrices; auto: what decoding takes by default."""
    json: Path | None = None
    """Also write the numbers to this file."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; the exit code."""
    options = program.parse(Options, "k3jax.bench", arguments)
    return program.run(lambda: kernels(options) if options.subject == "kernels" else speculate(options))


def speculate(options: Options) -> int:
    """Times a speculative step, its parts, and a plain one."""
    from k3jax.speculation import bench, report

    sizes = (options.layers, options.experts, options.context)
    setting = bench.Setting.of_k3(*sizes, options.implementation, options.draft_weights)
    return report.run(setting, options.json)


def load_op(op: str) -> ModuleType:
    """The op's benchmark; raises `UsageError` for an op without one."""
    if op not in OPS:
        raise program.UsageError(f"--op {op}: no such benchmark; choose one of {', '.join(OPS)}")
    return importlib.import_module(OPS[op])


def kernels(options: Options) -> int:
    """Gate, then table; 1 when the gate is red."""
    import jax

    # Kernels that are interpreted on a CPU wait for one another in callbacks: one thread a device must not run out.
    with contextlib.suppress(RuntimeError):  # too late where a backend has started
        jax.config.update("jax_num_cpu_devices", 8)
    bench = load_op(options.op)
    with program.status("checking correctness"):
        checks = bench.gate(options.implementation)
    failed = [check for check in checks if not check.passed]
    for check in failed:
        print(f"error: {check.name}: {check.error:.2e} exceeds {check.bound:.0e}", file=sys.stderr)
    if failed:
        return program.FAILURE
    worst = max(check.error for check in checks)
    print(f"{options.op}: {len(checks)} checks passed, largest relative error {worst:.1e}", flush=True)
    if (platform := jax.default_backend()) != "gpu":
        print(f"no times: the default backend is {platform!r}, and no GPU was measured")
        return 0
    print(_line(COLUMNS), flush=True)
    measurements = []
    for measurement in bench.measure():
        for cells in _rows(measurement):
            print(_line(cells), flush=True)
        # After every line: a run that is cut short keeps what it has measured.
        if options.json is not None:
            measurements.append(_record(measurement))
            record = {"device": jax.devices()[0].device_kind, "op": options.op, "measurements": measurements}
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _record(measurement: "Measurement") -> dict[str, object]:
    return {**measurement._asdict(), "peers": [peer._asdict() for peer in measurement.peers]}


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS)).rstrip()


def _rows(line: "Measurement") -> Iterator[tuple[str, ...]]:
    """One row, and another for each further peer."""
    ours = (
        line.name,
        f"{line.measured:.1f}",
        f"{line.floor:.1f}",
        f"{line.floor / line.measured:.0%}",
        "-" if line.goal is None else f"{line.goal:.1f}",
    )
    for index, peer in enumerate(line.peers or (None,)):
        theirs = ("-", "-", "-") if peer is None else (_time(peer.time), _time(peer.time, line.measured), peer.name)
        yield (*(ours if index == 0 else ("",) * len(ours)), *theirs)


def _time(time: float | None, unit: float | None = None) -> str:
    if time is None:
        return "-"
    return f"{time:.1f}" if unit is None else f"{time / unit:.2f}"


if __name__ == "__main__":
    sys.exit(main())
