"""The house rules that a reader relies on: who imports whom, and how large things get."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("k3jax", "pallas", "checkpoints", "serving")
FORBIDDEN = {
    "pallas": {"k3jax", "checkpoints", "serving"},
    "k3jax": {"serving"},
    "checkpoints": {"serving"},
}
SEEN_BY_CHECKPOINTS = {"k3jax.config", "k3jax.params", "k3jax.program", "k3jax.sharding"}
PROGRAMS = {"api", "bench", "decode", "plan", "verify"}
"""Modules of k3jax that may read checkpoints, besides k3jax.train."""

FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            module = node.module or ""
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def names(path):
    return [path.relative_to(ROOT).as_posix().removesuffix(".py").replace("/", "."), path.relative_to(ROOT).parts[0]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: names(path)[0])
def test_imports_go_with_the_grain(path):
    module, package = names(path)
    for name, line in imported(path):
        root = name.split(".")[0]
        assert root not in FORBIDDEN.get(package, set()), f"{path}:{line} imports {name}"
        if package == "checkpoints" and root == "k3jax":
            assert any(f"{name}.".startswith(f"{seen}.") for seen in SEEN_BY_CHECKPOINTS), (
                f"{path}:{line} imports {name}"
            )
        if package == "k3jax" and root == "checkpoints":
            inside = module.split(".")
            assert inside[1] in PROGRAMS or inside[1] == "train", f"{path}:{line} imports {name}"
        assert root != "pickle", f"{path}:{line} imports {name}"
        # Rivals in a benchmark run are the one place where torch may appear.
        assert root != "torch" or path.name == "peers.py", f"{path}:{line} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: names(path)[0])
def test_sizes(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 600
    limit = 200 if "mosaic" in path.name else 120
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < limit, f"{path}:{node.lineno} {node.name}"


def test_names_say_what_is_inside():
    vague = {"utils", "util", "helpers", "common", "misc", "manager"}
    assert not [path for path in FILES if vague & set(path.stem.split("_"))]
