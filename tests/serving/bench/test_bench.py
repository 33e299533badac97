"""Load that is put on, what is counted of it, and what is printed."""

import asyncio
import itertools
import json
import math

import pytest

from serving.bench import __main__ as bench
from serving.bench import load
from serving.bench.records import Record, percentile, summary
from serving.bench.target import RequestFailed, connect
from serving.bench.workload import Workload, arrivals
from tests.serving.bench.conftest import Answers


def test_percentiles_are_values_that_occurred():
    ordered = [float(n) for n in range(1, 11)]
    assert [percentile(ordered, p) for p in (0, 1, 50, 51, 90, 91, 100)] == [1, 1, 5, 6, 9, 10, 10]
    assert math.isnan(percentile([], 50))


def test_figures_by_hand():
    fast = Record(0.0, [0.5, 0.6, 0.8], [2, 1, 1], 0.8, "ok")
    late = Record(1.0, [1.25], [3], 1.3, "ok")
    lost = Record(1.5, [1.75], [1], 1.8, "UNAVAILABLE")
    figures = summary([fast, late, lost], 2.0)
    assert figures["errors"] == {"UNAVAILABLE": 1}
    assert (figures["completed"], figures["output_tokens"]) == (2, 8)
    assert figures["requests_per_second"] == 1.0
    assert figures["ttft_ms"] == pytest.approx(
        {"mean": 375, "p50": 250, "p90": 500, "p95": 500, "p99": 500, "max": 500}
    )
    assert figures["itl_ms"]["p50"] == pytest.approx(100)
    assert figures["itl_ms"]["max"] == pytest.approx(200)
    assert figures["tpot_ms"]["mean"] == pytest.approx(150)  # 0.3 s for the two tokens after the first message
    assert figures["latency_ms"]["max"] == pytest.approx(800)


def test_prompts_are_repeatable_and_share_what_they_should():
    workload = Workload(prompt_tokens=10, shared_tokens=4, vocabulary=50, seed=3)
    first, second = workload.prompts(2)
    assert [first, second] == list(workload.prompts(2))
    assert first.ids[:4] == second.ids[:4]
    assert first.ids[4:] != second.ids[4:]
    assert len(first.ids) == 10
    assert max(first.ids) < 50
    assert first.text.split()[:2] == second.text.split()[:2]
    assert len(first.text.split()) == 5


def test_arrivals_have_the_asked_rate():
    times = arrivals(20.0, 4000, seed=1)
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(20.0, rel=0.05)
    gaps = [late - early for early, late in itertools.pairwise(times)]
    over = sum(gap > 1 / 20 for gap in gaps) / len(gaps)
    assert over == pytest.approx(math.exp(-1), abs=0.03)  # of a Poisson process


class Slow:
    """A target that counts how many requests it has at a time."""

    def __init__(self, seconds):
        self.seconds, self.running, self.most = seconds, 0, 0

    async def stream(self, prompt, max_tokens):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1
        yield max_tokens


def test_readers_ask_one_thing_at_a_time():
    target, records = Slow(0.01), []
    prompts = list(Workload(prompt_tokens=2).prompts(9))
    asyncio.run(load.closed(target, prompts, 5, 3, records))
    assert target.most == 3
    assert [record.completion_tokens for record in records] == [5] * 9


def test_a_rate_does_not_wait_for_answers():
    target, records = Slow(0.1), []
    prompts = list(Workload(prompt_tokens=2).prompts(6))
    asyncio.run(load.opened(target, prompts, 5, [0.0, 0.01, 0.01, 0.02, 0.02, 0.03], records))
    assert target.most == 6
    assert [record.scheduled for record in records] == [0.0, 0.01, 0.01, 0.02, 0.02, 0.03]
    # Being sent late counts: the time runs from when the request was due.
    assert all(record.arrivals[0] - record.scheduled >= 0.1 - 1e-3 for record in records)


@pytest.mark.parametrize("protocol", ["vllm-grpc", "openai"])
def test_protocols(serve, protocol):
    answers = Answers(tokens=7, size=2, refuse=1)
    address = serve(protocol, answers)
    [prompt] = Workload(prompt_tokens=6, vocabulary=40).prompts(1)

    async def ask():
        target = connect(protocol, address, token="t")
        try:
            about = await target.about()
            with pytest.raises(RequestFailed, match=r"RESOURCE_EXHAUSTED|HTTP 429"):
                [size async for size in target.stream(prompt, 9)]
            return about, [[size async for size in target.stream(prompt, limit)] for limit in (9, 3)]
        finally:
            await target.close()

    about, (whole, short) = asyncio.run(ask())
    assert about.model == "stub"
    assert (sum(whole), sum(short)) == (7, 3)
    assert len(whole) >= 4
    request = answers.requests[-1]
    if protocol == "vllm-grpc":
        assert list(request.tokenized.input_ids) == prompt.ids
        assert request.sampling_params.ignore_eos
    else:
        assert request["prompt"] == prompt.text
        assert request["model"] == "stub"


def test_nobody_there(capsys):
    for protocol in ("vllm-grpc", "openai"):
        assert bench.main(["--address", "127.0.0.1:1", "--protocol", protocol]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"error: {protocol} at 127.0.0.1:1 does not answer: ")
        assert error.count("\n") == 1


def test_a_protocol_nobody_speaks():
    with pytest.raises(ValueError, match="protocol is 'smoke', expected one of vllm-grpc, k3jax"):
        connect("smoke", "localhost:1")


def test_the_program(serve, tmp_path, capsys):
    answers = Answers(tokens=4, size=1, refuse=2)
    address = serve("vllm-grpc", answers)
    files = ["--json", str(tmp_path / "load.json"), "--plot", str(tmp_path / "load.png")]
    size = [
        "--requests",
        "12",
        "--output-tokens",
        "4",
        "--prompt-tokens",
        "8",
        "--shared-tokens",
        "3",
        "--warm-up",
        "1",
    ]
    assert bench.main(["--address", address, "--concurrency", "1", "4", "--rate", "400", *size, *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["1", "clients"], ["4", "clients"], ["400", "/s"]]
    written = json.loads((tmp_path / "load.json").read_text())
    assert written["settings"]["vocabulary"] == 300
    one, four, rate = written["runs"]
    assert one["errors"] == {"RESOURCE_EXHAUSTED": 1}
    assert (four["completed"], four["output_tokens"], rate["completed"]) == (12, 48, 12)
    assert len(answers.requests) == 37
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    # Each run has prompts of its own that begin alike.
    begins = {tuple(request.tokenized.input_ids[:3]) for request in answers.requests[1:]}
    assert len(begins) == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--prompt-tokens", "4", "--shared-tokens", "5"], "--prompt-tokens 4 --shared-tokens 5"),
        (["--requests", "0"], "--requests 0: expected at least 1"),
        (["--rate", "0"], "a load of 0"),
        (["--address", "https://localhost:1", "--protocol", "openai"], "TLS is not spoken here"),
    ],
)
def test_bad_usage(arguments, text, capsys):
    assert bench.main(arguments) in (1, 2)
    assert text in capsys.readouterr().err
