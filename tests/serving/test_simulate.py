import dataclasses
import json
import subprocess
import sys

import pytest

from k3jax.config import k3
from serving.costs import DEVICES, ModelCost
from serving.prefix_cache import CacheOptions
from serving.scheduler import SchedulerOptions
from serving.simulate import POLICIES, SegmentPath, build, default_shapes, divide_memory, simulate, table
from serving.trace import AgenticOptions, TraceError, TraceRequest, agentic, parse, read, write

COST = ModelCost.of(k3())
DEVICE = DEVICES["gb300x16"]
TRACE = AgenticOptions(requests=160, sessions_per_second=0.2, systems=3, projects=4, longest=200_000)


def run(policy, trace, gib=40.0, **options):
    cache = divide_memory(COST, gib * 2**30, 0.5, 256, 64)
    scheduling = SchedulerOptions(
        rows=16, token_budget=8192 + 16, shapes=default_shapes(8192), max_length=2**20, max_waiting_tokens=2**40
    )
    core = build(policy, COST, DEVICE, cache, dataclasses.replace(scheduling, **options))
    return simulate(policy, trace, core)


def test_traces_repeat_and_are_in_order(tmp_path):
    first, second = list(agentic(TRACE)), list(agentic(TRACE))
    assert first == second
    assert [item.time for item in first] == sorted(item.time for item in first)
    write(tmp_path / "t.jsonl", first)
    assert list(read(tmp_path / "t.jsonl")) == first
    assert list(agentic(dataclasses.replace(TRACE, seed=1))) != first


def test_prompts_repeat_what_came_before():
    """A turn's prompt begins with the last turn's prompt and output."""
    items = list(agentic(TRACE))
    outputs = {item.output[0]: item for item in items}
    continued = [(outputs[id], item) for item in items for id, _ in item.prompt[:-1] if id in outputs]
    assert len(continued) > 60
    for earlier, later in continued:
        whole = (*earlier.prompt, earlier.output)
        assert later.prompt[: len(whole)] == whole


def test_mooncake_records():
    record = {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 9]}
    assert parse(record, 3) == TraceRequest(1.5, ((4, 512), (5, 512), (9, 76)), (-4, 7))


def test_a_bad_line_is_named(tmp_path):
    good = TraceRequest(0.0, ((1, 5),), (2, 3)).line()
    (tmp_path / "t").write_text(f"{good}\n{json.dumps({'time': 1})}\n")
    with pytest.raises(TraceError, match="line 2"):
        list(read(tmp_path / "t"))


def path_units(segments, unit=4, known=None):
    return SegmentPath("s", segments, unit, known).units


def test_segment_paths_name_content():
    """Units agree exactly as far as the tokens do, and do not depend on how the path was made."""
    base = path_units(((1, 10), (2, 9)))
    assert len(base) == 4
    assert path_units(((1, 10), (3, 9)))[:2] == base[:2]
    assert path_units(((1, 10), (3, 9)))[2] != base[2]
    known = SegmentPath("s", ((1, 10), (2, 9)), 4)
    longer = ((1, 10), (2, 9), (5, 8))
    assert path_units(longer, known=known) == path_units(longer)
    assert path_units(((1, 10), (4, 9), (5, 8)), known=known) == path_units(((1, 10), (4, 9), (5, 8)))
    assert SegmentPath("other", ((1, 10), (2, 9)), 4).units[0] != base[0]


def test_segment_tails():
    a, b, c = (SegmentPath("s", ((1, 10), (n, 9)), 4) for n in (2, 2, 3))
    assert a.tail(2, 2) == b.tail(2, 2) == c.tail(2, 2)
    assert a.tail(2, 3) != c.tail(2, 3)
    assert a.tail(2, 3) != a.tail(2, 2)


def test_no_memory_pressure_hits_what_the_trace_repeats():
    """With unlimited memory the hit rate is what the segments say: all but new segments and remainders of units."""
    items = [TraceRequest(100.0 * n, ((1, 640), *((m, 64) for m in range(10, 10 + n))), (99 - n, 4)) for n in range(5)]
    report = run("lru:prompt", items, gib=400.0)
    cached = sum(((item.tokens - 64 - 1) // 64 * 64 for item in items[1:]), 0)
    assert report.hit_rate == pytest.approx(cached / sum(item.tokens for item in items), abs=0.03)


def test_policies_on_an_agentic_trace():
    """Equal and scarce memory: marconi beats intervals alone, superseding pays; `simulate` checks the books."""
    trace = list(agentic(TRACE))
    names = (
        "lru:interval=32768",
        "lru:prompt",
        "lru:prompt,marconi,decode-end,supersede",
        "flop:prompt,marconi,decode-end",
    )
    reports = {name: run(name, trace) for name in names}
    assert all(report.requests == len(trace) for report in reports.values())
    rates = {name: report.hit_rate for name, report in reports.items()}
    assert rates["lru:prompt,marconi,decode-end,supersede"] > rates["lru:prompt"] > rates["lru:interval=32768"]
    text = "\n".join(table(reports.values()))
    assert all(name in text for name in names)


def test_memory_is_divided():
    cache = divide_memory(COST, 100 * 2**30, 0.4, 256, 64)
    states, latents = (cache.slots - 1) * COST.state_bytes, (cache.pages - 1) * 256 * COST.latent_bytes_per_token
    assert states == pytest.approx(40 * 2**30, rel=0.02)
    assert latents == pytest.approx(60 * 2**30, rel=0.02)
    with pytest.raises(ValueError, match="for states is 2, expected one between 0 and 1"):
        divide_memory(COST, 2**30, 2, 256, 64)


def test_a_trace_without_requests_is_refused():
    core = build("lru:prompt", COST, DEVICE, CacheOptions(pages=9, slots=9), SchedulerOptions())
    with pytest.raises(ValueError, match="the trace has no requests"):
        simulate("lru:prompt", [], core)


def test_a_bad_policy_is_named():
    with pytest.raises(ValueError, match="'lfu', expected lru"):
        build("lfu:prompt", COST, DEVICE, CacheOptions(pages=9, slots=9), SchedulerOptions())


def test_command_line(tmp_path):
    command = [sys.executable, "-m", "serving.simulate"]
    args = ["agentic", "--requests", "30", "--policies", "lru:prompt", "--save", str(tmp_path / "t.jsonl")]
    done = subprocess.run([*command, *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "lru:prompt" in done.stdout
    assert len((tmp_path / "t.jsonl").read_text().splitlines()) == 30
    bad = subprocess.run([*command, str(tmp_path / "none")], capture_output=True, text=True, timeout=120)
    assert bad.returncode == 2
    assert len(bad.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_20000_requests(policy):
    report = run(policy, agentic(AgenticOptions(requests=20_000, sessions_per_second=0.1)), gib=400.0)
    assert report.requests == 20_000
