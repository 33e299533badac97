"""Executes the notebooks of this folder and writes each beside its text, outputs included.

    python notebooks/execute.py             # all of them
    python notebooks/execute.py 01_*.py

The `.py` file (jupytext's percent format) is the source; edit that one. Needs the extra `notebooks`.
"""

import os
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
CELL_SECONDS = 240


def run(text: Path) -> nbformat.NotebookNode:
    """The executed notebook of a percent-format file. Raises `CellExecutionError` when a cell raises."""
    notebook = jupytext.read(text)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # the same at every execution, so that a diff shows what changed
    search = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    # Errors only: the kernel would warn that its channel, which is local to this machine, is not encrypted.
    options = ["--IPKernelApp.log_level=ERROR"]
    client = NotebookClient(
        notebook, timeout=CELL_SECONDS, record_timing=False, kernel_name="python3", extra_arguments=options
    )
    client.execute(cwd=str(FOLDER), env={**os.environ, "PYTHONPATH": search})
    notebook.metadata.pop("language_info", None)  # names the minor version of the Python that ran it
    return notebook


def main(names: list[str]) -> None:
    """Executes the named files, or all."""
    for text in map(Path, names) if names else sorted(FOLDER.glob("[0-9]*.py")):
        nbformat.write(run(text), text.with_suffix(".ipynb"))


if __name__ == "__main__":
    main(sys.argv[1:])
