"""Checklist 11: nothing grows."""

import itertools
import os
import threading

import pytest

from serving.service import soak


@pytest.mark.parametrize(
    ("minutes", "memory"),
    [("0.025", "None"), pytest.param("10", "1", marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
    ids=["seconds", "10"],
)
def test_nothing_grows(start, capsys, monkeypatch, minutes, memory):
    """Open files, compilations, pages and slots; memory only over minutes. The clients live in the same process."""
    running = start(seconds=0.0, queue_limit=200)
    if memory == "None":
        monkeypatch.setattr(soak, "POINTS", 8)
    flags = ["--target", running.address, "--pid", str(os.getpid()), "--minutes", minutes]
    assert soak.main([*flags, "--mib-per-thousand", memory]) == 0, capsys.readouterr()
    running.books_balance()


def test_what_grows_is_named(start, capsys, monkeypatch):
    running = start(seconds=0.0, queue_limit=200)
    memory, files = itertools.count(), itertools.count()
    monkeypatch.setattr(soak, "resident_mib", lambda pid: 100.0 * next(memory))
    monkeypatch.setattr(soak, "open_files", lambda pid: next(files))
    monkeypatch.setattr(soak, "POINTS", 8)
    flags = ["--target", running.address, "--pid", str(os.getpid()), "--minutes", "0.005"]
    assert soak.main(flags) == 1
    err = capsys.readouterr().err
    assert "memory grows by" in err
    assert "open files grow from" in err
    assert err.count("\n") == 2


def test_who_breaks_off_leaves_no_client_behind(start, monkeypatch):
    """Ctrl-C at the worst moment, while the clients wait for a reading to end."""
    running = start(seconds=0.0, queue_limit=200)

    def break_off(client, end):
        raise KeyboardInterrupt

    monkeypatch.setattr(soak, "settle", break_off)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        soak.soak(
            soak.Flags(target=running.address, pid=os.getpid(), minutes=0.01), soak.Server(running.address, os.getpid())
        )
    # Those of gRPC may take a moment longer.
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.name.endswith("(run)")]
    running.books_balance()


def test_growth_is_the_slope_after_the_warm_up():
    requests = list(range(0, 10_000, 100))
    memory = [500.0 if n < 2000 else 100 + n * 0.002 for n in requests]
    assert soak.growth(requests, memory) == pytest.approx(2.0)


def test_leftovers_are_named():
    class Client:
        def stats(self):
            return {"running": 0, "waiting": 0, "pages_used": 3, "slots_used": 0, "compilations": 1}

        def flush(self):
            return 0

    assert soak.leftovers(Client(), 0) == [
        "pages_used is 3 at the end, expected 0",
        "compilations is 1 at the end, expected 0",
    ]


def test_the_transport_is_measured_without_a_model(capsys):
    """Checklist 18; the figure itself is the program's to print, on a machine that does nothing else."""
    import json

    from serving.service import transport

    assert transport.main(["--streams", "4", "--tokens", "50", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["tokens_per_second"] * figures["server_cpu_us_per_token"] > 0
    assert 50 / 51 <= figures["tokens_per_message"] <= 50  # the last message of a call has none
