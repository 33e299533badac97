"""The notebooks run, and what is committed is what their text says."""

import importlib.util
import re
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext", reason="needs the extra `notebooks`")
nbformat = pytest.importorskip("nbformat", reason="needs the extra `notebooks`")
pytest.importorskip("nbclient", reason="needs the extra `notebooks`")

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
TEXTS = sorted(FOLDER.glob("[0-9]*.py"))
MAX_BYTES = 400_000
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|Users|tmp|work|opt|usr|var)/|[A-Z]:\\\\")
NUMBER = re.compile(r" *\d[\d.]*(e[+-]?\d+)?")

each_notebook = pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def execute():
    spec = importlib.util.spec_from_file_location("execute_notebooks", FOLDER / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def committed(text):
    return nbformat.read(text.with_suffix(".ipynb"), as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook, kind):
    return [output for cell in code_cells(notebook) for output in cell.outputs if output.output_type == kind]


def shown(notebook):
    """Printed text without its numbers, which depend on the machine, and the number of pictures, by cell."""

    def of(cell):
        printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
        return NUMBER.sub("#", printed), sum(output.output_type == "display_data" for output in cell.outputs)

    return [of(cell) for cell in code_cells(notebook)]


def test_there_are_notebooks_and_each_is_paired():
    assert TEXTS
    assert {path.stem for path in TEXTS} == {path.stem for path in FOLDER.glob("*.ipynb")}


@each_notebook
def test_both_files_have_the_same_cells(text):
    def sources(notebook):
        return [(cell.cell_type, cell.source) for cell in notebook.cells]

    assert sources(jupytext.read(text)) == sources(committed(text))


@each_notebook
def test_committed_outputs_come_from_one_clean_run(text):
    notebook = committed(text)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not outputs(notebook, "error")
    assert not [output.text for output in outputs(notebook, "stream") if output.name == "stderr"]
    assert any("image/png" in output.data for output in outputs(notebook, "display_data"))
    raw = text.with_suffix(".ipynb").read_text()
    assert len(raw) < MAX_BYTES
    assert not MACHINE_PATH.search(raw)


@each_notebook
def test_runs(text, execute, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # its programs run once
    notebook = execute.run(text)
    assert not [output.text for output in outputs(notebook, "stream") if output.name == "stderr"]
    assert shown(notebook) == shown(committed(text))


def test_a_cell_that_raises_fails(tmp_path, execute):
    broken = tmp_path / "01_broken.py"
    broken.write_text("# %%\nassert 1 + 1 == 3, 'arithmetic'\n")
    with pytest.raises(Exception, match="arithmetic"):
        execute.run(broken)
