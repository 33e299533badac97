"""The figures of a run as a picture."""

from pathlib import Path
from typing import Any


def write(results: list[dict[str, Any]], path: Path) -> None:
    """Tokens a second, time to first token and between tokens against the load; needs matplotlib (extra `train`)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    labels = [result["load"] for result in results]
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    axes[0].plot(labels, [result["output_tokens_per_second"] for result in results], marker="o")
    axes[0].set(title="output tokens per second", xlabel="load", ylim=(0, None))
    for axis, name, title in (
        (axes[1], "ttft_ms", "time to first token, ms"),
        (axes[2], "itl_ms", "between messages, ms"),
    ):
        for rank in ("p50", "p90", "p99"):
            axis.plot(labels, [result[name].get(rank, float("nan")) for result in results], marker="o", label=rank)
        axis.set(title=title, xlabel="load", ylim=(0, None))
        axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
