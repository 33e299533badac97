"""The benchmark program without a GPU: the gate alone, and nothing on red."""

import json

import pytest

from k3jax import bench
from pallas.benchmark import Check, Measurement, Peer
from pallas.kda import bench as kda_bench


@pytest.fixture
def gate(monkeypatch):
    """Replaces the slow gate by one with the given errors."""

    def install(*errors):
        checks = [Check(f"check {index}", error, 1e-2) for index, error in enumerate(errors)]
        monkeypatch.setattr(kda_bench, "gate", lambda implementation: checks)

    return install


def test_green_gate_on_a_cpu_says_that_no_gpu_was_measured(gate, capsys, tmp_path):
    gate(1e-3, 0.0)
    assert bench.main(["kernels", "--op", "kda", "--json", str(tmp_path / "kda.json")]) == 0
    out = capsys.readouterr().out
    assert "2 checks passed" in out
    assert "no GPU was measured" in out
    assert not (tmp_path / "kda.json").exists()


@pytest.mark.parametrize("error", [2e-2, float("inf"), float("nan")])
def test_red_gate_prints_no_table(error, gate, capsys):
    gate(1e-3, error)
    assert bench.main(["kernels"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "check 1" in captured.err


def test_a_gpu_gets_a_table_and_a_file(gate, capsys, tmp_path, monkeypatch):
    gate(1e-3)
    line = Measurement("decode", 5.0, 2.5, 5.5, (Peer("someone", 10.0), Peer("absent: not installed", None)))
    monkeypatch.setattr(kda_bench, "measure", lambda: iter([line, line._replace(goal=None, peers=())]))
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert bench.main(["kernels", "--json", str(tmp_path / "kda.json")]) == 0
    out = capsys.readouterr().out
    assert "50%" in out
    assert "2.00" in out
    assert "absent: not installed" in out
    assert json.loads((tmp_path / "kda.json").read_text())["measurements"][0]["measured"] == 5.0


@pytest.mark.parametrize("arguments", [["kernels", "--op", "nothing"], ["nothing"], []])
def test_wrong_usage_exits_with_2(arguments, capsys):
    try:
        code = bench.main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.slow
def test_the_real_gate_is_green():
    assert all(check.passed for check in kda_bench.gate("xla"))
