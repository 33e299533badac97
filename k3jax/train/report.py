"""Progress of a run: one JSON object per line in a file, one updating line on a terminal, a picture at the end."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO


class Journal:
    """Appends records to `log.jsonl`; on a terminal shows the latest one."""

    def __init__(self, path: Path, stream: TextIO | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._stream = sys.stderr if stream is None else stream
        self._start = time.monotonic()

    def write(self, kind: str, **values: Any) -> None:
        """Stores a record with the seconds since the start of the process's run."""
        record = {"kind": kind, "seconds": round(time.monotonic() - self._start, 2)} | values
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._stream.isatty():
            self._stream.write("\r\x1b[K" + _line(record) + ("" if kind == "step" else "\n"))
            self._stream.flush()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._stream.isatty():
            self._stream.write("\n")


def _line(record: Mapping[str, Any]) -> str:
    shown = {key: value for key, value in record.items() if isinstance(value, int | float | str) and key != "kind"}
    return f"{record['kind']}: " + "  ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in shown.items()
    )


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a journal; of steps that were run twice, the later one."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    latest = {
        (r["kind"], r.get("phase"), r.get("step"), i if r["kind"] != "step" else 0): r for i, r in enumerate(records)
    }
    return list(latest.values())


def curves(records: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Columns of the step records."""
    steps = [record for record in records if record["kind"] == "step"]
    keys = ("step", "tokens", "loss", "imbalance", "imbalance_worst", "learning_rate", "tokens_per_second")
    return {key: [record[key] for record in steps] for key in keys}


def draw(runs: Mapping[str, list[dict[str, Any]]], path: Path) -> None:
    """Loss and expert load over tokens of the named runs, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (loss, load) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for name, run in runs.items():
        columns = curves(run)
        millions = [tokens / 1e6 for tokens in columns["tokens"]]
        loss.plot(millions, columns["loss"], label=name, linewidth=0.8)
        load.plot(millions, columns["imbalance"], label=name, linewidth=0.8)
    loss.set(xlabel="million tokens", ylabel="training loss (nats per token)", ylim=(None, 5))
    load.set(xlabel="million tokens", ylabel="expert load, max / mean", yscale="log")
    loss.legend(frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
