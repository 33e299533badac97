"""The comparison of doors: what is started for it, and what is said of it."""

import contextlib
import types

import pytest

from serving.bench import overhead


def run(load, speed, **fields):
    return {
        "load": load,
        "output_tokens_per_second": speed,
        "ttft_ms": {"p50": 5.0, "p99": 9.0},
        "errors": {},
        **fields,
    }


def test_lines_give_shares_of_the_engine():
    engine = [run("1 clients", 100.0), run("4 clients", 300.0)]
    one, four = overhead.lines("vllm-grpc", [run("1 clients", 95.0), run("4 clients", 60.0, errors={"X": 2})], engine)
    assert "95.0% of the engine" in one
    assert "20.0% of the engine" in four
    assert four.endswith("2 errors")
    [empty] = overhead.lines("openai", [run("1 clients", 0.0, ttft_ms={})], engine[:1])
    assert "nan" in empty


def test_medians_of_several_rounds():
    rounds = [[run("1 clients", speed, ttft_ms=ttft, errors={"X": 1})] for speed, ttft in SPEEDS]
    [median] = overhead.middle(rounds)
    assert median["output_tokens_per_second"] == 20.0
    assert median["ttft_ms"] == {"p50": 2.0, "p99": 5.0}
    [line] = overhead.lines("vllm-grpc", [median], [run("1 clients", 40.0)])
    assert "50.0% of the engine" in line
    assert line.endswith("3 errors")


SPEEDS = ((10.0, {"p50": 1.0, "p99": 4.0}), (90.0, {"p50": 3.0, "p99": 6.0}), (20.0, {}))


@pytest.mark.parametrize("gateway", [True, False])
def test_every_door_gets_the_same_load(monkeypatch, gateway):
    started, ended, asked = [], [], []

    @contextlib.contextmanager
    def running(command, **options):
        started.append(command)
        yield types.SimpleNamespace(args=command)
        ended.append(command)

    monkeypatch.setattr(overhead.processes, "running", running)
    monkeypatch.setattr(overhead.processes, "service_address", lambda process: "127.0.0.1:5")
    monkeypatch.setattr(overhead.processes, "wait_for_models", lambda url, processes: ["nano"])

    def measure(flags):
        asked.append((list(flags), len(started)))
        return [run("2 clients", 10.0)]

    options = overhead.Options(streams=(2,), requests=3, max_num_seqs=7, gateway=gateway, repeats=2)
    doors = [door for door, _ in overhead.measured(options, measure)]
    assert doors == 2 * ["engine", "vllm-grpc", "k3jax.v1", *(["openai"] if gateway else [])]
    assert {running for _, running in asked} == {2 if gateway else 1}
    load = asked[0][0][: asked[0][0].index("--seed")]
    assert all(flags[: len(load)] == load for flags, _ in asked)
    assert load[:2] == ["--concurrency", "2"]
    # No run finds prompts of another in the prefix cache.
    assert len({flags[len(load) + 1] for flags, _ in asked}) == len(asked)
    sizes = ["--max-num-seqs", "7", "--max-length", "1024"]
    assert asked[0][0][-4:] == sizes
    assert started[0][-4:] == sizes
    assert ended == started[::-1]


def test_a_run_that_fails_says_why(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "loading" >&2\necho "error: $1 $2 $3: nobody there" >&2\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setattr(overhead.sys, "executable", str(program))
    with pytest.raises(RuntimeError, match=r"serving.bench --rate 2 failed: error: -m serving.bench --rate: nobody"):
        overhead.run_bench(["--rate", "2"])
